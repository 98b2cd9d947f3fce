"""The HTTP interface: the Open Inference Protocol v2, `/metrics`, and a status page."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from torchrelay import __version__
from torchrelay.config import Switching
from torchrelay.errors import (
    ArgumentError,
    CapacityError,
    ConfigError,
    DataError,
    ModelError,
    NotFoundError,
    OperationTimeoutError,
    OverloadedError,
    TorchRelayError,
    UnavailableError,
    UnsupportedError,
)
from torchrelay.switching._guard import Guard
from torchrelay.switching._json_process import LARGE_BYTES, JsonProcess
from torchrelay.switching._metrics import Metrics
from torchrelay.switching._models_file import ModelEntry
from torchrelay.switching._queue import Reply
from torchrelay.switching._store import ModelStore, StoredModel
from torchrelay.switching._switcher import Switcher
from torchrelay.switching._tensors import HEADER, Body, datatype_of, decode, encode, parse_body

__all__ = ["create_app"]

_log = logging.getLogger("torchrelay.switching")

_HEADER_BYTES = 1 << 20  # JSON around the tensors of a request
_BODY_TIMEOUT_S = 60.0
_STALL_TIMEOUT_S = 10.0
_BODIES = 4  # bodies of the largest size that may be in memory at once
_STATUS = {
    ArgumentError: 400,
    ConfigError: 400,
    DataError: 400,
    UnsupportedError: 400,
    NotFoundError: 404,
    CapacityError: 413,
    OverloadedError: 429,
    UnavailableError: 503,
    OperationTimeoutError: 504,
}


def create_app(
    switcher: Switcher, store: ModelStore, entries: dict[str, ModelEntry], settings: Switching
) -> Starlette:
    """Return the application; it closes neither `switcher` nor `store`.

    Args:
        entries: the models that clients may load by name, if `settings` allow it.
    """
    server = _Server(switcher, store, entries, settings)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await server.json.close()

    return Starlette(
        routes=[
            Route(path, endpoint, methods=[method]) for method, path, endpoint in server.routes()
        ],
        middleware=[Middleware(Guard, settings=settings)],
        exception_handlers={
            TorchRelayError: _on_error,
            HTTPException: _on_http_error,
            Exception: _on_bug,
        },
        lifespan=lifespan,
    )


async def _on_error(_: Request, error: Exception) -> Response:
    code = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
    headers = {"Retry-After": "1"} if code in (429, 503) else None
    return JSONResponse({"error": str(error), "type": type(error).__name__}, code, headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = {
        404: f"the server has no path {request.url.path}",
        405: f"{request.url.path} does not take {request.method}",
    }.get(error.status_code, error.detail)
    return JSONResponse({"error": sentence}, error.status_code, error.headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse({"error": f"the server failed: {type(error).__name__}: {error}"}, 500)


class _Server:
    """The endpoints over one switcher."""

    def __init__(
        self,
        switcher: Switcher,
        store: ModelStore,
        entries: dict[str, ModelEntry],
        settings: Switching,
    ) -> None:
        self.json = JsonProcess()
        self._switcher = switcher
        self._store = store
        self._entries = entries
        self._is_controlled = settings.repository_control
        self._max_bytes = settings.request_bytes + _HEADER_BYTES
        self._free_bytes = _BODIES * self._max_bytes
        self._metrics = Metrics(switcher)
        self._loading = {name: asyncio.Lock() for name in entries}
        self._page = Path(__file__).with_name("status.html").read_text()

    def routes(self) -> list[tuple[str, str, Callable[..., Awaitable[Response]]]]:
        model, version = "/v2/models/{name}", "/versions/{version}"
        return [
            ("GET", "/", self.page),
            ("GET", "/status.json", self.status),
            ("GET", "/metrics", self.metrics),
            ("GET", "/v2", self.server_metadata),
            ("GET", "/v2/health/live", self.live),
            ("GET", "/v2/health/ready", self.ready),
            ("GET", model, self.metadata),
            ("GET", model + version, self.metadata),
            ("GET", model + "/ready", self.model_ready),
            ("GET", model + version + "/ready", self.model_ready),
            ("POST", model + "/infer", self.infer),
            ("POST", model + version + "/infer", self.infer),
            ("POST", "/v2/repository/index", self.index),
            ("POST", "/v2/repository/models/{name}/load", self.load),
            ("POST", "/v2/repository/models/{name}/unload", self.unload),
        ]

    async def page(self, _: Request) -> Response:
        return HTMLResponse(self._page)

    async def status(self, _: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(self._switcher.status))

    async def metrics(self, _: Request) -> Response:
        body, content_type = await asyncio.to_thread(self._metrics.render)
        return Response(body, headers={"Content-Type": content_type})

    async def server_metadata(self, _: Request) -> Response:
        extensions = ["binary_tensor_data", "model_repository"]
        return JSONResponse(
            {"name": "torchrelay", "version": __version__, "extensions": extensions}
        )

    async def live(self, _: Request) -> Response:
        failure = self._switcher.failure
        return JSONResponse({"live": failure is None}, 200 if failure is None else 503)

    async def ready(self, _: Request) -> Response:
        """Return status 200 if every loaded model can answer."""
        names = self._switcher.models()
        ready = bool(names) and all(self._switcher.is_ready(name) for name in names)
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def model_ready(self, request: Request) -> Response:
        name = self._stored(request).name
        ready = self._switcher.is_ready(name)
        return JSONResponse({"name": name, "ready": ready}, 200 if ready else 503)

    async def metadata(self, request: Request) -> Response:
        model = self._stored(request)
        inputs = [
            {"name": spec.name, "datatype": datatype_of(spec.dtype), "shape": list(spec.shape)}
            for spec in model.inputs
        ]
        return JSONResponse(
            {
                "name": model.name,
                "versions": [str(model.version)],
                "platform": "pytorch_torchrelay",
                "inputs": inputs,
                "outputs": self._metrics.outputs_of(model.name),
            }
        )

    async def infer(self, request: Request) -> Response:
        name = self._stored(request).name
        async with self._body(request) as body:
            header, raw = await self._parsed(request, body)
            inputs = decode(header.get("inputs"), raw)
        options, wanted = _options(header.get("parameters", {})), _wanted(header)
        future = asyncio.wrap_future(self._switcher.submit_owned(name, inputs, **options))
        reply = await _unless_gone(request, future)
        _check_datatypes(reply)
        self._metrics.observe(reply)
        return await self._answer(header, wanted, reply)

    async def index(self, request: Request) -> Response:
        header = await self._arguments(request)
        loaded = self._switcher.models()
        models = []
        for name in sorted({*self._entries, *self._store.names()}):
            is_ready = self._switcher.is_ready(name)
            if is_ready or not header.get("ready"):
                is_stored = name in self._store.names()
                version = str(self._store.get(name).version) if is_stored else ""
                state = "READY" if is_ready else "LOADING" if name in loaded else "UNAVAILABLE"
                models.append({"name": name, "version": version, "state": state, "reason": ""})
        return JSONResponse(models)

    async def load(self, request: Request) -> Response:
        """Load or reload a model of the models file; parameters are refused."""
        entry = await self._controlled(request, ())
        async with self._loading[entry.name]:
            await asyncio.to_thread(entry.add_to, self._store)
            await asyncio.to_thread(self._switcher.load, entry.name, priority=entry.priority)
        return JSONResponse({})

    async def unload(self, request: Request) -> Response:
        # Not after a load that is in progress: that may hang, and unloading ends it.
        entry = await self._controlled(request, ("unload_dependents",))
        await asyncio.to_thread(self._switcher.unload, entry.name)
        self._store.remove(entry.name)
        return JSONResponse({})

    async def _controlled(self, request: Request, parameters: tuple[str, ...]) -> ModelEntry:
        """Return the entry of the model that a repository call names."""
        if not self._is_controlled:
            raise HTTPException(
                403,
                "clients may not load or unload models; start the server with --repository-control",
            )
        given = (await self._arguments(request)).get("parameters", {})
        _check_known("parameter", given, parameters)
        name = request.path_params["name"]
        if name not in self._entries:
            known = ", ".join(sorted(self._entries)) or "none"
            raise NotFoundError(f"the models file has no model {name!r}; it has {known}")
        return self._entries[name]

    async def _arguments(self, request: Request) -> dict[str, Any]:
        """Return the JSON object of a body that may be empty."""
        async with self._body(request) as body:
            return parse_body(body or b"{}", None)[0]

    def _stored(self, request: Request) -> StoredModel:
        name, version = request.path_params["name"], request.path_params.get("version", "")
        model = self._store.get(name)
        if version not in ("", str(model.version)):
            raise NotFoundError(f"model {name!r} has version {model.version}, not {version}")
        return model

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        """Read the body, bounded in size and time. Within the block it counts towards the bytes
        that all bodies may take.
        """
        parts, size = [], 0
        deadline = asyncio.get_running_loop().time() + _BODY_TIMEOUT_S
        stream = request.stream()
        try:
            while True:
                left_s = deadline - asyncio.get_running_loop().time()
                part = await asyncio.wait_for(anext(stream, None), min(left_s, _STALL_TIMEOUT_S))
                if part is None:
                    break
                size += len(part)
                self._free_bytes -= len(part)
                if size > self._max_bytes:
                    raise CapacityError(f"the request body exceeds {self._max_bytes} bytes")
                if self._free_bytes < 0:
                    raise OverloadedError(
                        f"bodies of {_BODIES * self._max_bytes} bytes are being read; try again"
                    )
                parts.append(part)
            yield b"".join(parts)
        except asyncio.TimeoutError as error:
            raise OperationTimeoutError(
                f"the body did not arrive: {size} bytes came; at most {_STALL_TIMEOUT_S:g} s may "
                f"pass between parts, and {_BODY_TIMEOUT_S:g} s in all"
            ) from error
        except ClientDisconnect as error:
            raise UnavailableError("the client closed its connection") from error
        finally:
            self._free_bytes += size

    async def _parsed(self, request: Request, body: bytes) -> Body:
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise HTTPException(415, "compressed bodies are not served; send the body as it is")
        length = request.headers.get(HEADER)
        if length is None and len(body) > LARGE_BYTES:
            return await self.json.parse(body)
        return parse_body(body, length)

    async def _answer(self, header: dict[str, Any], wanted: _Wanted, reply: Reply) -> Response:
        """Return the requested outputs, in JSON or binary as requested."""
        content: dict[str, Any] = {
            "model_name": reply.model,
            "model_version": str(reply.version),
            "parameters": {
                "queue_ms": round(reply.queue_s * 1e3, 3),
                "switch_ms": round(reply.switch_s * 1e3, 3),
                "compute_ms": round(reply.compute_s * 1e3, 3),
                "copied_bytes": reply.copied_bytes,
            },
        }
        if isinstance(header.get("id"), str):
            content["id"] = header["id"]
        outputs, binary = _selected(wanted, reply)
        in_json = [tensor for name, tensor in outputs.items() if name not in binary]
        _check_finite(in_json, reply.model)
        is_large = not binary and sum(tensor.nbytes for tensor in in_json) > LARGE_BYTES
        content["outputs"], raw = encode(outputs, set(outputs) if is_large else binary)
        text = json.dumps(content).encode()
        body = b"".join([text, *raw])
        if is_large:
            body = await self.json.format(body, len(text))
        if not binary:
            return Response(body, media_type="application/json")
        headers = {HEADER: str(len(text))}
        return Response(body, headers=headers, media_type="application/octet-stream")


async def _unless_gone(request: Request, future: asyncio.Future[Reply]) -> Reply:
    """Wait for the reply; take the request off the queue if the client closes its connection."""
    while True:
        done, _ = await asyncio.wait([future], timeout=0.5)
        if done:
            return future.result()
        if await request.is_disconnected():
            future.cancel()
            raise UnavailableError("the client closed its connection")


def _options(parameters: object) -> dict[str, Any]:
    """Return the request's priority, deadline and client; `timeout` is in microseconds, as in
    Triton.
    """
    if not isinstance(parameters, dict):
        raise ArgumentError("parameters must be an object")
    _check_known("parameter", parameters, ("priority", "timeout", "client", "binary_data_output"))
    options: dict[str, Any] = {}
    for key, name, kind in (("priority", "priority", int), ("client", "client", str)):
        if key in parameters:
            if type(parameters[key]) is not kind:
                raise ArgumentError(
                    f"parameter {key} = {parameters[key]!r}: must be a {kind.__name__}"
                )
            options[name] = parameters[key]
    timeout = parameters.get("timeout")
    if timeout is not None:
        if type(timeout) is not int or not 0 <= timeout < 2**63:
            raise ArgumentError(f"parameter timeout = {timeout!r}: must be microseconds")
        options["deadline_s"] = timeout * 1e-6
    return options


_Wanted = tuple[dict[str, bool] | None, bool]


def _wanted(header: dict[str, Any]) -> _Wanted:
    """Return the requested outputs, each with whether it travels in binary; None means all. And
    whether that is the default.
    """
    all_binary = header.get("parameters", {}).get("binary_data_output", False)
    entries = header.get("outputs")
    if entries is None:
        return None, bool(all_binary)
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise ArgumentError("outputs must be a list of objects")
    wanted = {}
    for entry in entries:
        name, parameters = entry.get("name"), entry.get("parameters", {})
        if not isinstance(name, str):
            raise ArgumentError(f"the name of an output is {name!r}; it must be a string")
        _check_known(f"output {name!r}: parameter", parameters, ("binary_data",))
        wanted[name] = bool(parameters.get("binary_data", all_binary))
    return wanted, bool(all_binary)


def _selected(wanted: _Wanted, reply: Reply) -> tuple[dict[str, torch.Tensor], set[str]]:
    chosen, all_binary = wanted
    if chosen is None:
        return reply.outputs, set(reply.outputs) if all_binary else set()
    for name in chosen:
        if name not in reply.outputs:
            raise ArgumentError(
                f"model {reply.model!r} has no output {name!r}; it has {', '.join(reply.outputs)}"
            )
    outputs = {name: reply.outputs[name] for name in chosen}
    return outputs, {name for name, is_binary in chosen.items() if is_binary}


def _check_known(what: str, given: object, known: tuple[str, ...]) -> None:
    """Raise if a request asks for something that this server would have to ignore."""
    if not isinstance(given, dict):
        raise ArgumentError(f"{what}s must be an object")
    for name in given.keys() - set(known):
        choices = f"choose from {', '.join(known)}" if known else "none is supported here"
        raise UnsupportedError(f"{what} {name!r} is not supported; {choices}")


def _check_datatypes(reply: Reply) -> None:
    try:
        for tensor in reply.outputs.values():
            datatype_of(tensor.dtype)
    except UnsupportedError as error:
        raise ModelError(f"an output of model {reply.model!r} cannot be sent: {error}") from error


def _check_finite(tensors: list[torch.Tensor], model: str) -> None:
    for tensor in tensors:
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UnsupportedError(
                f"an output of model {model!r} has infinite values or NaN, which JSON cannot "
                "represent; ask for it with the parameter binary_data"
            )

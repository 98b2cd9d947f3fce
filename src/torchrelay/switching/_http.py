"""The HTTP interface: the Open Inference Protocol v2, `/metrics`, and a status page."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

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
from torchrelay.switching._connections import ON_DISCONNECT
from torchrelay.switching._guard import Guard
from torchrelay.switching._json_process import LARGE_BYTES, JsonProcess
from torchrelay.switching._metrics import Metrics
from torchrelay.switching._models_file import ModelEntry
from torchrelay.switching._queue import Reply
from torchrelay.switching._store import ModelStore, StoredModel
from torchrelay.switching._switcher import Switcher
from torchrelay.switching._tensors import (
    HEADER,
    Body,
    datatype_of,
    decode,
    dump,
    encode,
    parse_body,
)

__all__ = ["create_app"]

_log = logging.getLogger("torchrelay.switching")

_HEADER_BYTES = 1 << 20  # JSON around the tensors of a request
_BODY_TIMEOUT_S = 60.0
_STALL_TIMEOUT_S = 10.0
_BODIES = 4  # bodies of the largest size that may be in memory at once
_GONE = "the client closed its connection"
_INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
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
) -> ASGIApp:
    """Return the application; it closes neither `switcher` nor `store`.

    Args:
        entries: the models that clients may load by name, if `settings` allow it.
    """
    server = _Server(switcher, store, entries, settings)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await server.json.close()

    routes = [Route(path, endpoint, methods=[method]) for method, path, endpoint in server.routes()]
    handlers = dict.fromkeys((TorchRelayError, HTTPException, Exception), _on_error)
    others = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """Answer inference requests without Starlette, which takes as long as a small model."""
        match = None
        if scope["type"] == "http" and scope["method"] == "POST":
            match = _INFER.fullmatch(scope["path"])
        if match is None:
            await others(scope, receive, send)
            return
        try:
            response = await server.infer(scope, receive, match[1], match[2] or "")
        except Exception as error:
            response = await _on_error(Request(scope), error)
        await response(scope, receive, send)

    return Guard(app, settings)


async def _on_error(request: Request, error: Exception) -> Response:
    """Return the response to a request that raised `error`."""
    if isinstance(error, HTTPException):
        sentence = {
            404: f"the server has no path {request.url.path}",
            405: f"{request.url.path} does not take {request.method}",
        }.get(error.status_code, error.detail)
        return JSONResponse({"error": sentence}, error.status_code, error.headers)
    if isinstance(error, TorchRelayError):
        code = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
        headers = {"Retry-After": "1"} if code in (429, 503) else None
        return JSONResponse({"error": str(error), "type": type(error).__name__}, code, headers)
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
        is_live = self._switcher.failure is None
        return JSONResponse({"live": is_live}, 200 if is_live else 503)

    async def ready(self, _: Request) -> Response:
        """Return status 200 if every loaded model can answer."""
        names = self._switcher.models()
        ready = bool(names) and all(self._switcher.is_ready(name) for name in names)
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def model_ready(self, request: Request) -> Response:
        name = self._stored(**request.path_params).name
        ready = self._switcher.is_ready(name)
        return JSONResponse({"name": name, "ready": ready}, 200 if ready else 503)

    async def metadata(self, request: Request) -> Response:
        model = self._stored(**request.path_params)
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
                "outputs": self._metrics.outputs_of(model.name, model.version),
            }
        )

    async def infer(self, scope: Scope, receive: Receive, name: str, version: str) -> Response:
        self._stored(name, version)
        headers = dict(scope["headers"])
        async with self._body(receive) as body:
            header, raw = await self._parsed(headers, body)
            inputs = decode(header.get("inputs"), raw)
        options, wanted = _options(header.get("parameters", {})), _wanted(header)
        reply = await _reply(scope, self._switcher.submit(name, inputs, copy=False, **options))
        outputs, binary = _selected(wanted, reply)
        self._metrics.observe(reply)
        return await self._answer(header.get("id"), outputs, binary, reply)

    async def index(self, request: Request) -> Response:
        wants_ready = (await self._arguments(request)).get("ready")
        loaded = self._switcher.models()
        stored = {name: str(self._store.get(name).version) for name in self._store.names()}
        models = []
        for name in sorted({*self._entries, *stored}):
            is_ready = self._switcher.is_ready(name)
            state = "READY" if is_ready else "LOADING" if name in loaded else "UNAVAILABLE"
            if is_ready or not wants_ready:
                version = stored.get(name, "")
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
        async with self._body(request.receive) as body:
            return parse_body(body or b"{}", None)[0]

    def _stored(self, name: str, version: str = "") -> StoredModel:
        model = self._store.get(name)
        if version not in ("", str(model.version)):
            raise NotFoundError(f"model {name!r} has version {model.version}, not {version}")
        return model

    @asynccontextmanager
    async def _body(self, receive: Receive) -> AsyncIterator[bytes]:
        """Read the body, bounded in size and time. Within the block it counts towards the bytes
        that all bodies may take.
        """
        body = bytearray()
        deadline = asyncio.get_running_loop().time() + _BODY_TIMEOUT_S
        try:
            is_whole = False
            while not is_whole:
                part, is_whole = await _part(receive, deadline, len(body))
                body += part
                self._free_bytes -= len(part)
                if len(body) > self._max_bytes:
                    raise CapacityError(f"the request body exceeds {self._max_bytes} bytes")
                if self._free_bytes < 0:
                    raise OverloadedError(
                        f"bodies of {_BODIES * self._max_bytes} bytes are being read; try again"
                    )
            yield bytes(body)
        finally:
            self._free_bytes += len(body)

    async def _parsed(self, headers: dict[bytes, bytes], body: bytes) -> Body:
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise HTTPException(415, "compressed bodies are not served; send the body as it is")
        length = headers.get(HEADER.lower().encode())
        if length is None and len(body) > LARGE_BYTES:
            return await self.json.parse(body)
        return parse_body(body, length)

    async def _answer(
        self, request_id: object, outputs: dict[str, torch.Tensor], binary: set[str], reply: Reply
    ) -> Response:
        """Return the outputs in JSON, but for those that are `binary`."""
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
        if isinstance(request_id, str):
            content["id"] = request_id
        size_bytes = sum(tensor.nbytes for tensor in outputs.values())
        is_large = not binary and size_bytes > LARGE_BYTES
        content["outputs"], raw = encode(outputs, set(outputs) if is_large else binary)
        text = dump(content)
        body = b"".join([text, *raw])
        if is_large:
            body = await self.json.format(body, len(text))
        if not binary:
            return Response(body, media_type="application/json")
        headers = {HEADER: str(len(text))}
        return Response(body, headers=headers, media_type="application/octet-stream")


async def _part(receive: Receive, deadline: float, size: int) -> tuple[bytes, bool]:
    """Return the next part of a body of which `size` bytes came, and whether it is the last."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    is_late = False

    def expire() -> None:
        nonlocal is_late
        is_late = True
        assert task is not None
        task.cancel()

    timer = loop.call_at(min(deadline, loop.time() + _STALL_TIMEOUT_S), expire)
    try:
        message = await receive()
    except asyncio.CancelledError:
        if not is_late:
            raise
        raise OperationTimeoutError(
            f"the body did not arrive: {size} bytes came; at most {_STALL_TIMEOUT_S:g} s may pass "
            f"between parts, and {_BODY_TIMEOUT_S:g} s in all"
        ) from None
    finally:
        timer.cancel()
    if message["type"] == "http.disconnect":
        raise UnavailableError(_GONE)
    return message.get("body", b""), not message.get("more_body", False)


async def _reply(scope: Scope, future: Future[Reply]) -> Reply:
    """Wait for the reply; take the request off the queue if the client closes its connection."""
    loop, thread = asyncio.get_running_loop(), threading.get_ident()
    ended = loop.create_future()

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    def on_done(_: Future[Reply]) -> None:
        # In the loop's own thread, in most cases: asyncio.wrap_future would wake it by a system
        # call.
        if threading.get_ident() == thread:
            end()
        else:
            loop.call_soon_threadsafe(end)

    scope[ON_DISCONNECT] = future.cancel
    future.add_done_callback(on_done)
    try:
        await ended
        return future.result()
    except asyncio.CancelledError:
        future.cancel()
        raise
    except CancelledError as error:
        raise UnavailableError(_GONE) from error


def _options(parameters: object) -> dict[str, Any]:
    """Return the request's priority, deadline and client; `timeout` is in microseconds, as in
    Triton.
    """
    given = _check_known(
        "parameter", parameters, ("priority", "timeout", "client", "binary_data_output")
    )
    options: dict[str, Any] = {}
    for key, kind in (("priority", int), ("client", str), ("timeout", int)):
        if key in given and (key, given[key]) != ("timeout", None):
            if type(given[key]) is not kind:
                raise ArgumentError(f"parameter {key} = {given[key]!r}: must be a {kind.__name__}")
            options[key] = given[key]
    timeout = options.pop("timeout", None)
    if timeout is not None:
        if not 0 <= timeout < 2**63:
            raise ArgumentError(f"parameter timeout = {timeout!r}: must be microseconds")
        options["deadline_s"] = timeout * 1e-6
    return options


class _Wanted(NamedTuple):
    """The requested outputs, each with whether it travels in binary; all for None."""

    outputs: dict[str, bool] | None
    is_binary: bool  # by default


def _wanted(header: dict[str, Any]) -> _Wanted:
    is_binary = bool(header.get("parameters", {}).get("binary_data_output", False))
    entries = header.get("outputs")
    if entries is None:
        return _Wanted(None, is_binary)
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise ArgumentError("outputs must be a list of objects")
    wanted = {}
    for entry in entries:
        name, parameters = entry.get("name"), entry.get("parameters", {})
        if not isinstance(name, str):
            raise ArgumentError(f"the name of an output is {name!r}; it must be a string")
        given = _check_known(f"output {name!r}: parameter", parameters, ("binary_data",))
        wanted[name] = bool(given.get("binary_data", is_binary))
    return _Wanted(wanted, is_binary)


def _selected(wanted: _Wanted, reply: Reply) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Return the wanted outputs, and the names of those that travel in binary."""
    try:
        for tensor in reply.outputs.values():
            datatype_of(tensor.dtype)
    except UnsupportedError as error:
        raise ModelError(f"an output of model {reply.model!r} cannot be sent: {error}") from error
    chosen = wanted.outputs
    if chosen is None:
        chosen = dict.fromkeys(reply.outputs, wanted.is_binary)
    for name in chosen.keys() - reply.outputs.keys():
        raise ArgumentError(
            f"model {reply.model!r} has no output {name!r}; it has {', '.join(reply.outputs)}"
        )
    outputs = {name: reply.outputs[name] for name in chosen}
    return outputs, {name for name, is_binary in chosen.items() if is_binary}


def _check_known(what: str, given: object, known: tuple[str, ...]) -> dict[str, Any]:
    """Return `given`, if it asks for nothing that this server would have to ignore."""
    if not isinstance(given, dict):
        raise ArgumentError(f"{what}s must be an object")
    for name in given.keys() - set(known):
        choices = f"choose from {', '.join(known)}" if known else "none is supported here"
        raise UnsupportedError(f"{what} {name!r} is not supported; {choices}")
    return given

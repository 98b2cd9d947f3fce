"""The HTTP interface: the Open Inference Protocol v2, `/metrics`, and a status page."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import torch
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import Receive, Scope, Send

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
from torchrelay.switching._metrics import ServerMetrics
from torchrelay.switching._models_file import ModelEntry
from torchrelay.switching._queue import Reply
from torchrelay.switching._store import ModelStore, StoredModel
from torchrelay.switching._switcher import Switcher
from torchrelay.switching._tensors import (
    HEADER,
    datatype_of,
    decode,
    dump,
    encode,
    parse_body,
)

__all__ = ["Application"]

_log = logging.getLogger("torchrelay.switching")

_HEADER_BYTES = 1 << 20  # JSON around the tensors of a request
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


class Application:
    """The endpoints over one switcher, for an ASGI server.

    It has a router of its own: Starlette's takes as long as a small model.
    """

    def __init__(
        self,
        switcher: Switcher,
        store: ModelStore,
        entries: dict[str, ModelEntry],
        settings: Switching,
    ) -> None:
        """Serve `switcher` and `store`, which the caller closes.

        Args:
            entries: the models that clients may load by name, if `settings` allow it.
        """
        self._guard = Guard(settings)
        self._switcher = switcher
        self._store = store
        self._entries = entries
        self._is_controlled = settings.repository_control
        self._max_bytes = settings.request_bytes + _HEADER_BYTES
        self._free_bytes = _BODIES * self._max_bytes
        self._metrics = ServerMetrics(switcher)
        self._outputs: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self._loading = {name: asyncio.Lock() for name in entries}
        self._page = Path(__file__).with_name("status.html").read_text()
        model = "/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?"
        control = "/v2/repository/models/(?P<name>[^/]+)"
        routes: list[tuple[str, str, Any]] = [
            ("POST", model + "/infer", self.infer),
            ("GET", "/", self.page),
            ("GET", r"/status\.json", self.status),
            ("GET", "/metrics", self.metrics),
            ("GET", "/v2", self.server_metadata),
            ("GET", "/v2/health/live", self.live),
            ("GET", "/v2/health/ready", self.ready),
            ("GET", model, self.metadata),
            ("GET", model + "/ready", self.model_ready),
            ("POST", "/v2/repository/index", self.index),
            ("POST", control + "/load", self.load),
            ("POST", control + "/unload", self.unload),
        ]
        self._routes = [(method, re.compile(path), call) for method, path, call in routes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            self._guard.check(scope)
            response = await self._answered(request)
        except Exception as error:
            response = _error_response(request, error)
        await response(scope, receive, send)

    async def _answered(self, request: Request) -> Response:
        method, path = request.method, request.scope["path"]
        for known, pattern, endpoint in self._routes:
            match = pattern.fullmatch(path)
            if match is not None:
                if method != known and (method, known) != ("HEAD", "GET"):
                    raise HTTPException(405, f"{path} does not take {method}", {"Allow": known})
                response: Response = await endpoint(request, **match.groupdict(""))
                return response
        raise HTTPException(404, f"the server has no path {path}")

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

    async def model_ready(self, _: Request, name: str, version: str) -> Response:
        self._stored(name, version)
        ready = self._switcher.is_ready(name)
        return JSONResponse({"name": name, "ready": ready}, 200 if ready else 503)

    async def metadata(self, _: Request, name: str, version: str) -> Response:
        model = self._stored(name, version)
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
                # Known from the first reply on.
                "outputs": self._outputs.get((model.name, model.version), []),
            }
        )

    async def infer(self, request: Request, name: str, version: str) -> Response:
        self._stored(name, version)
        if request.headers.get("content-encoding", "identity") != "identity":
            raise HTTPException(415, "compressed bodies are not served; send the body as it is")
        header, raw = parse_body(await self._body(request), request.headers.get(HEADER))
        inputs = decode(header.get("inputs"), raw)
        options = _options(header.get("parameters", {}))
        future = self._switcher.submit(name, inputs, copy=False, **options)
        reply = await _reply(request.scope, future)
        outputs, binary = _outputs(header, reply)
        if (reply.model, reply.version) not in self._outputs:
            self._outputs[reply.model, reply.version] = [
                {"name": key, "datatype": datatype_of(value.dtype), "shape": [-1] * value.dim()}
                for key, value in reply.outputs.items()
            ]
        return _reply_response(header.get("id"), outputs, binary, reply)

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

    async def load(self, request: Request, name: str) -> Response:
        """Load or reload a model of the models file; parameters are refused."""
        entry = await self._controlled(request, name, ())
        async with self._loading[entry.name]:
            await asyncio.to_thread(entry.add_to, self._store)
            await asyncio.to_thread(self._switcher.load, entry.name, priority=entry.priority)
        return JSONResponse({})

    async def unload(self, request: Request, name: str) -> Response:
        # Not after a load that is in progress: that may hang, and unloading ends it.
        entry = await self._controlled(request, name, ("unload_dependents",))
        await asyncio.to_thread(self._switcher.unload, entry.name)
        self._store.remove(entry.name)
        return JSONResponse({})

    async def _controlled(self, request: Request, name: str, known: tuple[str, ...]) -> ModelEntry:
        """Return the entry of the model that a repository call names."""
        if not self._is_controlled:
            raise HTTPException(
                403,
                "clients may not load or unload models; start the server with --repository-control",
            )
        given = (await self._arguments(request)).get("parameters", {})
        _check_known("parameter", given, known)
        if name not in self._entries:
            names = ", ".join(sorted(self._entries)) or "none"
            raise NotFoundError(f"the models file has no model {name!r}; it has {names}")
        return self._entries[name]

    async def _arguments(self, request: Request) -> dict[str, Any]:
        """Return the JSON object of a body that may be empty."""
        return parse_body(await self._body(request) or b"{}", None)[0]

    def _stored(self, name: str, version: str) -> StoredModel:
        model = self._store.get(name)
        if version not in ("", str(model.version)):
            raise NotFoundError(f"model {name!r} has version {model.version}, not {version}")
        return model

    async def _body(self, request: Request) -> bytes:
        """Read the body, bounded in size; so is what all bodies that are being read take."""
        body, is_whole = bytearray(), False
        try:
            while not is_whole:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise UnavailableError("the client closed its connection")
                part, is_whole = message.get("body", b""), not message.get("more_body", False)
                body += part
                self._free_bytes -= len(part)
                if len(body) > self._max_bytes:
                    raise CapacityError(f"the request body exceeds {self._max_bytes} bytes")
                if self._free_bytes < 0:
                    raise OverloadedError(
                        f"bodies of {_BODIES * self._max_bytes} bytes are being read; try again"
                    )
            return bytes(body)
        finally:
            self._free_bytes += len(body)


def _reply_response(
    request_id: object, outputs: dict[str, torch.Tensor], binary: set[str], reply: Reply
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
    content["outputs"], raw = encode(outputs, binary)
    text = dump(content)
    if not binary:
        return Response(text, media_type="application/json")
    headers = {HEADER: str(len(text))}
    return Response(b"".join([text, *raw]), headers=headers, media_type="application/octet-stream")


def _error_response(request: Request, error: Exception) -> Response:
    """Return the response to a request that raised `error`."""
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)
    if isinstance(error, TorchRelayError):
        code = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
        headers = {"Retry-After": "1"} if code in (429, 503) else None
        return JSONResponse({"error": str(error), "type": type(error).__name__}, code, headers)
    _log.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
    return JSONResponse({"error": f"the server failed: {type(error).__name__}: {error}"}, 500)


async def _reply(scope: Scope, future: Future[Reply]) -> Reply:
    """Wait for the reply; take the request off the queue if the client closes its connection."""
    scope[ON_DISCONNECT] = future.cancel
    loop, thread, ended = asyncio.get_running_loop(), threading.get_ident(), asyncio.Event()

    def wake(_: object) -> None:
        if threading.get_ident() == thread:  # as is usual: nothing needs to interrupt the loop
            ended.set()
        else:
            loop.call_soon_threadsafe(ended.set)

    future.add_done_callback(wake)
    try:
        await ended.wait()
        return future.result()
    except (asyncio.CancelledError, CancelledError) as error:
        future.cancel()
        raise UnavailableError("the client closed its connection, or the server ends") from error


def _options(parameters: object) -> dict[str, Any]:
    """Return the request's priority, deadline and client; `timeout` is in microseconds, as in
    Triton.
    """
    known = ("priority", "timeout", "client", "binary_data_output")
    given = _check_known("parameter", parameters, known)
    priority, timeout, client = (
        given.get("priority", 0),
        given.get("timeout"),
        given.get("client", ""),
    )
    if type(priority) is not int:
        raise ArgumentError(f"parameter priority = {priority!r}: must be an integer")
    if timeout is not None and (type(timeout) is not int or not 0 <= timeout < 2**63):
        raise ArgumentError(f"parameter timeout = {timeout!r}: must be microseconds")
    if type(client) is not str:
        raise ArgumentError(f"parameter client = {client!r}: must be a string")
    deadline_s = None if timeout is None else timeout * 1e-6
    return {"priority": priority, "deadline_s": deadline_s, "client": client}


def _outputs(header: dict[str, Any], reply: Reply) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Return the outputs that the request asks for, and the names of those that travel in
    binary.
    """
    try:
        for tensor in reply.outputs.values():
            datatype_of(tensor.dtype)
    except UnsupportedError as error:
        raise ModelError(f"an output of model {reply.model!r} cannot be sent: {error}") from error
    is_binary = header.get("parameters", {}).get("binary_data_output", False)
    entries = header.get("outputs")
    if entries is None:
        entries = [{"name": name} for name in reply.outputs]
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise ArgumentError("outputs must be a list of objects")
    outputs, binary = {}, set()
    for entry in entries:
        name = entry.get("name")
        if not isinstance(name, str) or name not in reply.outputs:
            raise ArgumentError(
                f"model {reply.model!r} has no output {name!r}; it has {', '.join(reply.outputs)}"
            )
        parameters = entry.get("parameters", {})
        given = _check_known(f"output {name!r}: parameter", parameters, ("binary_data",))
        outputs[name] = reply.outputs[name]
        if given.get("binary_data", is_binary):
            binary.add(name)
    return outputs, binary


def _check_known(what: str, given: object, known: tuple[str, ...]) -> dict[str, Any]:
    """Return `given`, if it asks for nothing that this server would have to ignore."""
    if not isinstance(given, dict):
        raise ArgumentError(f"{what}s must be an object")
    for name in given.keys() - set(known):
        choices = f"choose from {', '.join(known)}" if known else "none is supported here"
        raise UnsupportedError(f"{what} {name!r} is not supported; {choices}")
    return given

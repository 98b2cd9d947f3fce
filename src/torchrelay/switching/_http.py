"""The HTTP interface: the Open Inference Protocol v2, `/metrics`, and a status page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

from torchrelay import __version__
from torchrelay.errors import (
    ArgumentError,
    CapacityError,
    ConfigError,
    DataError,
    NotFoundError,
    OperationTimeoutError,
    OverloadedError,
    TorchRelayError,
    UnavailableError,
    UnsupportedError,
)
from torchrelay.switching._metrics import Metrics
from torchrelay.switching._models_file import ModelEntry
from torchrelay.switching._queue import Reply
from torchrelay.switching._store import ModelStore, StoredModel
from torchrelay.switching._switcher import Switcher
from torchrelay.switching._tensors import HEADER, datatype_of, decode, encode, parse_body

__all__ = ["create_app"]

_HEADER_BYTES = 1 << 20  # JSON around the tensors of a request
_BODY_TIMEOUT_S = 60.0
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
    switcher: Switcher, store: ModelStore, entries: dict[str, ModelEntry], *, request_bytes: int
) -> FastAPI:
    """Return the application; it closes neither `switcher` nor `store`.

    Args:
        entries: the models that clients may load by name.
        request_bytes: the most that a request body's tensors may take.
    """
    app = FastAPI(title="torchrelay", version=__version__, docs_url=None, redoc_url=None)
    app.add_exception_handler(TorchRelayError, _on_error)
    server = _Server(switcher, store, entries, request_bytes)
    for method, path, endpoint in server.routes():
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    return app


async def _on_error(_: Request, error: Exception) -> Response:
    code = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
    headers = {"Retry-After": "1"} if code in (429, 503) else None
    return JSONResponse({"error": str(error), "type": type(error).__name__}, code, headers)


class _Server:
    """The endpoints over one switcher."""

    def __init__(
        self,
        switcher: Switcher,
        store: ModelStore,
        entries: dict[str, ModelEntry],
        request_bytes: int,
    ) -> None:
        self._switcher = switcher
        self._store = store
        self._entries = entries
        self._max_bytes = request_bytes + _HEADER_BYTES
        self._metrics = Metrics(switcher)
        self._loading = asyncio.Lock()
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

    async def page(self) -> Response:
        return HTMLResponse(self._page)

    async def status(self) -> Response:
        return JSONResponse(await asyncio.to_thread(self._switcher.status))

    async def metrics(self) -> Response:
        body, content_type = await asyncio.to_thread(self._metrics.render)
        return Response(body, headers={"Content-Type": content_type})

    async def server_metadata(self) -> Response:
        extensions = ["binary_tensor_data", "model_repository"]
        return JSONResponse(
            {"name": "torchrelay", "version": __version__, "extensions": extensions}
        )

    async def live(self) -> Response:
        return JSONResponse({"live": True})

    async def ready(self) -> Response:
        """Return status 200 if every loaded model can answer."""
        names = self._switcher.models()
        ready = bool(names) and all(self._switcher.is_ready(name) for name in names)
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def model_ready(self, name: str, version: str = "") -> Response:
        self._stored(name, version)
        ready = self._switcher.is_ready(name)
        return JSONResponse({"name": name, "ready": ready}, 200 if ready else 503)

    async def metadata(self, name: str, version: str = "") -> Response:
        model = self._stored(name, version)
        inputs = [
            {"name": spec.name, "datatype": datatype_of(spec.dtype), "shape": list(spec.shape)}
            for spec in model.inputs
        ]
        return JSONResponse(
            {
                "name": name,
                "versions": [str(model.version)],
                "platform": "pytorch_torchrelay",
                "inputs": inputs,
                "outputs": self._metrics.outputs_of(name),
            }
        )

    async def infer(self, name: str, request: Request, version: str = "") -> Response:
        self._stored(name, version)
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise UnsupportedError("compressed bodies are not served; send the body as it is")
        body = await self._body(request)
        header, raw = parse_body(body, request.headers.get(HEADER))
        inputs = decode(header.get("inputs"), raw)
        future = asyncio.wrap_future(
            self._switcher.submit(name, inputs, **_options(header.get("parameters", {})))
        )
        reply = await _unless_gone(request, future)
        self._metrics.observe(reply)
        return _response(header, reply)

    async def index(self) -> Response:
        names = sorted({*self._entries, *self._store.names()})
        loaded = self._switcher.models()
        return JSONResponse(
            [
                {
                    "name": name,
                    "version": str(self._store.get(name).version)
                    if name in self._store.names()
                    else "",
                    "state": "READY"
                    if self._switcher.is_ready(name)
                    else "LOADING"
                    if name in loaded
                    else "UNAVAILABLE",
                    "reason": "",
                }
                for name in names
            ]
        )

    async def load(self, name: str, request: Request) -> Response:
        """Load or reload a model of the models file; parameters are refused."""
        entry = self._entries.get(name)
        if entry is None:
            known = ", ".join(sorted(self._entries)) or "none"
            raise NotFoundError(f"the models file has no model {name!r}; it has {known}")
        async with self._loading:
            await asyncio.to_thread(entry.add_to, self._store)
            await asyncio.to_thread(self._switcher.load, name, priority=entry.priority)
        return JSONResponse({})

    async def unload(self, name: str) -> Response:
        async with self._loading:
            await asyncio.to_thread(self._switcher.unload, name)
            self._store.remove(name)
        return JSONResponse({})

    def _stored(self, name: str, version: str) -> StoredModel:
        model = self._store.get(name)
        if version not in ("", str(model.version)):
            raise NotFoundError(f"model {name!r} has version {model.version}, not {version}")
        return model

    async def _body(self, request: Request) -> bytes:
        """Read the body, bounded in size and time."""
        parts, size = [], 0

        async def read() -> None:
            nonlocal size
            async for part in request.stream():
                size += len(part)
                if size > self._max_bytes:
                    raise CapacityError(f"the request body exceeds {self._max_bytes} bytes")
                parts.append(part)

        try:
            await asyncio.wait_for(read(), _BODY_TIMEOUT_S)
        except asyncio.TimeoutError as error:
            raise OperationTimeoutError(
                f"the body did not arrive within {_BODY_TIMEOUT_S:g} s"
            ) from error
        return b"".join(parts)


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
        if type(timeout) is not int or timeout < 0:
            raise ArgumentError(f"parameter timeout = {timeout!r}: must be microseconds")
        options["deadline_s"] = timeout * 1e-6
    return options


def _response(header: dict[str, Any], reply: Reply) -> Response:
    """Return the requested outputs, in JSON or binary as requested."""
    parameters = header.get("parameters", {})
    all_binary = bool(parameters.get("binary_data_output"))
    wanted = header.get("outputs")
    if wanted is None:
        outputs, binary = reply.outputs, set(reply.outputs) if all_binary else set()
    else:
        outputs, binary = _selected(wanted, reply, all_binary)
    entries, raw = encode(outputs, binary)
    content = {
        "model_name": reply.model,
        "model_version": str(reply.version),
        "outputs": entries,
        "parameters": {
            "queue_ms": round(reply.queue_s * 1e3, 3),
            "switch_ms": round(reply.switch_s * 1e3, 3),
            "compute_ms": round(reply.compute_s * 1e3, 3),
            "copied_bytes": reply.copied_bytes,
        },
    }
    if isinstance(header.get("id"), str):
        content["id"] = header["id"]
    text = json.dumps(content).encode()
    if not raw:
        return Response(text, media_type="application/json")
    headers = {HEADER: str(len(text))}
    return Response(b"".join([text, *raw]), headers=headers, media_type="application/octet-stream")


def _selected(wanted: object, reply: Reply, all_binary: bool) -> tuple[dict[str, Any], set[str]]:
    if not isinstance(wanted, list) or not all(isinstance(one, dict) for one in wanted):
        raise ArgumentError("outputs must be a list of objects")
    outputs, binary = {}, set()
    for one in wanted:
        name = one.get("name")
        if name not in reply.outputs:
            raise ArgumentError(
                f"model {reply.model!r} has no output {name!r}; it has {', '.join(reply.outputs)}"
            )
        outputs[name] = reply.outputs[name]
        asked = one.get("parameters", {})
        if asked.get("binary_data", all_binary) if isinstance(asked, dict) else all_binary:
            binary.add(name)
    return outputs, binary

"""The HTTP interface: the Open Inference Protocol v2, `/metrics`, and a status page."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

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
from torchrelay.switching._connections import HttpError, HttpRequest, HttpResponse
from torchrelay.switching._guard import Guard
from torchrelay.switching._metrics import ServerMetrics
from torchrelay.switching._models_file import ModelEntry
from torchrelay.switching._profile import Output
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


# A response, or the future of a value and the function that makes a response of it.
_Answer = HttpResponse | tuple[Future[Any], Callable[[Any], HttpResponse]]


class Application:
    """The endpoints over one switcher, for :class:`HttpServer`."""

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
        self.check = Guard(settings).check
        self.max_body_bytes = settings.request_bytes + _HEADER_BYTES
        self._switcher = switcher
        self._store = store
        self._entries = entries
        self._is_controlled = settings.repository_control
        self._metrics = ServerMetrics(switcher)
        # Loads of one model run one after the other.
        self._loaders = {name: ThreadPoolExecutor(1, f"torchrelay-load-{name}") for name in entries}
        self._page = Path(__file__).with_name("status.html").read_bytes()
        model = "/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?"
        control = "/v2/repository/models/(?P<name>[^/]+)"
        routes: list[tuple[str, str, Callable[..., _Answer]]] = [
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

    def answer(
        self, request: HttpRequest, respond: Callable[[HttpResponse], object]
    ) -> Future[Any] | None:
        """Call `respond`, now or, in the same thread, later; then return what to cancel if the
        client goes away.
        """
        try:
            answer = self._answer(request)
        except Exception as error:
            answer = self.error(request, error)
        if isinstance(answer, HttpResponse):
            respond(answer)
            return None
        future, response_of = answer
        loop, thread = asyncio.get_running_loop(), threading.get_ident()

        def finish() -> None:
            try:
                response = response_of(future.result())
            except Exception as error:
                response = self.error(request, error)
            respond(response)

        def done(_: object) -> None:
            if threading.get_ident() == thread:  # as is usual: nothing needs to interrupt the loop
                finish()
            else:
                loop.call_soon_threadsafe(finish)

        future.add_done_callback(done)
        return future

    def _answer(self, request: HttpRequest) -> _Answer:
        method, path = request.method, request.path
        for known, pattern, endpoint in self._routes:
            match = pattern.fullmatch(path)
            if match is not None:
                if method != known and (method, known) != ("HEAD", "GET"):
                    raise HttpError(405, f"{path} does not accept {method}", {"Allow": known})
                return endpoint(request, **match.groupdict(""))
        raise HttpError(404, f"the server has no path {path}")

    def error(self, request: HttpRequest, error: Exception) -> HttpResponse:
        """Return the response to a request that caused `error`."""
        if isinstance(error, HttpError):
            return _json({"error": str(error)}, error.status, error.headers)
        if isinstance(error, CancelledError):
            error = UnavailableError("the client closed its connection, or the server ends")
        if isinstance(error, TorchRelayError):
            code = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
            headers = {"Retry-After": "1"} if code in (429, 503) else None
            return _json({"error": str(error), "type": type(error).__name__}, code, headers)
        _log.error("%s %s failed", request.method, request.path, exc_info=error)
        return _json({"error": f"the server failed: {type(error).__name__}: {error}"}, 500)

    def page(self, _: HttpRequest) -> HttpResponse:
        return HttpResponse(self._page, content_type="text/html; charset=utf-8")

    def status(self, _: HttpRequest) -> HttpResponse:
        return _json(self._switcher.status())

    def metrics(self, _: HttpRequest) -> HttpResponse:
        body, content_type = self._metrics.render()
        return HttpResponse(body, content_type=content_type)

    def server_metadata(self, _: HttpRequest) -> HttpResponse:
        extensions = ["binary_tensor_data", "model_repository"]
        return _json({"name": "torchrelay", "version": __version__, "extensions": extensions})

    def live(self, _: HttpRequest) -> HttpResponse:
        is_live = self._switcher.failure is None
        return _json({"live": is_live}, 200 if is_live else 503)

    def ready(self, _: HttpRequest) -> HttpResponse:
        """Return status 200 if every loaded model can answer."""
        names = self._switcher.models()
        ready = bool(names) and all(self._switcher.is_ready(name) for name in names)
        return _json({"ready": ready}, 200 if ready else 503)

    def model_ready(self, _: HttpRequest, name: str, version: str) -> HttpResponse:
        self._stored(name, version)
        ready = self._switcher.is_ready(name)
        return _json({"name": name, "ready": ready}, 200 if ready else 503)

    def metadata(self, _: HttpRequest, name: str, version: str) -> HttpResponse:
        model = self._stored(name, version)
        inputs = [
            {"name": spec.name, "datatype": datatype_of(spec.dtype), "shape": list(spec.shape)}
            for spec in model.inputs
        ]
        return _json(
            {
                "name": model.name,
                "versions": [str(model.version)],
                "platform": "pytorch_torchrelay",
                "inputs": inputs,
                "outputs": [
                    {"name": one.name, "datatype": _datatype(one), "shape": [-1] * one.dimensions}
                    for one in self._switcher.outputs(name)
                ],
            }
        )

    def infer(self, request: HttpRequest, name: str, version: str) -> _Answer:
        self._stored(name, version)
        if request.headers.get("content-encoding", "identity") != "identity":
            raise HttpError(415, "compressed bodies are not served; send the body as it is")
        header, raw = parse_body(request.body, request.headers.get(HEADER.lower()))
        inputs = decode(header.pop("inputs", None), raw)
        request.body = bytearray()  # copied: while the request waits, its inputs are kept once
        options = _options(header.get("parameters", {}))
        future = self._switcher.submit(name, inputs, copy=False, **options)
        return future, lambda reply: self._reply(header, reply, version)

    def _reply(self, header: dict[str, Any], reply: Reply, version: str) -> HttpResponse:
        """Return the outputs in JSON, but for those that are to be binary."""
        _check_version(reply.model, reply.version, version)  # it may have been loaded again
        outputs, binary = _outputs(header, reply)
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
        content["outputs"], raw = encode(outputs, binary)
        text = dump(content)
        if not binary:
            return HttpResponse(text)
        headers = {HEADER: str(len(text))}
        return HttpResponse(b"".join([text, *raw]), 200, "application/octet-stream", headers)

    def index(self, request: HttpRequest) -> HttpResponse:
        wants_ready = _arguments(request).get("ready")
        loaded = self._switcher.models()
        stored = {name: str(self._stored(name).version) for name in self._store.names()}
        models = []
        for name in sorted({*self._entries, *stored}):
            is_ready, error = self._switcher.is_ready(name), self._switcher.failure_of(name)
            is_loading = name in loaded and error is None
            state = "READY" if is_ready else "LOADING" if is_loading else "UNAVAILABLE"
            if is_ready or not wants_ready:
                entry = {"name": name, "version": stored.get(name, ""), "state": state}
                models.append({**entry, "reason": str(error or "")})
        return _json(models)

    def load(self, request: HttpRequest, name: str) -> _Answer:
        """Load or reload a model of the models file; parameters are refused."""
        entry = self._controlled(request, name, ())

        def run() -> None:
            entry.add_to(self._store)
            self._switcher.load(name, priority=entry.priority)

        return self._loaders[name].submit(run), lambda _: _json({})

    def unload(self, request: HttpRequest, name: str) -> HttpResponse:
        # Not after a load that is in progress: that may hang, and unloading ends it.
        self._controlled(request, name, ("unload_dependents",))
        self._switcher.unload(name)
        self._store.remove(name)
        return _json({})

    def _controlled(self, request: HttpRequest, name: str, known: tuple[str, ...]) -> ModelEntry:
        """Return the entry of the model that a repository call names."""
        if not self._is_controlled:
            raise HttpError(
                403,
                "clients may not load or unload models; start the server with --repository-control",
            )
        _check_known("parameter", _arguments(request).get("parameters", {}), known)
        if name not in self._entries:
            names = ", ".join(sorted(self._entries)) or "none"
            raise NotFoundError(f"the models file has no model {name!r}; it has {names}")
        return self._entries[name]

    def _stored(self, name: str, version: str = "") -> StoredModel:
        """Return the model that answers; the store's, if none is loaded."""
        model = self._switcher.stored(name) or self._store.get(name)
        _check_version(name, model.version, version)
        return model


def _check_version(name: str, has: int, asked: str) -> None:
    if asked not in ("", str(has)):
        raise NotFoundError(f"model {name!r} has version {has}, not {asked}")


def _json(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> HttpResponse:
    return HttpResponse(json.dumps(content).encode(), status, headers=headers or {})


def _datatype(output: Output) -> str:
    """Return the protocol's name of the output's dtype, or torch's where it has none."""
    try:
        return datatype_of(getattr(torch, output.dtype))
    except UnsupportedError:
        return output.dtype


def _arguments(request: HttpRequest) -> dict[str, Any]:
    """Return the JSON object of a body that may be empty."""
    return parse_body(request.body or b"{}", None)[0]


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

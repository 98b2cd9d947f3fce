"""The ASGI application: checks, paths, errors as documented statuses, and the access log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError

from torchrelay.config import Switching
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
from torchrelay.switching._switcher import Switcher
from torchrelay.switching.http._endpoints import Endpoints
from torchrelay.switching.http._guard import Guard
from torchrelay.switching.http._messages import (
    DisconnectedError,
    HttpError,
    Limits,
    Receive,
    Request,
    Response,
    Scope,
    Send,
    json_of,
)
from torchrelay.switching.http._models_file import ModelEntry
from torchrelay.switching.http._openai import OpenAi, error_of
from torchrelay.switching.http._openai_schema import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
)
from torchrelay.switching.http._openapi import Route, document, page
from torchrelay.switching.http._repository import Repository
from torchrelay.switching.http._schema import (
    InferRequest,
    LoadRequest,
    ReadyFilter,
    UnloadRequest,
)
from torchrelay.switching.models._store import ModelStore

__all__ = ["Application"]

_log = logging.getLogger("torchrelay.switching")
_access_log = logging.getLogger("torchrelay.switching.access")

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
# What is answered while the server ends: others see that it does.
_ALWAYS = ("/health", "/v2/health/live", "/v2/health/ready", "/metrics", "/status.json", "/")


class Application:
    """The endpoints over one switcher, as an ASGI application."""

    def __init__(
        self,
        switcher: Switcher,
        store: ModelStore,
        entries: dict[str, ModelEntry],
        settings: Switching,
        read_again: Callable[[], dict[str, ModelEntry]] | None = None,
    ) -> None:
        """Serve `switcher` and `store`, which the caller closes.

        Args:
            entries: the models that clients may load by name, if `settings` allow it.
            read_again: returns those that there are now; raises :class:`ConfigError`.
        """
        self.limits = Limits(settings.request_bytes + _HEADER_BYTES)
        self.repository = Repository(switcher, store, entries, read_again)
        self._guard = Guard(settings)
        self._logs_access = settings.access_log
        calls = Endpoints(switcher, self.repository, settings.repository_control)
        texts = OpenAi(switcher, self.repository)
        routes = _routes(calls, texts)
        described = document(routes)
        shown = page(described)

        async def openapi(_: Request) -> Response:
            """Return this description."""
            return json_of(described)

        async def docs(_: Request) -> Response:
            """Return this description as a page."""
            return Response(shown, content_type="text/html; charset=utf-8")

        routes += [Route("/openapi.json", {"GET": openapi}), Route("/docs", {"GET": docs})]
        self._routes = [(one.pattern, one.endpoints) for one in routes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            raise UnsupportedError(f"{scope['type']} is not served")
        request, start = Request(scope, receive, self.limits), time.perf_counter()
        try:
            try:
                response = await self._answer(request)
                self.limits.check_space(len(response.body))
            except Exception as error:
                response = self._error(request, error)
            request.release()
            if self._logs_access:
                self._log_access(request, response.status, time.perf_counter() - start)
            try:
                await self._send(request, response, send)
            finally:
                response.on_end()
        except (asyncio.CancelledError, DisconnectedError):
            return  # the client has gone, or the server's last grace has passed
        finally:
            request.release()

    async def _answer(self, request: Request) -> Response:
        if request.refusal is not None:
            raise request.refusal
        self._guard.check(request)
        request.check_length()
        method, path = request.method, request.path
        for pattern, endpoints in self._routes:
            match = pattern.fullmatch(path)
            if match is None:
                continue
            if self.limits.is_ending and path not in _ALWAYS:
                raise UnavailableError("the server is shutting down; ask another one")
            endpoint = endpoints.get("GET" if method == "HEAD" else method)
            if endpoint is not None:
                return await endpoint(request, **match.groupdict(""))
            allowed = [*endpoints, *(["HEAD"] if "GET" in endpoints else []), "OPTIONS"]
            headers = {"Allow": ", ".join(allowed)}
            if method == "OPTIONS":
                return Response(b"", 204, headers=headers)
            raise HttpError(405, f"{path} does not accept {method}", headers)
        raise HttpError(404, f"the server has no path {path}")

    def _error(self, request: Request, error: Exception) -> Response:
        """Return the response to a request that caused `error`, in the form of its API."""
        headers: Mapping[str, str] = {}
        if isinstance(error, DisconnectedError):
            raise error
        if isinstance(error, CancelledError):
            error = UnavailableError("the server ends")
        content = {"error": str(error)}
        if isinstance(error, HttpError):
            status, headers = error.status, error.headers
        elif isinstance(error, TorchRelayError):
            status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
            headers = {"Retry-After": "1"} if status in (429, 503) else {}
            content["type"] = type(error).__name__
        else:
            _log.error("%s %s failed", request.method, request.path, exc_info=error)
            status, content = 500, {"error": f"the server failed: {type(error).__name__}: {error}"}
        if request.path.startswith("/v1/"):
            content = error_of(status, content["error"], error)
        return json_of(content, status, headers)

    async def _send(self, request: Request, response: Response, send: Send) -> None:
        headers = {
            "content-type": response.content_type,
            "content-length": str(len(response.body)),
            **response.headers,
            **self._guard.headers(request),
        }
        if response.stream is not None:
            del headers["content-length"]
        if response.status == 204:
            del headers["content-type"], headers["content-length"]
        if self.limits.is_ending or request.refusal is not None:
            headers["connection"] = "close"
        elif (
            request.is_old
            and response.stream is None
            and request.headers.get("connection", "").lower() == "keep-alive"
        ):
            headers["connection"] = "keep-alive"
        fields = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": response.status, "headers": fields})
        if response.stream is not None:
            async with contextlib.aclosing(response.stream) as parts:
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": response.body})

    def _log_access(self, request: Request, status: int, seconds: float) -> None:
        scope = request.scope
        host, port = scope.get("client") or ("-", 0)
        path = scope.get("raw_path", b"").decode("latin-1")  # quoted: nobody writes lines of a log
        _access_log.info(
            '%s:%d "%s %s HTTP/%s" %d %.3f ms',
            host,
            port,
            request.method,
            path,
            scope["http_version"],
            status,
            1e3 * seconds,
        )


def log_access() -> None:
    """Write the access log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    _access_log.addHandler(handler)
    _access_log.setLevel(logging.INFO)
    _access_log.propagate = False


def _routes(calls: Endpoints, texts: OpenAi) -> list[Route]:
    model, control = "/v2/models/{name}[/versions/{version}]", "/v2/repository/models/{name}"
    return [
        Route(model + "/infer", {"POST": calls.infer}, InferRequest),
        Route("/", {"GET": calls.page}),
        Route("/status.json", {"GET": calls.status}),
        Route("/metrics", {"GET": calls.metrics}),
        Route("/v2", {"GET": calls.server_metadata}),
        Route("/v2/health/live", {"GET": calls.live}),
        Route("/health", {"GET": calls.live}),  # of vLLM, which load generators ask
        Route("/v2/health/ready", {"GET": calls.ready}),
        Route("/v2/models", {"GET": calls.models}),
        Route(model, {"GET": calls.metadata}),
        Route(model + "/ready", {"GET": calls.model_ready}),
        Route(model + "/stats", {"GET": calls.statistics}),
        Route(model + "/config", {"GET": calls.config}),
        Route("/v2/repository/index", {"GET": calls.index, "POST": calls.index}, ReadyFilter),
        Route(control + "/load", {"POST": calls.load}, LoadRequest),
        Route(control + "/unload", {"POST": calls.unload}, UnloadRequest),
        Route("/v1/models", {"GET": texts.models}),
        Route("/v1/models/{name}", {"GET": texts.model}),
        Route("/v1/chat/completions", {"POST": texts.chat}, ChatRequest),
        Route("/v1/completions", {"POST": texts.completions}, CompletionRequest),
        Route("/v1/embeddings", {"POST": texts.embeddings}, EmbeddingRequest),
    ]

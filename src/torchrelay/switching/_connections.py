"""The HTTP server below the application: its listener, its connections, and its end.

httptools parses requests. No request runs in a task or waits for another turn of the event loop: a
general server and its framework take longer for a request than a small model does.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from types import FrameType
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

import httptools

from torchrelay.errors import CapacityError, OverloadedError, UnavailableError

if TYPE_CHECKING:
    from torchrelay.switching._http import Application

__all__ = [
    "MAX_CONNECTIONS",
    "REQUEST_TIMEOUT_S",
    "HttpError",
    "HttpRequest",
    "HttpResponse",
    "HttpServer",
    "bind",
]

MAX_CONNECTIONS = 1024
#: How long a connection may take to send the head of its first or next request, and then its body.
#: Proxies keep idle connections for 60 s; if the server gave up first, it would lose requests.
REQUEST_TIMEOUT_S = 75.0
_HEAD_BYTES = 64 << 10
_BODIES = 8  # bodies of the largest size that may be in memory at once
_SMALL_BODY_BYTES = 64 << 10  # a body up to this size is read, or sent, in any case
_ANSWERS_AT_ONCE = 8  # to one connection, before others are served
_TICK_S = 0.1
_LAST_S = 1.0  # after the grace, for what is still to be closed
_STATUS_LINES = {one.value: f"HTTP/1.1 {one.value} {one.phrase}" for one in HTTPStatus}


class HttpError(Exception):
    """An error response of the HTTP layer itself."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers or {}


@dataclass(eq=False)
class HttpRequest:
    """A request; names of headers are in lower case."""

    method: str = ""
    path: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    held_bytes: int = 0  # that it takes, as a body or as inputs, until it is answered
    keep_alive: bool = False
    refusal: HttpResponse | None = None  # answers it, whatever else it holds


@dataclass
class HttpResponse:
    """A response."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


def bind(host: str, port: int) -> socket.socket:
    """Return a bound TCP socket that does not listen yet.

    Raises:
        UnavailableError: the address is in use, or is not one of this machine.
    """
    with contextlib.ExitStack() as undo:
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            # asyncio disables Nagle's algorithm, which delays answers by 40 ms, only if this is
            # named.
            listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            undo.enter_context(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            raise UnavailableError(
                f"cannot serve on {host}, port {port}: {error}; choose another with --port"
            ) from error
        undo.pop_all()
    return listener


class HttpServer:
    """Serves an application until :meth:`end` or a failure."""

    def __init__(
        self,
        app: Application,
        grace_s: float,
        on_start: Callable[[], object],
        has_failed: Callable[[], bool],
    ) -> None:
        """Make a server.

        Args:
            grace_s: how long requests may take after :meth:`end`.
            on_start: called once it accepts connections.
            has_failed: asked several times a second.
        """
        self.app = app
        self.connections: set[Connection] = set()
        self.max_connections = MAX_CONNECTIONS
        self.held_bytes = 0  # of requests that are not answered, and answers that are not sent
        self.date = ""
        self.is_ending = False
        self._grace_s = grace_s
        self._ends_at = math.inf
        self._on_start = on_start
        self._has_failed = has_failed

    def is_full_for(self, body_bytes: int) -> bool:
        """Whether the memory for bodies is full, and a body of this size is not small."""
        is_small = body_bytes <= _SMALL_BODY_BYTES
        return not is_small and self.held_bytes > _BODIES * self.app.max_body_bytes

    @property
    def grace_left_s(self) -> float:
        """The seconds left of the grace period; all of it before :meth:`end`."""
        return min(max(0.0, self._ends_at - time.monotonic()), self._grace_s)

    async def serve(self, listener: socket.socket) -> None:
        """Serve the connections of `listener`; return when all are closed."""
        # Connections take at most half of the descriptors: models and workers need some too.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        soft = max(soft, min(2 * MAX_CONNECTIONS, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        self.max_connections = min(MAX_CONNECTIONS, soft // 2)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(self), sock=listener, backlog=2048)
        self._on_start()
        while not (self.is_ending or self._has_failed()):
            await self._tick()
        self.is_ending = True
        self._ends_at = min(self._ends_at, time.monotonic() + self._grace_s)
        server.close()
        for connection in list(self.connections):
            connection.end()
        while self.connections and self.grace_left_s:
            await self._tick()
        for connection in list(self.connections):
            connection.transport.abort()

    async def _tick(self) -> None:
        self.date = formatdate(usegmt=True)
        late = time.monotonic() - REQUEST_TIMEOUT_S
        for connection in list(self.connections):
            if connection.waits_since < late:
                connection.give_up()
        await asyncio.sleep(_TICK_S)

    def end(self, number: int, _: FrameType | None = None) -> None:
        """Handle a signal: accept nothing more and finish what runs; at the second one, exit."""
        if self.is_ending:
            os._exit(128 + number)  # the kernel ends the workers
        self._ends_at = time.monotonic() + self._grace_s
        # A factory that hangs in a thread would keep the process from ending.
        last = threading.Timer(self._grace_s + _LAST_S, os._exit, [1])
        last.daemon = True
        last.start()
        self.is_ending = True


class Connection(asyncio.Protocol):
    """One client's connection, of which one request at a time is answered. It is closed if no
    complete request comes in time; the one that has waited longest, if there are too many.
    """

    transport: asyncio.Transport

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._app = server.app
        self._parser = httptools.HttpRequestParser(self)
        self._head_bytes = 0  # since the last head or part of a body
        self._url = b""
        self._reading: HttpRequest | None = None  # its head has arrived, its body has not
        self._answering: HttpRequest | None = None
        self._pending: Future[Any] | None = None  # of what is being answered
        self._ahead: deque[HttpRequest] = deque()
        self._is_starting = False
        self._is_blocked = False  # the client does not read
        self._is_paused = False  # requests that were sent ahead wait
        self._is_discarding = False  # the last answer is sent; what still arrives is discarded
        self._expects_continue = False
        self._unsent_bytes = 0  # when the client was last looked at
        self._blocked_bytes = 0  # of an answer that the client does not read
        self.waits_since = time.monotonic()  # for the client; inf: the client waits

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        connections = self._server.connections
        if len(connections) >= self._server.max_connections:
            idle = min(connections, key=lambda one: one.waits_since)
            if idle.waits_since == math.inf:
                self.transport.abort()  # all are being answered
                return
            connections.discard(idle)
            idle.transport.abort()
        connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        if self._reading is not None:
            self._release(self._reading)
        self._clear_ahead()
        self._note_blocked(0)
        if self._pending is not None:
            self._pending.cancel()

    def data_received(self, data: bytes) -> None:
        if self._is_discarding:
            return
        self._head_bytes += len(data)
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError as error:
            self._break_off(HttpError(400, f"the request is not valid HTTP: {error}"))
        else:
            if self._head_bytes > _HEAD_BYTES:
                text = f"the head of a request exceeds {_HEAD_BYTES} bytes"
                self._break_off(HttpError(431, text))
        self._start_next()
        if self._server.is_ending:
            self.end()

    def _parse(self, data: memoryview) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # The parser skips the body of a request that offers another protocol. The offer is
                # declined: a new parser reads the request without it.
                data = data[upgrade.args[0] :]
                method, version = self._parser.get_method(), self._parser.get_http_version()
                lines = [f"{name}: {value}" for name, value in self._headers.items()]
                head = "\r\n".join([f" HTTP/{version}", *lines, "\r\n"]).encode("latin-1")
                self._parser = httptools.HttpRequestParser(self)
                self._parser.feed_data(method + b" " + self._url + head)

    def pause_writing(self) -> None:
        self._is_blocked = True
        self._note_blocked(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._is_blocked = False
        self._note_blocked(0)
        self._start_next()

    def _note_blocked(self, size_bytes: int) -> None:
        self._server.held_bytes += size_bytes - self._blocked_bytes
        self._blocked_bytes = size_bytes

    # --- what the parser calls

    def on_message_begin(self) -> None:
        self._url, self._headers = b"", dict[str, str]()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        if self._parser.should_upgrade():
            del self._headers["upgrade"]  # CONNECT has none: an error
            return
        path = (httptools.parse_url(self._url).path or b"").decode("latin-1")
        is_old = self._parser.get_http_version() == "1.0"
        headers, self._headers = self._headers, {}  # trailers change no header
        request = self._reading = HttpRequest(
            self._parser.get_method().decode(),
            unquote(path) if "%" in path else path,
            headers,
            keep_alive=self._parser.should_keep_alive() and not is_old,
        )
        self._expects_continue = headers.get("expect", "").lower() == "100-continue" and not is_old
        if self._answering is None:
            self.waits_since = time.monotonic()
        try:
            self._app.check(request)
        except Exception as error:
            self._refuse(request, error)

    def on_body(self, part: bytes) -> None:
        """Keep a part, bounded in size; so is what all bodies take."""
        self._head_bytes = 0
        request, limit = self._reading, self._app.max_body_bytes
        if request is None or request.refusal is not None:
            return
        request.body += part
        request.held_bytes += len(part)
        self._server.held_bytes += len(part)
        if len(request.body) > limit:
            self._refuse(request, CapacityError(f"the request body exceeds {limit} bytes"))
        elif self._server.is_full_for(len(request.body)):
            self._refuse(request, self._overload())

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        request, self._reading = self._reading, None
        if request is not None and request.refusal is None:
            self._ahead.append(request)

    # --- requests

    def end(self) -> None:
        """Close the connection unless a request is to be answered."""
        if self._is_discarding or not (self._reading or self._answering or self._ahead):
            self.transport.close()

    def give_up(self) -> None:
        """End a wait for the client that took too long, unless it has read more of an answer."""
        before, self._unsent_bytes = self._unsent_bytes, self.transport.get_write_buffer_size()
        if self._unsent_bytes not in (0, before):
            self.waits_since = time.monotonic()
        elif self._unsent_bytes or self._reading is None or self._is_discarding:
            self.transport.abort()
        else:
            self._break_off(
                HttpError(400, f"the body did not arrive within {REQUEST_TIMEOUT_S:g} s")
            )
            self._start_next()

    def _break_off(self, error: HttpError) -> None:
        """Close the connection with an error, as what follows cannot be read."""
        request = self._reading = self._reading or HttpRequest()
        request.keep_alive = False
        if request.refusal is None:
            self._refuse(request, error)
        elif self._answering is None and not self._ahead:
            self.transport.abort()

    def _release(self, request: HttpRequest) -> None:
        self._server.held_bytes -= request.held_bytes
        request.held_bytes = 0

    def _clear_ahead(self) -> None:
        while self._ahead:
            self._release(self._ahead.popleft())

    def _overload(self) -> OverloadedError:
        held_bytes = self._server.held_bytes
        return OverloadedError(f"requests and answers take {held_bytes} bytes; try again later")

    def _refuse(self, request: HttpRequest, error: Exception) -> None:
        """Answer a request of which the rest, if it comes, is left out."""
        self._release(request)
        request.body = bytearray()
        request.refusal = self._app.error(request, error)
        self._ahead.append(request)

    def _start_next(self) -> None:
        """Start to answer what came first; some is answered at once, and then the next."""
        if self._is_starting:
            return
        self._is_starting = True
        for _ in range(_ANSWERS_AT_ONCE):
            is_busy = self._answering is not None or self._is_blocked
            if is_busy or not self._ahead or self.transport.is_closing():
                break
            request = self._answering = self._ahead.popleft()
            if request.refusal is not None:
                self._respond(request.refusal)
                continue
            self.waits_since = math.inf
            pending = self._app.answer(request, self._respond)
            self._pending = pending if self._answering is request else None
        else:
            asyncio.get_running_loop().call_soon(self._start_next)
        self._is_starting = False
        if self._expects_continue and not (self._ahead or self._answering):
            self._expects_continue = False
            if self._reading is not None and self._reading.refusal is None:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        is_full = bool(self._ahead) or self._is_blocked
        if is_full != self._is_paused and not self.transport.is_closing():
            self._is_paused = is_full
            (self.transport.pause_reading if is_full else self.transport.resume_reading)()

    def _respond(self, response: HttpResponse) -> None:
        """Send the response to the request that is being answered; go on with the next."""
        request, self._answering, self._pending = self._answering, None, None
        self.waits_since, self._unsent_bytes = time.monotonic(), 0
        if request is not None:
            self._release(request)
        if request is None or self.transport.is_closing():
            return
        if self._server.is_full_for(len(response.body)):
            response = self._app.error(request, self._overload())
        keeps = request.keep_alive and not self._server.is_ending
        lines = [
            _STATUS_LINES[response.status],
            f"Date: {self._server.date}",
            f"Content-Type: {response.content_type}",
            f"Content-Length: {len(response.body)}",
            *(f"{name}: {value}" for name, value in response.headers.items()),
            "\r\n" if keeps else "Connection: close\r\n\r\n",
        ]
        head = "\r\n".join(lines).encode("latin-1")
        self.transport.write(head if request.method == "HEAD" else head + response.body)
        if keeps:
            self._start_next()
            return
        self._clear_ahead()
        if request is not self._reading or self._server.is_ending:
            self.transport.close()
            return
        # Closing it with unread bytes would reset the connection, and the answer might be lost.
        self._is_discarding = True
        with contextlib.suppress(OSError):
            self.transport.write_eof()

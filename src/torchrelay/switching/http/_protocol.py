"""The server's connections: uvicorn's protocol for httptools, with the limits that it lacks.

What uvicorn does is parsing, the order of answers, and flow control. Added are limits of time and
of size, HTTP/1.0's kept connections, half-closed clients, and answers that reach a client which is
still sending.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from torchrelay.switching.http._messages import HttpError, Limits

__all__ = ["REQUEST_TIMEOUT_S", "Connection"]

#: How long a connection may take to send the head of its first or next request, and then its body.
#: Proxies keep idle connections for 60 s; if the server gave up first, it would lose requests.
REQUEST_TIMEOUT_S = 75.0
_HEAD_BYTES = 64 << 10
_CONTINUE = b"HTTP/1.1 100 "
_PROBE_S = 2  # between probes of whether a half-closed client still exists


class Connection(HttpToolsProtocol):
    """One client's connection. It is closed if no complete request comes in time; the one that has
    waited longest, if there are too many.
    """

    limits: Limits  # of the server; set in a subclass of its own

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.waits_since = time.monotonic()  # for the client; inf: the client waits
        self._head_bytes = 0  # since the last head or part of a body
        self._field_bytes = 0  # of the head that is being read
        self._is_reading = False  # a head has arrived, its body has not
        self._is_broken = False  # what still arrives cannot be read
        self._is_discarding = False  # the last answer is sent; what still arrives is discarded
        # When the client was last probed; inf: it is not half-closed.
        self._half_closed_s = math.inf
        self._unsent_bytes = 0  # when the client was last looked at
        self._blocked_bytes = 0  # of an answer that the client does not read
        self._task: asyncio.Task[None] | None = None
        self._running: _Answering | None = None  # of the request that is being answered

    # --- what the transport calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(self)
        if len(self.connections) > self.limits.max_connections:
            known = [one for one in self.connections if isinstance(one, Connection)]
            min(known, key=lambda one: one.waits_since).abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._note_blocked(0)
        super().connection_lost(exc)
        self.pipeline.clear()
        if self._task is not None:
            self._task.cancel()  # what it waits for is of no use any more

    def data_received(self, data: bytes) -> None:
        if self._is_broken or self._is_discarding:
            return
        self._unset_keepalive_if_required()
        self._head_bytes += len(data)
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError as error:
            self.break_off(HttpError(400, f"the request is not valid HTTP: {error}"))
        else:
            if self._head_bytes > _HEAD_BYTES:
                self.break_off(_too_long())

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection of a client that has sent all and waits for answers."""
        is_waiting = self.cycle is not None and not (
            self.cycle.response_complete or self._is_reading
        )
        if not is_waiting or self._is_discarding or self.scheme == "https":
            return None  # asyncio closes it
        self._half_closed_s, self.cycle.keep_alive = time.monotonic(), False
        # A client that has gone looks the same: until its kernel forgets the connection.
        found: socket.socket | None = self.transport.get_extra_info("socket")
        if found is not None:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                found.setsockopt(socket.IPPROTO_TCP, option, _PROBE_S)
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self.waits_since = time.monotonic()
        self._note_blocked(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note_blocked(0)
        if self.cycle is not None:
            self._note_waiting()

    def _note_blocked(self, size_bytes: int) -> None:
        self.limits.held_bytes += size_bytes - self._blocked_bytes
        self._blocked_bytes = size_bytes

    # --- what the parser calls

    def _parse(self, data: memoryview) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # The parser skips the body of a request that offers another protocol. The offer is
                # declined: a new parser reads the request without it.
                data = data[upgrade.args[0] :]
                method, version = self.parser.get_method(), self.parser.get_http_version()
                if method == b"CONNECT":
                    raise httptools.HttpParserError("CONNECT is not served") from upgrade
                lines = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
                head = [b"%s %s HTTP/%s" % (method, self.url, version.encode()), *lines, b"", b""]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.feed_data(b"\r\n".join(head))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._field_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._field_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._field_bytes += len(name) + len(value) + 4
        if not self._is_reading:  # trailers change no header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        if self.parser.should_upgrade():
            return
        is_too_long = self._field_bytes > _HEAD_BYTES
        if self.url == b"*" or is_too_long:  # of the server as a whole, or more than parses
            self.url = b"/"
        if self.cycle is None or self.cycle.response_complete:
            self.waits_since = time.monotonic()
        super().on_headers_complete()
        self._is_reading = True
        if is_too_long:
            self._refuse(_too_long())
        if self.parser.get_http_version() == "1.0":
            self.cycle.__class__ = _OldCycle
            self.cycle.keep_alive = self.parser.should_keep_alive()
            self.cycle.waiting_for_100_continue = False  # which it does not know

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        if self._is_reading:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        if self._is_reading:
            self._is_reading = False
            super().on_message_complete()
            self._note_waiting()

    # --- requests

    def _note_waiting(self) -> None:
        """Note that the client waits, if it has sent a whole request and reads answers."""
        cycle = self.cycle
        is_sent = bool(self.pipeline) or not (cycle.more_body or cycle.response_complete)
        if is_sent and not self.flow.write_paused:
            self.waits_since = math.inf

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._note_waiting()
        cycle.transport = self._running = _Answering(self, cycle)
        self._task = task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def on_response_complete(self) -> None:
        self.waits_since, self._unsent_bytes = time.monotonic(), 0
        if self._running is not None:
            self._running.flush()  # of HEAD
        if self._is_discarding:
            return
        super().on_response_complete()
        self.flow.resume_reading()

    def break_off(self, error: HttpError) -> None:
        """Answer what is being read, or what cannot be read, with an error; then close."""
        self._is_broken, self.waits_since = True, time.monotonic()
        if not self._is_reading:
            # A request in place of the one that cannot be read.
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(b"GET / HTTP/1.1\r\n\r\n")
            self._is_reading = True
        elif self.cycle.response_complete:
            self.abort()
            return
        self._refuse(error)
        self.cycle.message_event.set()  # it may wait for its body

    def _refuse(self, error: HttpError) -> None:
        self.scope["state"]["refusal"] = error
        self.cycle.keep_alive = False

    def close_gently(self) -> None:
        """Close after an answer. If the client is still sending, closing at once would reset the
        connection, and it might never read the answer.
        """
        if not self._is_reading or self.limits.is_ending or not self.transport.can_write_eof():
            self.transport.close()
            return
        self._is_discarding, self.waits_since = True, time.monotonic()
        self.pipeline.clear()
        self.flow.resume_reading()
        with contextlib.suppress(OSError):
            self.transport.write_eof()

    def give_up(self) -> None:
        """End a wait for the client that took too long, unless it has read more of an answer."""
        before, self._unsent_bytes = self._unsent_bytes, self.transport.get_write_buffer_size()
        is_late = self._is_reading and not (self._is_broken or self.cycle.response_complete)
        if self._unsent_bytes not in (0, before):
            self.waits_since = time.monotonic()
        elif self._unsent_bytes or not is_late:
            self.abort()
        else:
            self.break_off(
                HttpError(400, f"the body did not arrive within {REQUEST_TIMEOUT_S:g} s")
            )

    def check_half_closed(self) -> None:
        """Close the connection if the client has gone."""
        if self._half_closed_s == math.inf:
            return
        now = time.monotonic()
        found: socket.socket | None = self.transport.get_extra_info("socket")
        if found is None or found.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.abort()
        elif now - self._half_closed_s > _PROBE_S and self._running is not None:
            self._half_closed_s = now
            self._running.probe()

    def abort(self) -> None:
        self.connections.discard(self)
        self.transport.abort()


class _Flow(FlowControl):
    """Reads no more while requests that were sent ahead wait: they take memory."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.transport)
        self._connection = connection

    def resume_reading(self) -> None:
        if not self._connection.pipeline:
            super().resume_reading()


class _OldCycle(RequestResponseCycle):
    """A request of HTTP/1.0, which knows no chunks: a stream ends with its connection."""

    is_stream = False

    async def send(self, message: Any) -> None:
        if message["type"] != "http.response.start":
            if self.is_stream:
                self.expected_content_length = len(message.get("body", b""))
        elif all(name != b"content-length" for name, _ in message["headers"]):
            self.is_stream, self.chunked_encoding, self.keep_alive = True, False, False
        await super().send(message)


class _Answering:
    """The transport of an answer: sends its head with its body, as each sending wakes the client,
    and closes the connection gently.
    """

    def __init__(self, connection: Connection, cycle: Any) -> None:
        self._connection = connection
        self._cycle = cycle
        self._head = b""
        self.is_closing = connection.transport.is_closing

    def write(self, data: bytes) -> None:
        if not self._head and data.startswith(b"HTTP/1.1 ") and not data.startswith(_CONTINUE):
            self._head = data
        elif not self.is_closing():
            self._connection.transport.write(self._head + data)
            self._head = b""

    def probe(self) -> None:
        """Send what a client that waits ignores, and at which the kernel of one that has gone
        resets the connection.
        """
        if not (self._cycle.response_started or isinstance(self._cycle, _OldCycle)):
            self._connection.transport.write(_CONTINUE + b"Continue\r\n\r\n")

    def flush(self) -> None:
        if self._head:
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._connection.close_gently()


def _too_long() -> HttpError:
    return HttpError(431, f"the head of a request exceeds {_HEAD_BYTES} bytes")

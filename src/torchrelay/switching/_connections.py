"""The HTTP server below the application: its listener, its connections, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from torchrelay.errors import UnavailableError

__all__ = [
    "MAX_CONNECTIONS",
    "ON_DISCONNECT",
    "REQUEST_TIMEOUT_S",
    "Connection",
    "HttpServer",
    "bind",
]

MAX_CONNECTIONS = 1024
#: How long a connection may take to send the head of its first or next request, and then its body.
REQUEST_TIMEOUT_S = 60.0
#: The key of a scope under which an application puts what to call if its client goes away.
ON_DISCONNECT = "torchrelay.on_disconnect"
_LAST_S = 1.0  # after the grace, for what is still to be closed


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


class HttpServer(uvicorn.Server):
    """Serves an application until :meth:`end` or a failure."""

    def __init__(
        self,
        app: Any,
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
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=max(1, int(grace_s)),
        )
        super().__init__(config)
        self._grace_s = grace_s
        self._ends_at = math.inf
        self._on_start = on_start
        self._has_failed = has_failed

    @property
    def grace_left_s(self) -> float:
        """What is left of the grace, all before :meth:`end`."""
        return min(max(0.0, self._ends_at - time.monotonic()), self._grace_s)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._has_failed()

    def end(self, number: int, _: FrameType | None = None) -> None:
        """Handle a signal: accept nothing more and finish what runs; at the second one, exit."""
        if self.should_exit:
            os._exit(128 + number)  # the kernel ends the workers
        self._ends_at = time.monotonic() + self._grace_s
        # A factory that hangs in a thread would keep the process from ending.
        last = threading.Timer(self._grace_s + _LAST_S, os._exit, [1])
        last.daemon = True
        last.start()
        self.should_exit = True


class _Joining:
    """A transport that sends the head of an answer with its body: each write wakes the client."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._head and data.startswith(b"HTTP/1.1 ") and data[9:10] != b"1":
            self._head = data
        else:
            self._transport.write(self._head + data)
            self._head = b""

    def flush(self) -> None:
        """Send a head to which no body belongs."""
        if self._head:
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._transport.close()


class Connection(HttpToolsProtocol):
    """One client's connection. It is closed if no complete request comes in time; the one that has
    waited longest, if there are too many.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= MAX_CONNECTIONS:
            idle = [one for one in self.connections if isinstance(one, Connection) and one.is_idle]
            if not idle:
                transport.abort()  # all are being answered
                return
            min(idle, key=lambda one: one.idle_since).transport.abort()
        super().connection_made(_Joining(transport))  # type: ignore[arg-type]
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self.transport is not None:
            super().connection_lost(exc)
        if self.cycle is not None and not self.is_idle:
            on_disconnect: Any = self.cycle.scope.get(ON_DISCONNECT)
            if on_disconnect is not None:
                on_disconnect()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if not self.pipeline:  # what follows an unanswered request is not read on
            self._start_timer()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self.is_idle:  # it was answered before all of it came
            self._start_timer()
        else:
            self._stop_timer()

    def on_response_complete(self) -> None:
        cast(_Joining, self.transport).flush()
        super().on_response_complete()
        if self.is_idle or self.cycle.more_body:
            self._start_timer()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being read or answered."""
        return self.cycle is None or self.cycle.response_complete

    def _start_timer(self) -> None:
        self._stop_timer()
        self.idle_since = self.loop.time()
        self._timer = self.loop.call_later(REQUEST_TIMEOUT_S, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if self.is_idle or self.cycle.response_started:
            self.transport.abort()
        else:
            self.send_400_response(f"the body did not arrive within {REQUEST_TIMEOUT_S:g} s")

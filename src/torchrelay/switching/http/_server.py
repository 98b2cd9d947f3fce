"""The server: its listener, the sweeps over its connections, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn

from torchrelay.errors import ConfigError, UnavailableError
from torchrelay.switching.http import _protocol
from torchrelay.switching.http._messages import Limits

__all__ = ["MAX_CONNECTIONS", "HttpServer", "bind"]

MAX_CONNECTIONS = 1024
_TICK_S = 0.1
_LAST_S = 1.0  # after the grace, for what is still to be closed


def bind(host: str, port: int) -> socket.socket:
    """Return a bound TCP socket that does not listen yet, and whose address nobody else gets.

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
            if port:
                # Others could bind it too until one listens; what has listened, and permits no
                # reuse, keeps them out. A port that the kernel chose would be given back.
                listener.listen()
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
                listener.shutdown(socket.SHUT_RD)
        except OSError as error:
            raise UnavailableError(
                f"cannot serve on {host}, port {port}: {error}; choose another with --port"
            ) from error
        undo.pop_all()
    return listener


class HttpServer(uvicorn.Server):
    """Serves an ASGI application until :meth:`end` or a failure."""

    def __init__(
        self,
        app: Any,
        limits: Limits,
        grace_s: float,
        on_start: Callable[[], object],
        has_failed: Callable[[], bool],
        on_tick: Callable[[], object] = lambda: None,
        on_late: Callable[[], object] = lambda: None,
        *,
        tls_certificate: str = "",
        tls_key: str = "",
    ) -> None:
        """Make a server.

        Args:
            limits: those of `app` and its connections.
            grace_s: how long requests may take after :meth:`end`.
            on_start: called once it accepts connections.
            has_failed: asked several times a second.
            on_tick: called several times a second.
            on_late: called if requests are left when the grace is over; it ends them.
            tls_certificate: a file with the certificate chain, to serve HTTPS.
            tls_key: the file of its key; empty: in the same file.

        Raises:
            ConfigError: the certificate or the key cannot be read.
        """
        config = uvicorn.Config(
            app,
            http=type("BoundConnection", (_protocol.Connection,), {"limits": limits}),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",  # the application logs
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=math.ceil(_protocol.REQUEST_TIMEOUT_S),
            ssl_certfile=tls_certificate or None,
            ssl_keyfile=tls_key or None,
        )
        try:
            config.load()
        except OSError as error:  # ssl.SSLError, too
            raise ConfigError(
                f"tls_certificate = {tls_certificate!r}, tls_key = {tls_key!r}: {error}; name "
                "files in PEM format, the certificate first"
            ) from error
        super().__init__(config)
        self.limits = limits
        self._grace_s = grace_s
        self._ends_at = math.inf
        self._on_start, self._has_failed, self._tick = on_start, has_failed, on_tick
        self._on_late = on_late

    @property
    def grace_left_s(self) -> float:
        """The seconds left of the grace period; all of it before :meth:`end`."""
        return min(max(0.0, self._ends_at - time.monotonic()), self._grace_s)

    def end(self, number: int, _: FrameType | None = None) -> None:
        """Handle a signal: refuse new requests and finish what runs; at the second one, exit."""
        if self.should_exit:
            os._exit(128 + number)  # the kernel ends the workers
        # A factory that hangs in a thread would keep the process from ending.
        last = threading.Timer(self._grace_s + _LAST_S, os._exit, [1])
        last.daemon = True
        last.start()
        self.stop()

    def stop(self) -> None:
        """Let the server end; from any thread."""
        self._ends_at = time.monotonic() + self._grace_s
        self.should_exit = True

    # --- what uvicorn calls

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()  # the command handles signals

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # Connections take at most half of the descriptors: models and workers need some too.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        soft = max(soft, min(2 * MAX_CONNECTIONS, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        self.limits.max_connections = min(MAX_CONNECTIONS, soft // 2)
        for one in sockets or ():  # again, for a server that follows while connections linger
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await super().startup(sockets)
        self._on_start()

    async def on_tick(self, counter: int) -> bool:
        """Look at connections that wait, and return whether to end."""
        late = time.monotonic() - _protocol.REQUEST_TIMEOUT_S
        for connection in self._connections():
            if connection.waits_since < late:
                connection.give_up()
            connection.check_half_closed()
        self._tick()
        return await super().on_tick(counter) or self._has_failed()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what runs, in the end with errors; meanwhile, refuse other requests. Then close
        all connections.
        """
        self.limits.is_ending = True
        self._ends_at = min(self._ends_at, time.monotonic() + self._grace_s)
        while self.server_state.tasks and self.grace_left_s:
            await self.on_tick(1)
            await asyncio.sleep(_TICK_S)
        if self.server_state.tasks:
            self._on_late()
        self.config.timeout_graceful_shutdown = _LAST_S / 2  # type: ignore[assignment]
        await super().shutdown(sockets)
        for connection in self._connections():
            connection.abort()

    def _connections(self) -> Iterator[_protocol.Connection]:
        for one in list(self.server_state.connections):
            if isinstance(one, _protocol.Connection):
                yield one

"""Connections of the HTTP server: a listener, and limits on clients that send no request."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from torchrelay.errors import UnavailableError

__all__ = ["HEAD_TIMEOUT_S", "MAX_CONNECTIONS", "Connection", "bind"]

MAX_CONNECTIONS = 1024
#: How long a connection may take to send the head of its first or next request.
HEAD_TIMEOUT_S = 30.0


def bind(host: str, port: int) -> socket.socket:
    """Return a bound TCP socket that does not listen yet.

    Raises:
        UnavailableError: the address is in use, or is not one of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # asyncio disables Nagle's algorithm, which delays answers by 40 ms, only if this is named.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise UnavailableError(f"cannot serve on {host}, port {port}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UnavailableError(
            f"cannot serve on {host}, port {port}: {error.strerror}; choose another with --port"
        ) from error
    return listener


class Connection(H11Protocol):
    """One client's connection. It is closed if no request's head is complete in time; the one that
    has waited longest, if there are too many.
    """

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= MAX_CONNECTIONS:
            idle = [one for one in self.connections if isinstance(one, Connection) and one.is_idle]
            if not idle:
                transport.abort()  # all are being answered
                return
            min(idle, key=lambda one: one.idle_since).transport.abort()
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self.transport is not None:
            super().connection_lost(exc)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._stop_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.is_idle:
            self._wait_for_head()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being read or answered."""
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._stop_timer()
        self.idle_since = self.loop.time()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

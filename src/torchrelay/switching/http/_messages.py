"""A request and a response, between the server and the endpoints."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torchrelay.errors import CapacityError, OverloadedError

__all__ = [
    "DisconnectedError",
    "HttpError",
    "Limits",
    "Receive",
    "Request",
    "Response",
    "Scope",
    "Send",
    "json_of",
]

# Of ASGI.
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class HttpError(Exception):
    """An error response of the HTTP layer itself."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers or {}


class DisconnectedError(Exception):
    """The client closed its connection before its request was complete."""


_BODIES = 8  # bodies of the largest size that may be in memory at once
_SMALL_BODY_BYTES = 64 << 10  # a body up to this size is read, or sent, in any case


@dataclass(eq=False)
class Limits:
    """What bounds the memory and the connections of a server, and how much of it is in use."""

    max_body_bytes: int
    max_connections: int = 0
    held_bytes: int = 0  # of requests that are not answered, and answers that are not sent
    is_ending: bool = False  # new requests are refused

    def check_space(self, body_bytes: int) -> None:
        """Raise :class:`OverloadedError` if the memory for bodies is full, and a body of this size
        is not small.
        """
        if body_bytes > _SMALL_BODY_BYTES and self.held_bytes > _BODIES * self.max_body_bytes:
            raise OverloadedError(
                f"requests and answers take {self.held_bytes} bytes; try again later"
            )


@dataclass(eq=False)
class Request:
    """A request, of which only the head is there at first."""

    scope: Scope
    receive: Receive
    limits: Limits
    held_bytes: int = 0  # that it takes, as a body or as inputs, until it is answered

    @property
    def method(self) -> str:
        return str(self.scope["method"])

    @property
    def path(self) -> str:
        return str(self.scope["path"])

    @property
    def is_old(self) -> bool:
        """Whether it is of HTTP/1.0, where connections end unless both sides agree."""
        return bool(self.scope["http_version"] == "1.0")

    @property
    def refusal(self) -> HttpError | None:
        """What the protocol found wrong with it: it is answered with this error."""
        found: HttpError | None = self.scope.get("state", {}).get("refusal")
        return found

    @cached_property
    def headers(self) -> dict[str, str]:
        """The headers; names are in lower case."""
        given = self.scope["headers"]
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in given}

    def check_length(self) -> None:
        """Raise :class:`CapacityError` or :class:`OverloadedError` if the body that is announced
        is too large, :class:`HttpError` if it is compressed.
        """
        if self.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise HttpError(415, "compressed bodies are not served; send the body as it is")
        length = self.headers.get("content-length", "")
        self._check_size(int(length) if length.isdecimal() else 0)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self.limits.max_body_bytes:
            raise CapacityError(f"the request body exceeds {self.limits.max_body_bytes} bytes")
        self.limits.check_space(size_bytes)

    async def body(self) -> bytes | bytearray:
        """Return the body, bounded in size. What it takes counts until the request is answered."""
        parts: bytes | bytearray = b""
        while True:
            message = await self.receive()
            if self.refusal is not None:
                raise self.refusal
            if message["type"] == "http.disconnect":
                raise DisconnectedError
            part = message.get("body", b"")
            self.held_bytes += len(part)
            self.limits.held_bytes += len(part)
            if parts:
                parts = bytearray(parts) if isinstance(parts, bytes) else parts
                parts += part
            else:
                parts = part
            self._check_size(len(parts))
            if not message.get("more_body", False):
                return parts

    def release(self) -> None:
        """Count what it takes no longer. Idempotent."""
        self.limits.held_bytes -= self.held_bytes
        self.held_bytes = 0

    def count(self, name: bytes) -> int:
        """Return how many headers have this name, in lower case."""
        return sum(one == name for one, _ in self.scope["headers"])


@dataclass
class Response:
    """A response."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: AsyncGenerator[bytes] | None = None  # parts of the body, each sent when it is there
    on_end: Callable[[], object] = lambda: None  # called when it is sent, or given up


def json_of(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response of JSON."""
    return Response(json.dumps(content).encode(), status, headers=headers or {})

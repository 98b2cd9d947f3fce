"""JSON messages, with file descriptors where needed, between the daemon and a worker."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from torchrelay import errors
from torchrelay.errors import (
    ArgumentError,
    ModelError,
    PeerLostError,
    ProtocolError,
    TorchRelayError,
)

__all__ = ["Channel", "Message", "described", "error_of"]

Message = dict[str, Any]

_LENGTH = struct.Struct("!I")
_MAX_MESSAGE_BYTES = 64 << 20
_READ_BYTES = 1 << 16
_MAX_DESCRIPTORS = 8
# A peer that takes nothing for so long is stuck; its own timeout would have ended it before.
_SEND_TIMEOUT_S = 30.0


class Channel:
    """One end of a stream socket. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.settimeout(_SEND_TIMEOUT_S)
        self._buffer = bytearray()
        self._descriptors: list[int] = []
        self._sending = threading.Lock()
        self._poll = select.poll()  # select() refuses descriptors from 1024 on
        self._poll.register(connection, select.POLLIN)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send one message; the receiver gets duplicates of `descriptors`.

        Raises:
            PeerLostError: the other end is closed, or does not receive.
        """
        data = json.dumps({**message, "descriptors": len(descriptors)}).encode()
        data = _LENGTH.pack(len(data)) + data
        try:
            with self._sending:
                sent = (
                    socket.send_fds(self._socket, [data], list(descriptors)) if descriptors else 0
                )
                self._socket.sendall(data[sent:])
        except (OSError, TimeoutError) as error:
            raise PeerLostError(f"a worker closed its channel: {error}") from error

    def receive(self, timeout_s: float | None) -> tuple[Message, list[int]] | None:
        """Return the next message and its descriptors, which the caller closes; None after
        `timeout_s`.

        None as `timeout_s` waits for ever.

        Raises:
            PeerLostError: the other end is closed.
            ProtocolError: the data received is not a message.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            message = self._next()
            if message is not None:
                return message
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._poll.poll(None if left_s is None else 1e3 * left_s):
                return None
            self._read()

    def close(self) -> None:
        self._socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _READ_BYTES, _MAX_DESCRIPTORS)
        except OSError as error:
            raise PeerLostError(f"a worker's channel broke: {error}") from error
        self._descriptors += descriptors
        if not data:
            raise PeerLostError("the other end of a worker's channel is closed")
        self._buffer += data

    def _next(self) -> tuple[Message, list[int]] | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > _MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"a message of {length} bytes exceeds the limit of {_MAX_MESSAGE_BYTES}"
            )
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        try:
            message = json.loads(self._buffer[_LENGTH.size : end])
        except ValueError as error:
            raise ProtocolError(f"a message is not JSON: {error}") from error
        del self._buffer[:end]
        count = message.pop("descriptors")
        if len(self._descriptors) < count:
            raise ProtocolError(
                "the descriptors of a message did not arrive: this process has as many open as its "
                "limit allows (ulimit -n)"
            )
        taken, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        return message, taken


def described(error: BaseException) -> Message:
    """Return a JSON description of the error for :func:`error_of`."""
    if isinstance(error, TorchRelayError):
        return {"error": type(error).__name__, "text": str(error)}
    if isinstance(error, TypeError) and "argument" in str(error):
        return {"error": ArgumentError.__name__, "text": str(error)}
    return {"error": ModelError.__name__, "text": f"{type(error).__name__}: {error}"}


def error_of(message: Message) -> TorchRelayError:
    """Return the error that a worker described, of the same type."""
    kind = getattr(errors, str(message["error"]), ModelError)
    error: TorchRelayError = kind(str(message["text"]))
    return error

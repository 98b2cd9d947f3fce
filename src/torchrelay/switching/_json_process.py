"""A process that converts large JSON bodies, because parsing one holds the interpreter's lock."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from torchrelay._helper import Channel, HelperProcess
from torchrelay.errors import PeerLostError, TorchRelayError

__all__ = ["LARGE_BYTES", "JsonProcess"]

LARGE_BYTES = 256 << 10  # what takes a few milliseconds in the server's own process

T = TypeVar("T")


class JsonProcess:
    """Calls functions in another process. Starts at the first call; one call at a time. For one
    event loop.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._process: HelperProcess | None = None

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the value of `function`, a module's, or raise its TorchRelayError.

        Raises:
            PeerLostError: the process died.
        """
        async with self._lock:
            try:
                if self._process is None:
                    command = HelperProcess.command(__name__)
                    self._process = HelperProcess(command, new_session=True)
                channel = self._process.channel
                answer = await asyncio.to_thread(_exchange, channel, (function, arguments))
            except BaseException as error:  # if cancelled, its next answer is to this call
                self.close()
                if isinstance(error, OSError | PeerLostError):
                    raise PeerLostError(
                        "the process that converts large JSON bodies died; send tensors in binary"
                    ) from error
                raise
        value, failure = answer
        if failure is not None:
            raise failure
        return value  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process = None  # a thread may still use the channel, which closes with it


def _exchange(channel: Channel, message: object) -> Any:
    channel.send(message)
    received = channel.receive()
    assert received is not None
    return received[0]


def main() -> None:
    """Answer the server's messages until it closes its end."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    with contextlib.suppress(PeerLostError):
        while (received := channel.receive()) is not None:
            function, arguments = received[0]
            answer: tuple[Any, TorchRelayError | None]
            try:
                answer = function(*arguments), None
            except TorchRelayError as error:
                answer = None, error
            channel.send(answer)


if __name__ == "__main__":
    main()

"""A process that converts large JSON bodies, because parsing one holds the interpreter's lock."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable

from torchrelay._helper import Channel, HelperProcess
from torchrelay.errors import PeerLostError, TorchRelayError
from torchrelay.switching._tensors import Body, decode, dump, encode, parse_body

__all__ = ["LARGE_BYTES", "JsonProcess"]

LARGE_BYTES = 256 << 10  # what takes a few milliseconds in the server's own process


class JsonProcess:
    """Converts between the protocol's JSON and binary forms. Starts at the first use; one
    conversion at a time. For one event loop.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._process: HelperProcess | None = None

    async def parse(self, body: bytes) -> Body:
        """Return a JSON request in its binary form: the header, and the bytes of its tensors.

        Raises:
            ArgumentError, UnsupportedError: as :func:`parse_body` and :func:`decode`.
            PeerLostError: the process died.
        """
        binary, length = await self._convert("inputs", body, 0)
        return parse_body(binary, str(length))

    async def format(self, body: bytes, length: int) -> bytes:
        """Return the JSON form of a response whose binary form is `body`, with a header of `length`
        bytes. Raises as :meth:`parse`.
        """
        text, _ = await self._convert("outputs", body, length)
        return text

    async def close(self) -> None:
        """End the process. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process = None  # a thread may still use the channel, which closes with it

    async def _convert(self, what: str, body: bytes, length: int) -> tuple[bytes, int]:
        async with self._lock:
            try:
                if self._process is None:
                    command = HelperProcess.command(__name__)
                    self._process = HelperProcess(command, new_session=True)
                channel = self._process.channel
                answer = await asyncio.to_thread(_call, channel, (what, body, length))
            except (OSError, PeerLostError) as error:
                await self.close()
                raise PeerLostError(
                    "the process that converts large JSON bodies died; send tensors in binary"
                ) from error
            except BaseException:
                await self.close()  # cancelled half-way: its next answer is for this body
                raise
        if isinstance(answer, TorchRelayError):
            raise answer
        return answer


# The converted bytes with the length of their header, or an error.
_Answer = tuple[bytes, int] | TorchRelayError


def _call(channel: Channel, message: tuple[str, bytes, int]) -> _Answer:
    channel.send(message)
    received = channel.receive()
    assert received is not None
    answer: _Answer = received[0]
    return answer


def _to_binary(body: bytes, _: int) -> tuple[bytes, int]:
    header, raw = parse_body(body, None)
    header["inputs"], parts = encode(decode(header.get("inputs"), raw), binary=True)
    text = json.dumps(header).encode()
    return b"".join([text, *parts]), len(text)


def _to_json(body: bytes, length: int) -> tuple[bytes, int]:
    header, raw = parse_body(body, str(length))
    header["outputs"], _ = encode(decode(header["outputs"], raw), binary=False)
    return dump(header), 0


_CONVERSIONS: dict[str, Callable[[bytes, int], tuple[bytes, int]]] = {
    "inputs": _to_binary,
    "outputs": _to_json,
}


def main() -> None:
    """Answer the server's messages until it closes its end."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        while (received := channel.receive()) is not None:
            what, body, length = received[0]
            try:
                answer: _Answer = _CONVERSIONS[what](body, length)
            except TorchRelayError as error:
                answer = error
            channel.send(answer)
    except PeerLostError:
        pass


if __name__ == "__main__":
    main()

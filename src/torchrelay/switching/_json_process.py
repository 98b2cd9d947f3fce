"""A process that converts large JSON bodies, because parsing one holds the interpreter's lock.

Run as a program, it is that process: it reads and writes frames on standard input and output, and
ends with the server. A frame is a length of 8 bytes, and the bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
import sys
from typing import BinaryIO

from torchrelay import errors
from torchrelay._python import module_command, search_path
from torchrelay.errors import PeerLostError, TorchRelayError
from torchrelay.switching._tensors import Body, decode, encode, parse_body

__all__ = ["LARGE_BYTES", "JsonProcess"]

LARGE_BYTES = 256 << 10  # what takes a few milliseconds in the server's own process
_LENGTH = struct.Struct("<Q")


class JsonProcess:
    """Converts between the protocol's JSON and binary forms. Starts at the first use; one
    conversion at a time. For one event loop.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def parse(self, body: bytes) -> Body:
        """Return a JSON request in its binary form: the header, and the bytes of its tensors.

        Raises:
            ArgumentError, UnsupportedError: as :func:`parse_body` and :func:`decode`.
            PeerLostError: the process died.
        """
        answer = await self._convert(b"inputs", body)
        return _split(answer)

    async def format(self, body: bytes, length: int) -> bytes:
        """Return the JSON form of a response whose binary form is `body`, with a header of `length`
        bytes. Raises as :meth:`parse`.
        """
        return await self._convert(b"outputs", _LENGTH.pack(length) + body)

    async def close(self) -> None:
        """End the process. Idempotent."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has died, and was waited for
                self._process.kill()
            await self._process.wait()
            self._process = None

    async def _convert(self, what: bytes, body: bytes) -> bytes:
        async with self._lock:
            try:
                if self._process is None:
                    self._process = await _start()
                writer, reader = self._process.stdin, self._process.stdout
                assert writer is not None and reader is not None
                for part in (what, body):
                    writer.write(_LENGTH.pack(len(part)))
                    writer.write(part)
                await writer.drain()
                failed, answer = [await _read(reader) for _ in range(2)]
            except (OSError, asyncio.IncompleteReadError) as error:
                await self.close()
                raise PeerLostError(
                    "the process that converts large JSON bodies died; send tensors in binary"
                ) from error
            except BaseException:
                await self.close()  # cancelled half-way: its next answer is for this body
                raise
        if failed:
            raise getattr(errors, failed.decode())(answer.decode())
        return answer


async def _start() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *module_command(__name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": search_path()},
        start_new_session=True,  # Ctrl-C is for the server
    )


async def _read(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


def _split(framed: bytes) -> Body:
    (length,) = _LENGTH.unpack(framed[: _LENGTH.size])
    return parse_body(framed[_LENGTH.size :], str(length))


def _to_binary(body: bytes) -> bytes:
    header, raw = parse_body(body, None)
    header["inputs"], parts = encode(decode(header.get("inputs"), raw), binary=True)
    text = json.dumps(header).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *parts])


def _to_json(framed: bytes) -> bytes:
    header, raw = _split(framed)
    header["outputs"], _ = encode(decode(header["outputs"], raw), binary=False)
    return json.dumps(header).encode()


def _serve(source: BinaryIO, target: BinaryIO) -> None:
    def read() -> bytes:
        head = source.read(_LENGTH.size)
        return source.read(_LENGTH.unpack(head)[0]) if head else b""

    while what := read():
        try:
            answer = [b"", {b"inputs": _to_binary, b"outputs": _to_json}[what](read())]
        except TorchRelayError as error:
            answer = [type(error).__name__.encode(), str(error).encode()]
        for part in answer:
            target.write(_LENGTH.pack(len(part)) + part)
        target.flush()


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)

"""Messages of a switch's controller, as ``controller.proto`` declares them.

All fields are unsigned numbers, so protobuf's wire format needs a page here, and no package.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

from torchrelay.errors import ProtocolError

__all__ = [
    "MAX_BYTES",
    "MESSAGES",
    "NUMEL_OF_SIZE",
    "BarrierRequest",
    "BarrierResponse",
    "BroadcastRequest",
    "BroadcastResponse",
    "UdpSessionRequest",
    "UdpSessionResponse",
    "decode",
    "encode",
]

MAX_BYTES = 256  # of a message; the longest here has 64
NUMEL_OF_SIZE = {1: 64, 3: 256}  # PacketSize, and the values of a packet

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # wire types
_SKIPPED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10
M = TypeVar("M")


def _number(index: int, bits: int = 32) -> Any:
    return dataclasses.field(default=0, metadata={"index": index, "bits": bits})


@dataclass(frozen=True)
class UdpSessionRequest:
    session_id: int = _number(1, 64)
    rank: int = _number(2)
    num_workers: int = _number(3)
    mac: int = _number(4, 64)
    ipv4: int = _number(5)
    packet_size: int = _number(7)
    num_slots: int = _number(16)
    joins: int = _number(17)


@dataclass(frozen=True)
class UdpSessionResponse:
    session_id: int = _number(1, 64)
    mac: int = _number(2, 64)
    ipv4: int = _number(3)
    port: int = _number(16)


@dataclass(frozen=True)
class BarrierRequest:
    num_workers: int = _number(1)
    group: int = _number(16, 64)
    rank: int = _number(17)
    timeout_ms: int = _number(18)


@dataclass(frozen=True)
class BarrierResponse:
    pass


@dataclass(frozen=True)
class BroadcastRequest:
    value: int = _number(1, 64)
    rank: int = _number(2)
    num_workers: int = _number(3)
    root: int = _number(4)
    group: int = _number(16, 64)
    timeout_ms: int = _number(18)


@dataclass(frozen=True)
class BroadcastResponse:
    value: int = _number(1, 64)


MESSAGES = (
    UdpSessionRequest,
    UdpSessionResponse,
    BarrierRequest,
    BarrierResponse,
    BroadcastRequest,
    BroadcastResponse,
)


def encode(message: Any) -> bytes:
    """Return a message's bytes; fields that are 0 take none."""
    out = bytearray()
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        if value:
            out += _varint(field.metadata["index"] << 3 | _VARINT) + _varint(value)
    return bytes(out)


def decode(kind: type[M], data: bytes) -> M:
    """Return the message; fields that ``kind`` does not have are skipped, as protobuf asks.

    Raises:
        ProtocolError: the bytes are no such message.
    """
    fields = {field.metadata["index"]: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values: dict[str, int] = {}
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        field, wire_type = fields.get(key >> 3), key & 7
        if wire_type == _VARINT:
            value, at = _read_varint(data, at)
            if field is not None:
                values[field.name] = value & (1 << field.metadata["bits"]) - 1
        elif field is None and wire_type in (_FIXED64, _FIXED32, _LENGTH):
            size = _SKIPPED_BYTES.get(wire_type)
            if size is None:
                size, at = _read_varint(data, at)
            at += size
        else:
            raise ProtocolError(f"not a {kind.__name__}: wire type {wire_type} at byte {at}")
    if at > len(data):
        raise ProtocolError(f"not a {kind.__name__}: it is cut off")
    return kind(**values)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at byte ``at``, and where the next one is."""
    value = 0
    for index, byte in enumerate(data[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise ProtocolError(f"a number at byte {at} does not end")

"""Control messages between workers and a switch: datagrams on the switch's own port, as message
type 2.

Each is type, kind, version and session id, then what its kind needs; all big-endian. A worker sends
``JOIN`` from each of its sockets, so that the switch sees the address and port its packets will
come from, whatever translates them on the way. ``session_id`` is 64 random bits that only the
workers know: it is what admits to a session.
"""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass

from torchrelay import _native
from torchrelay._native import SwitchControlKind as ControlKind
from torchrelay.aggregation.switch._data_plane import SessionShape

__all__ = [
    "ControlKind",
    "ControlRequest",
    "Join",
    "decode_join",
    "decode_ranks",
    "encode",
    "encode_join",
    "encode_ranks",
    "parse",
]

_TYPE = _native.SWITCH_CONTROL_TYPE << 4
_VERSION = 1
_HEAD = struct.Struct(">BBHQ")
_JOIN = struct.Struct(">QIIHH?x")  # client, rank, the fields of the shape
_MAX_RANKS = 100  # that one message names


@dataclass(frozen=True)
class ControlRequest:
    """A control message of this protocol's version."""

    kind: ControlKind
    session_id: int
    body: bytes


@dataclass(frozen=True)
class Join:
    """A worker's request to join a session; ``client`` is a random number of its own, which
    distinguishes it from an earlier worker of this rank.
    """

    rank: int
    shape: SessionShape
    client: int


def encode(kind: ControlKind, session_id: int, body: bytes = b"") -> bytes:
    """Return the datagram."""
    return _HEAD.pack(_TYPE, kind, _VERSION, session_id) + body


def parse(datagram: bytes) -> ControlRequest | None:
    """Return the message; None if the datagram is of another protocol or version."""
    if len(datagram) < _HEAD.size:
        return None
    type_, kind, version, session_id = _HEAD.unpack_from(datagram)
    if type_ != _TYPE or version != _VERSION or kind not in set(ControlKind):
        return None
    return ControlRequest(ControlKind(kind), session_id, datagram[_HEAD.size :])


def encode_join(session_id: int, join: Join) -> bytes:
    """Return the datagram of a JOIN."""
    body = _JOIN.pack(join.client, join.rank, *dataclasses.astuple(join.shape))
    return encode(ControlKind.JOIN, session_id, body)


def decode_join(body: bytes) -> Join | None:
    """Return the content of a JOIN; None if it is malformed."""
    if len(body) != _JOIN.size:
        return None
    client, rank, *shape = _JOIN.unpack(body)
    return Join(rank, SessionShape(*shape), client)


def encode_ranks(ranks: list[int]) -> bytes:
    """Return the body of LEAVE and MISSING; it names 100 ranks at most."""
    return b"".join(rank.to_bytes(4, "big") for rank in ranks[:_MAX_RANKS])


def decode_ranks(body: bytes) -> list[int]:
    """Return the ranks of a LEAVE or MISSING."""
    return [int.from_bytes(body[at : at + 4], "big") for at in range(0, len(body) - 3, 4)]

"""Connections among the members of a group that forms, over which each announces values to all.

A member listens at one address for as long as it lives; nobody serves the others. It connects to
each other member, sends over these connections and receives over those that the others make. The
first frame of a connection, the greeting, names its sender and the reconfiguration. Who comes early
waits in the backlog of who comes late.

Frames are authenticated by the receiver's token, which is in its handle, and by the job's key. They
contain no secrets, because they are not encrypted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import logging
import os
import secrets
import select
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import Any

from torchrelay._addresses import is_loopback, listen_at, network_identity
from torchrelay._processes import closed_in_children, host_identity
from torchrelay.errors import (
    ArgumentError,
    MismatchError,
    PeerLostError,
    TorchRelayError,
    UnavailableError,
    from_json,
    to_json,
)

__all__ = ["Frames", "Handle", "Listener", "Mesh"]

_logger = logging.getLogger("torchrelay")
_VERSION = 1  # of handles and frames
_MAX_HANDLE = 1024  # characters
_MAX_FRAME, _MAX_DATA = 64 << 10, 1 << 20  # bytes: of one, and of all of a connection
_MAX_WAITING = 1024  # connections without a greeting, or for another reconfiguration
_REDIAL_S = 0.3
_FAREWELL_S = 0.2  # how long one that gives up tries to reach the others
_MAC_BYTES, _LENGTH_BYTES = 16, 4
_HEAD_BYTES = _LENGTH_BYTES + _MAC_BYTES


@dataclass(frozen=True)
class Handle:
    """Where a member can be reached, and its secret. Its text is what the others receive."""

    version: int
    member: str  # random
    token: str
    address: str
    port: int
    host: str  # equal for members that can share memory
    network: str  # equal for members that reach each other's loopback addresses
    pid: int

    @classmethod
    def parse(cls, text: str) -> Handle:
        """Raise ArgumentError if ``text`` is no handle."""
        try:
            if len(text) > _MAX_HANDLE:
                raise ValueError(f"it has {len(text)} characters")
            fields: dict[str, Any] = json.loads(text)
            if fields["version"] != _VERSION:
                raise ValueError(f"its version is {fields['version']!r}, not {_VERSION}")
            handle = cls(**fields)
            wrong = [name for name, kind in _FIELDS.items() if type(fields[name]).__name__ != kind]
            if wrong or not (0 < handle.port < 1 << 16 and len(handle.key) == _MAC_BYTES):
                raise ValueError(f"its {wrong[0] if wrong else 'port or token'} is invalid")
        except (TypeError, ValueError, KeyError, RecursionError) as error:
            raise ArgumentError(
                f"{str(text)[:60]!r} is not a handle that get_reconfigure_handle of this version "
                f"of torchrelay returns: {error}"
            ) from error
        return handle

    @cached_property
    def text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @property
    def key(self) -> bytes:
        return bytes.fromhex(self.token)

    @property
    def place(self) -> str:
        return f"process {self.pid} at {self.address}:{self.port}"


_FIELDS: dict[str, str] = dict(Handle.__annotations__)


class Frames:
    """Frames of JSON in one direction of a connection; each authenticates those before it too."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self._last, self._data, self._size = b"", bytearray(), 0

    def pack(self, value: dict[str, Any]) -> bytes:
        body = json.dumps(value).encode()
        assert len(body) <= _MAX_FRAME
        return len(body).to_bytes(_LENGTH_BYTES, "big") + self._mac(body) + body

    def feed(self, data: bytes) -> None:
        self._data += data
        self._size += len(data)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Return the frames that are complete. Raises ValueError if one is not authentic."""
        while len(self._data) >= _HEAD_BYTES:
            end = _HEAD_BYTES + int.from_bytes(self._data[:_LENGTH_BYTES], "big")
            if end > _MAX_FRAME or self._size > _MAX_DATA:
                raise ValueError("it sends too much")
            if len(self._data) < end:
                return
            body = bytes(self._data[_HEAD_BYTES:end])
            if not hmac.compare_digest(self._data[_LENGTH_BYTES:_HEAD_BYTES], self._mac(body)):
                raise ValueError("it lacks this member's token or the job's key")
            del self._data[:end]
            yield json.loads(body)

    def _mac(self, body: bytes) -> bytes:
        mac = hashlib.blake2b(self._last + body, key=self.key, digest_size=_MAC_BYTES)
        self._last = mac.digest()
        return self._last


class _OverError(ValueError):
    """A member has come to a reconfiguration that this one has left."""


@dataclass(eq=False)
class _Incoming:
    """A connection that another member, or a stranger, has made."""

    sock: socket.socket
    origin: str
    frames: Frames
    greeting: dict[str, Any] = field(default_factory=dict)
    peer: _Peer | None = None
    has_ended: bool = False

    def read(self) -> None:
        try:
            data = self.sock.recv(_MAX_FRAME)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.has_ended = not data
        self.frames.feed(data)

    def is_half_closed(self) -> bool:
        poll = select.poll()
        poll.register(self.sock, select.POLLRDHUP)
        return bool(poll.poll(0))


@dataclass(eq=False)
class _Peer:
    """Another member: the connection to it, and the one from it."""

    rank: int
    handle: Handle
    sock: socket.socket | None = None
    is_connected: bool = False
    sends: Frames = field(default_factory=lambda: Frames(b""))
    answers: Frames = field(default_factory=lambda: Frames(b""))
    unsent: bytes = b""
    is_behind: bool = True  # something was announced that no connection has taken
    dial_s: float = 0.0  # when to connect
    trouble: str = ""  # why it could not be reached
    has_refused: bool = False  # nobody listens there any more
    incoming: _Incoming | None = None


class Listener:
    """Where a member listens, and the connections that wait there for a later reconfiguration.

    Args:
        address: of this host.
        key: the job's, or None.
        key_name: compared with the others'.
    """

    def __init__(self, address: str, key: bytes | None, key_name: str) -> None:
        self.socket = closed_in_children(listen_at(address))
        self.socket.setblocking(False)
        self.key, self.key_name = key or b"", key_name
        self.waiting: list[_Incoming] = []
        self.used: set[int] = set()
        self.handle = Handle(
            version=_VERSION,
            member=secrets.token_hex(8),
            token=secrets.token_hex(_MAC_BYTES),
            address=address,
            port=self.socket.getsockname()[1],
            host=host_identity(),
            network=network_identity(),
            pid=os.getpid(),
        )

    def close(self) -> None:
        self.socket.close()
        for incoming in self.waiting:
            incoming.sock.close()
        self.waiting.clear()


class Mesh:
    """The connections of one member during one reconfiguration; used by one thread.

    Args:
        members: by rank.

    Attributes:
        secret: known to those who have the same handles and key.
        values: what was announced, by key.
        failure: the rank that says that the group cannot form, and why.
        unreachable: why a member can never be reached from here.
    """

    def __init__(self, listener: Listener, members: Sequence[Handle], uuid: int) -> None:
        self._listener, self._uuid = listener, uuid
        self.rank = members.index(listener.handle)
        names = json.dumps([uuid, [handle.text for handle in members]]).encode()
        self.secret = hashlib.blake2b(names, key=listener.key).digest()
        self._greeting = {
            "version": _VERSION,
            "member": listener.handle.member,
            "uuid": uuid,
            "members": hashlib.blake2b(names, digest_size=_MAC_BYTES).hexdigest(),
            "key": listener.key_name,
            "nonce": secrets.token_hex(8),
        }
        self.values: dict[str, bytes] = {}
        self.failure: tuple[int, TorchRelayError] | None = None
        self.unreachable: UnavailableError | None = None
        self._has_failed = False
        self._announced: list[dict[str, Any]] = []
        self._strangers: list[_Incoming] = []
        self._peers = {r: _Peer(r, each) for r, each in enumerate(members) if r != self.rank}
        self._selector = selectors.DefaultSelector()
        if not self._peers:
            return  # who connects now wants another reconfiguration
        self._selector.register(listener.socket, selectors.EVENT_READ, lambda _: self._accept())
        waiting, listener.waiting = listener.waiting, []
        for incoming in waiting:
            if incoming.greeting["uuid"] == uuid:
                self._watch(incoming)
                self._take(incoming)
            elif incoming.is_half_closed():
                incoming.sock.close()
            else:
                listener.waiting.append(incoming)

    def close(self) -> None:
        for peer in self._peers.values():
            self._close(peer.sock)
            if peer.incoming:
                self._close(peer.incoming.sock)
        for incoming in self._strangers:
            self._close(incoming.sock)
        self._selector.close()

    # --- what a rank of the group calls

    @property
    def is_flushed(self) -> bool:
        """Whether all that was announced is on its way to each member that still listens."""
        return not any(peer.is_behind and not peer.has_refused for peer in self._peers.values())

    def announce(self, key: str, text: str) -> None:
        self.values[key] = text.encode()
        self._send_all({"key": key, "text": text})

    def fail(self, error: BaseException) -> None:
        """Tell the others, once, why this member gives up; also those that come later."""
        if self._has_failed:
            return
        self._has_failed = True
        self._send_all({"failed": to_json(error)})
        end_s = time.monotonic() + _FAREWELL_S
        while not self.is_flushed and time.monotonic() < end_s:
            with contextlib.suppress(OSError):  # what the error may be about
                self.pump(_FAREWELL_S / 10)

    def is_lost(self, rank: int) -> bool:
        """Return whether a member has ended its connection, or nobody listens where it did."""
        peer = self._peers.get(rank)
        if peer is None:
            return False
        return peer.has_refused or (peer.incoming is not None and peer.incoming.has_ended)

    def describe(self, rank: int) -> str:
        """Return where a member is, and why it could not be reached, if it could not."""
        peer = self._peers[rank]
        return f"{peer.handle.place}{peer.trouble and ', ' + peer.trouble}"

    def pump(self, wait_s: float) -> None:
        """Send and receive what is possible; wait for something to do for up to ``wait_s``."""
        now_s = time.monotonic()
        for peer in self._peers.values():
            if peer.sock is None and not peer.has_refused and now_s >= peer.dial_s:
                self._dial(peer)
        for key, events in self._selector.select(wait_s):
            key.data(events)

    # --- connections to others

    def _dial(self, peer: _Peer) -> None:
        here, there = self._listener.handle, peer.handle
        if is_loopback(there.address) and there.network != here.network:
            peer.has_refused = True
            self.unreachable = UnavailableError(
                f"rank {peer.rank} ({there.place}) listens at a loopback address of another host; "
                "set TORCHRELAY_TRANSPORT_INTERFACE there"
            )
            return
        family = socket.AF_INET6 if ":" in there.address else socket.AF_INET
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
        sock = closed_in_children(socket.socket(family, kind))
        peer.sock, peer.is_connected = sock, False
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        error = sock.connect_ex((there.address, there.port))
        self._selector.register(sock, selectors.EVENT_WRITE, partial(self._ready, peer))
        if error not in (0, errno.EINPROGRESS):
            self._hang_up(peer, error)

    def _ready(self, peer: _Peer, events: int) -> None:
        if peer.sock is None:
            return
        if not peer.is_connected:
            error = peer.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._hang_up(peer, error)
                return
            peer.is_connected, peer.trouble = True, ""
            peer.sends, peer.answers = Frames(peer.handle.key), Frames(peer.handle.key)
            peer.unsent = peer.sends.pack(self._greeting)
            peer.sends.key = _session_key(peer.handle, self._listener)
            peer.unsent += b"".join(map(peer.sends.pack, self._announced))
        self._flush(peer)
        if events & selectors.EVENT_READ:
            self._hear_answer(peer)

    def _send_all(self, value: dict[str, Any]) -> None:
        self._announced.append(value)
        for peer in self._peers.values():
            peer.is_behind = True
            if peer.is_connected:
                peer.unsent += peer.sends.pack(value)
                self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        if peer.sock is None:
            return
        try:
            peer.unsent = peer.unsent[peer.sock.send(peer.unsent) :] if peer.unsent else b""
        except BlockingIOError:
            pass
        except OSError as error:
            self._hang_up(peer, error.errno or 0)
            return
        peer.is_behind = bool(peer.unsent)
        more = selectors.EVENT_WRITE if peer.unsent else 0
        self._selector.modify(peer.sock, selectors.EVENT_READ | more, partial(self._ready, peer))

    def _hear_answer(self, peer: _Peer) -> None:
        """Read why a member refuses this one, or the end of the connection."""
        if peer.sock is None:
            return
        try:
            data = peer.sock.recv(_MAX_FRAME)
            peer.answers.feed(data)
            for frame in peer.answers:
                self._hear(peer, frame)
        except BlockingIOError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            data = b""
        if not data:
            self._hang_up(peer, errno.ECONNRESET)

    def _hang_up(self, peer: _Peer, error: int) -> None:
        self._close(peer.sock)
        peer.sock, peer.is_connected = None, False
        peer.dial_s = time.monotonic() + _REDIAL_S
        peer.has_refused = error == errno.ECONNREFUSED
        peer.trouble = f"which cannot be reached: {os.strerror(error)}"

    def _close(self, sock: socket.socket | None) -> None:
        if sock is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(sock)
            sock.close()

    # --- connections from others

    def _accept(self) -> None:
        while True:
            try:
                sock, origin = self._listener.socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            sock.setblocking(False)
            if len(self._strangers) >= _MAX_WAITING:
                self._turn_away(self._strangers[0], ValueError("too many others connect"))
            frames = Frames(self._listener.handle.key)
            self._watch(_Incoming(closed_in_children(sock), f"{origin[0]}:{origin[1]}", frames))

    def _watch(self, incoming: _Incoming) -> None:
        self._strangers.append(incoming)

        def read(_: int) -> None:
            incoming.read()
            self._take(incoming)

        self._selector.register(incoming.sock, selectors.EVENT_READ, read)

    def _take(self, incoming: _Incoming) -> None:
        """Act on what has arrived."""
        try:
            incoming.greeting = incoming.greeting or next(iter(incoming.frames), {})
            if incoming.greeting and incoming.peer is None:
                self._admit(incoming)
            if incoming.peer is not None:
                for frame in incoming.frames:
                    self._hear(incoming.peer, frame)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._turn_away(incoming, error)
        if incoming.has_ended:
            self._forget(incoming)

    def _admit(self, incoming: _Incoming) -> None:
        """Make a connection that of a member; raise ValueError if it is none."""
        theirs, uuid = incoming.greeting, incoming.greeting["uuid"]
        if theirs["version"] != _VERSION:
            raise ValueError(f"its version of torchrelay has another protocol, {theirs['version']}")
        if uuid != self._uuid:
            if uuid in self._listener.used:
                raise _OverError(f"reconfiguration {uuid} is over there; use a fresh uuid")
            self._selector.unregister(incoming.sock)
            self._strangers.remove(incoming)
            if len(self._listener.waiting) >= _MAX_WAITING:
                self._listener.waiting.pop(0).sock.close()
            self._listener.waiting.append(incoming)
            return
        members = (p for p in self._peers.values() if p.handle.member == theirs["member"])
        peer = next(members, None)
        if peer is None:
            raise ValueError(f"it is not among those that reconfiguration {uuid} has here")
        for name, what in _COMPARED.items():
            if theirs[name] != self._greeting[name]:
                message = f"reconfiguration {uuid}: {what} of {peer.handle.place} are not those of "
                message += self._listener.handle.place
                self.failure = peer.rank, MismatchError(message)
                raise ValueError(message)
        incoming.frames.key = _session_key(self._listener.handle, self._listener)
        former, peer.incoming, incoming.peer = peer.incoming, incoming, peer
        self._strangers.remove(incoming)
        if former:
            self._forget(former)

    def _hear(self, peer: _Peer, frame: dict[str, Any]) -> None:
        if "failed" in frame:
            self.failure = self.failure or (peer.rank, from_json(frame["failed"]))
        else:
            self.values[frame["key"]] = frame["text"].encode()

    def _turn_away(self, incoming: _Incoming, reason: Exception) -> None:
        _logger.warning("turned away the connection from %s: %s", incoming.origin, reason)
        if incoming.greeting:
            kind = PeerLostError if isinstance(reason, _OverError) else MismatchError
            error = kind(f"{self._listener.handle.place} turned this member away: {reason}")
            with contextlib.suppress(OSError):
                answer = Frames(self._listener.handle.key).pack({"failed": to_json(error)})
                incoming.sock.send(answer)
        incoming.has_ended = True
        self._forget(incoming)

    def _forget(self, incoming: _Incoming) -> None:
        """Close a connection, unless it waits for a later reconfiguration."""
        if incoming in self._strangers:
            self._strangers.remove(incoming)
        if incoming not in self._listener.waiting:
            self._close(incoming.sock)


_COMPARED = {"members": "the handles", "key": "the key"}


def _session_key(receiver: Handle, listener: Listener) -> bytes:
    return hashlib.blake2b(receiver.key, key=listener.key).digest()

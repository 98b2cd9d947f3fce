"""What the members of an elastic job publish to each other, over connections of their own.

A member listens at one address for as long as it lives, and connects to each other one for a round
of agreement. Whoever accepts sends a nonce; what the other one then sends is authenticated with it
and the job's secret. Of what it publishes only the newest counts, so a connection that is lost is
made again, and no message is repeated. That nobody listens where a member did shows that its
process has ended: it never closes its listener while it lives.

Frames are JSON of limited size. Handles in them let others form a group with this member: they are
as secret as the network is, which the transport key encrypts for all that follows.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import secrets
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torchrelay._addresses import listen_at
from torchrelay._mesh import Frames
from torchrelay._processes import closed_in_children

__all__ = ["Peers", "join", "resolved", "split"]

_logger = logging.getLogger("torchrelay.training")
_VERSION = 1
_PUBLIC = b"torchrelay elastic"  # the key of what anyone may know
_REDIAL_S, _MOST_REDIAL_S = 0.05, 2.0
_MOST_SENT = 1 << 19  # bytes over one connection, of which the other side takes twice as many
_MOST_INCOMING = 1024
_BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError)


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolved(text: str) -> list[str]:
    """Return the addresses that a list of ``host:port`` stands for. Raises OSError, ValueError."""
    found = []
    for one in filter(None, (one.strip() for one in text.split(","))):
        host, port = split(one)
        for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            found.append(join(str(address[0]), port))
    return sorted({*found})


@dataclass(eq=False)
class _Connection:
    sock: socket.socket
    frames: Frames
    origin: str = ""
    nonce: str = ""
    member: str = ""  # incoming: once it has been admitted
    unsent: bytes = b""
    is_connected: bool = False
    sent: int = 0
    dialed_s: float = field(default_factory=time.monotonic)
    answers: Frames | None = None  # outgoing: once the nonce has arrived


@dataclass(eq=False)
class _Target:
    """An address to which this member publishes."""

    connection: _Connection | None = None
    dial_s: float = 0.0
    redial_s: float = _REDIAL_S
    is_behind: bool = True


@dataclass
class Peers:
    """This member's listener and connections; used by one thread.

    Args:
        address: where it listens, ``host:port``; port 0: any.
        secret: of the job. ``key_name``: compared with that of others, to name the cause.
        about: what must be equal on all members, described for messages.

    Attributes:
        received: what others have published since it was last emptied, by member.
        found: by address, the member that listens there, empty if none does, and a time before
            that was seen.
        refusals: why others refuse this member, by address.
    """

    address: str
    secret: bytes
    key_name: str
    about: dict[str, str]
    member: str = ""
    received: dict[str, dict[str, Any]] = field(default_factory=dict)
    found: dict[str, tuple[str, float]] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._listener = closed_in_children(listen_at(*split(self.address)))
        self._listener.setblocking(False)
        self.address = join(split(self.address)[0], self._listener.getsockname()[1])
        self.member = f"{self.address}/{secrets.token_hex(4)}"
        self._targets: dict[str, _Target] = {}
        self._incoming: list[_Connection] = []
        self._value: dict[str, Any] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, lambda _: self._accept())

    def close(self) -> None:
        """Listen no more, by which others see that this member has left."""
        self.begin()
        for connection in [*self._incoming]:
            self._drop(connection)
        self._selector.close()
        self._listener.close()

    def begin(self) -> None:
        """Forget the connections of an earlier round, and what it showed of others."""
        for target in self._targets.values():
            self._hang_up(target)
        self._targets.clear()
        self.found.clear()
        self.refusals.clear()

    def publish(self, value: Mapping[str, Any], addresses: Iterable[str]) -> None:
        """Publish ``value`` in the place of what was published before."""
        for address in addresses:
            if address != self.address:
                self._targets.setdefault(address, _Target())
        if value != self._value:
            self._value = {**value}
            for target in self._targets.values():
                target.is_behind = True

    def is_flushed(self, addresses: Iterable[str]) -> bool:
        """Return whether the newest value is on its way to ``addresses``."""
        targets = [self._targets[one] for one in addresses if one in self._targets]
        return not any(
            one.is_behind or (one.connection and one.connection.unsent) for one in targets
        )

    def pump(self, wait_s: float) -> None:
        """Send and receive what is possible; wait for something to do for up to ``wait_s``."""
        now_s = time.monotonic()
        for address, target in self._targets.items():
            if target.connection is None and now_s >= target.dial_s:
                self._dial(address, target)
            elif target.is_behind:
                self._flush(address, target)
        for key, events in self._selector.select(wait_s):
            key.data(events)

    # --- connections to others

    def _dial(self, address: str, target: _Target) -> None:
        host, port = split(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = closed_in_children(socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        target.connection = _Connection(sock, Frames(b""))
        target.redial_s = min(2 * target.redial_s, _MOST_REDIAL_S)
        target.dial_s = time.monotonic() + target.redial_s
        error = sock.connect_ex((host, port))
        self._selector.register(
            sock, selectors.EVENT_WRITE, lambda e: self._ready(address, target, e)
        )
        if error not in (0, errno.EINPROGRESS):
            self._lost(address, target, error)

    def _ready(self, address: str, target: _Target, events: int) -> None:
        connection = target.connection
        if connection is None:
            return
        if not connection.is_connected:
            error = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._lost(address, target, error)
                return
            connection.is_connected, connection.frames = True, Frames(_PUBLIC)
        try:
            if events & selectors.EVENT_READ:
                data = connection.sock.recv(1 << 16)
                if not data:
                    raise ConnectionResetError(errno.ECONNRESET, "closed")
                self._hear_answer(address, target, connection, data)
            self._flush(address, target)
        except BlockingIOError:
            pass
        except _BROKEN as error:
            self._lost(address, target, getattr(error, "errno", None) or 0)

    def _hear_answer(
        self, address: str, target: _Target, connection: _Connection, data: bytes
    ) -> None:
        (connection.answers or connection.frames).feed(data)
        if connection.answers is None:
            greeting = next(iter(connection.frames), None)
            if greeting is None:
                return
            theirs = greeting["version"], greeting["key"]
            for what, mine, other in zip(
                ("protocol", "token or key"), (_VERSION, self.key_name), theirs, strict=True
            ):
                if mine != other:
                    self.refusals[address] = f"its {what} is {other}, that of this member {mine}"
                    raise ValueError(self.refusals[address])
            nonce = secrets.token_hex(8)
            connection.answers = Frames(self._key(greeting["nonce"], nonce))
            connection.frames = Frames(self._key(greeting["nonce"]))
            hello = {"member": self.member, "nonce": nonce, "about": self.about}
            connection.unsent = connection.frames.pack(hello)
            target.is_behind = True
        for answer in connection.answers:
            if "refused" in answer:
                self.refusals[address] = str(answer["refused"])
                raise ValueError(answer["refused"])
            self.found[address] = str(answer["member"]), connection.dialed_s
            target.redial_s = _REDIAL_S

    def _flush(self, address: str, target: _Target) -> None:
        connection = target.connection
        if connection is None or not connection.is_connected:
            return
        if target.is_behind and connection.answers is not None:
            target.is_behind = False
            if self._value:
                connection.unsent += connection.frames.pack(self._value)
        try:
            sent = connection.sock.send(connection.unsent) if connection.unsent else 0
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lost(address, target, error.errno or 0)
            return
        connection.unsent, connection.sent = connection.unsent[sent:], connection.sent + sent
        more = selectors.EVENT_WRITE if connection.unsent else 0
        self._selector.modify(
            connection.sock,
            selectors.EVENT_READ | more,
            lambda events: self._ready(address, target, events),
        )
        if connection.sent > _MOST_SENT and not connection.unsent:
            self._hang_up(target)

    def _lost(self, address: str, target: _Target, error: int) -> None:
        if error == errno.ECONNREFUSED and target.connection is not None:
            self.found[address] = "", target.connection.dialed_s
        self._hang_up(target)

    def _hang_up(self, target: _Target) -> None:
        if target.connection is not None:
            self._unwatch(target.connection.sock)
            target.connection, target.is_behind = None, True

    # --- connections from others

    def _accept(self) -> None:
        with suppress(BlockingIOError, ConnectionAbortedError):
            sock, origin = self._listener.accept()
            sock.setblocking(False)
            connection = _Connection(closed_in_children(sock), Frames(b""), join(*origin[:2]))
            connection.nonce = secrets.token_hex(8)
            connection.frames.key = self._key(connection.nonce)
            if len(self._incoming) >= _MOST_INCOMING:
                self._drop(
                    next((one for one in self._incoming if not one.member), self._incoming[0])
                )
            self._incoming.append(connection)
            self._selector.register(sock, selectors.EVENT_READ, lambda _: self._read(connection))
            greeting = {"version": _VERSION, "key": self.key_name, "nonce": connection.nonce}
            with suppress(OSError):
                sock.send(Frames(_PUBLIC).pack(greeting))

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(1 << 16)
            connection.frames.feed(data)
            for frame in connection.frames:
                if not connection.member:
                    self._admit(connection, frame)
                else:
                    self.received[connection.member] = frame
            if not data:
                self._drop(connection)
        except BlockingIOError:
            pass
        except _BROKEN as error:
            if not isinstance(error, OSError):
                _logger.warning("turned away the connection from %s: %s", connection.origin, error)
            self._drop(connection)

    def _admit(self, connection: _Connection, hello: dict[str, Any]) -> None:
        answer, theirs = Frames(self._key(connection.nonce, hello["nonce"])), hello["about"]
        different = [
            f"{name} is {theirs.get(name)} there, {mine} on {self.member}"
            for name, mine in self.about.items()
            if theirs.get(name) != mine
        ]
        text = f"{hello['member']} cannot be in this job: {'; '.join(different)}"
        reply = {"refused": text} if different else {"member": self.member}
        connection.sock.send(answer.pack(reply))
        if different:
            raise ValueError(text)
        connection.member = str(hello["member"])

    def _drop(self, connection: _Connection) -> None:
        if connection in self._incoming:
            self._incoming.remove(connection)
            self._unwatch(connection.sock)

    def _unwatch(self, sock: socket.socket) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(sock)
        sock.close()

    def _key(self, *nonces: str) -> bytes:
        return hashlib.blake2b(json.dumps(nonces).encode(), key=self.secret).digest()

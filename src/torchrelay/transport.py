"""Messages between the nodes of a job: one contract, over memory or over ZeroMQ.

:class:`Transport` is the contract, :func:`connect` makes one: every node calls it with the same store and name
and gets back its place among all. Underneath lies a native network: :func:`zmq_network` (ZeroMQ: TCP between
hosts, Unix sockets within one, CURVE encryption when keys are given), :func:`plain_network` (the same sockets
without ZeroMQ), or a ``_native.MemoryNetwork`` (nodes as threads; delays, reorders and duplicates on demand).

Messages of the parameter manager never pass through Python: its native core opens endpoints of its own on the
same networks, with the same token, keys, limits and heartbeats (:class:`TransportSettings`), and numbers them
itself. :class:`Transport` is for messages that are made and read in Python, by rooms and by users.
"""

from __future__ import annotations

import os
import secrets
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torchrelay import _native, config, telemetry
from torchrelay.config import TransportSettings
from torchrelay.errors import (
    ArgumentError,
    ConfigError,
    OperationTimeoutError,
    PeerLostError,
    ProtocolError,
    TorchRelayError,
    UnavailableError,
)

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = [
    "PROTOCOL_VERSION",
    "Received",
    "Transport",
    "TransportSettings",
    "connect",
    "create_key_file",
    "plain_network",
    "read_key_file",
    "session_token",
    "zmq_library_path",
    "zmq_network",
]

PROTOCOL_VERSION = 1
TOKEN_BYTES = 16


@dataclass(frozen=True)
class Received:
    """A message and the node that sent it."""

    peer: int
    data: bytes


class Transport(Protocol):
    """A node's connections with all other nodes of a job, which are numbered from 0.

    Messages from one node to another arrive exactly once and in the order they were sent; nothing is said
    about messages of different senders. All methods may be called from any thread. The data passed to
    :meth:`send` is copied before it returns; what :meth:`receive` returns is the caller's.
    """

    @property
    def node(self) -> int: ...

    @property
    def nodes(self) -> int: ...

    def send(self, peer: int, data: bytes, timeout_s: float = 30.0) -> None:
        """Queues ``data`` for ``peer``; blocks while ``high_water_mark`` messages to it were not taken.

        Raises:
            ArgumentError: there is no such peer, or ``data`` is above the size limit. Nothing was sent.
            OperationTimeoutError: the peer took nothing for ``timeout_s``. Nothing was sent.
            PeerLostError: the peer has died, closed its transport or fallen silent.
        """

    def receive(self, timeout_s: float = 30.0) -> Received:
        """The next message of any peer; blocks until there is one.

        Raises:
            OperationTimeoutError: nothing came for ``timeout_s``.
            PeerLostError: a peer was lost; raised once for each, after what it had sent.
            ProtocolError: a peer sent what the protocol does not allow.
        """

    def close(self) -> None:
        """Tells all peers, which hear it as :class:`PeerLostError`, and lets go of everything. Idempotent."""


def zmq_library_path() -> str:
    """The path of the libzmq that the pyzmq wheel carries.

    Raises:
        UnavailableError: pyzmq was built against a libzmq of the system; its wheel carries one.
    """
    import zmq  # noqa: PLC0415 - costs 30 ms, and only networks need it

    package = Path(zmq.__file__).parent
    for folder in (package.parent / "pyzmq.libs", package / ".libs", package):
        for path in sorted(folder.glob("libzmq*.so*")):
            return str(path)
    raise UnavailableError(f"there is no libzmq beside {package}; install pyzmq as a wheel, not from source")


def create_key_file(path: str | Path) -> None:
    """Writes a new CURVE key pair, readable by its owner alone. All nodes of a job get the same file.

    Raises:
        FileExistsError: there is such a file; keys are never overwritten.
    """
    import zmq  # noqa: PLC0415

    public, secret = zmq.curve_keypair()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(public + b"\n" + secret + b"\n")


def read_key_file(path: str | Path) -> tuple[str, str]:
    """The public and the secret key in ``path``.

    Raises:
        ConfigError: it cannot be read, others may read it, or it holds no key pair.
    """
    try:
        others_may_read = Path(path).stat().st_mode & 0o077
        keys = Path(path).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {path} cannot be read: {error}") from error
    if others_may_read:
        raise ConfigError(f"other users may access the key file {path}; use chmod 600")
    if [len(key) for key in keys] != [40, 40]:
        raise ConfigError(f"{path} is no key file; make one with torchrelay.transport.create_key_file")
    return keys[0], keys[1]


def session_token(store: Store, node: int, name: str = "", timeout_s: float = 60.0) -> bytes:
    """The secret that tells nodes of this job from strangers. Node 0 draws it, the others get it.

    Raises:
        OperationTimeoutError: node 0 did not come within ``timeout_s``.
    """
    key = f"torchrelay/transport/{name}/token"
    if node == 0:
        store.set(key, secrets.token_hex(TOKEN_BYTES))
    return bytes.fromhex(_from_store(store, key, 0, node, timeout_s))


def zmq_network(
    settings: TransportSettings | None = None, *, token: bytes, interface: str = "127.0.0.1"
) -> _native.ZmqNetwork:
    """A ZeroMQ network for this process.

    Args:
        token: the same 16 bytes on all nodes; see :func:`session_token`.
        interface: the address or device others reach this host by. The default is reached by nobody else.

    Raises:
        ConfigError: the key file is no key file.
        UnavailableError: there is no libzmq.
    """
    settings = settings or config.load(TransportSettings)
    public, secret = read_key_file(settings.key_file) if settings.key_file else ("", "")
    return _native.ZmqNetwork(
        zmq_library_path(),
        token=token,
        interface=interface,
        max_message_bytes=settings.max_message_bytes + _HEADER.size,
        local_sockets=settings.local_sockets,
        heartbeat_s=settings.heartbeat_s,
        silence_s=settings.silence_s,
        linger_s=settings.linger_s,
        spin_s=settings.spin_s,
        io_threads=settings.io_threads,
        curve_public_key=public,
        curve_secret_key=secret,
    )


def plain_network(
    settings: TransportSettings | None = None, *, token: bytes, interface: str = "127.0.0.1"
) -> _native.TcpNetwork:
    """A network of plain sockets, for the native core: faster than :func:`zmq_network`, and not encrypted.

    Arguments as there.

    Raises:
        ConfigError: there is a key file, but plain sockets do not encrypt.
    """
    settings = settings or config.load(TransportSettings)
    if settings.key_file:
        raise ConfigError(
            "TORCHRELAY_TRANSPORT_KEY_FILE is set, but plain sockets do not encrypt: use zmq_network, or unset it"
        )
    return _native.TcpNetwork(
        token=token,
        interface=interface,
        max_message_bytes=settings.max_message_bytes + _HEADER.size,
        local_sockets=settings.local_sockets,
        silence_s=settings.silence_s,
        linger_s=settings.linger_s,
        spin_s=settings.spin_s,
    )


def connect(
    network: _native.Network,
    store: Store,
    node: int,
    nodes: int,
    name: str,
    settings: TransportSettings | None = None,
) -> Transport:
    """Connects this node with all others; collective over all nodes.

    Args:
        store: all nodes' store, through which they find each other.
        name: tells the transports of one store apart; the same on all nodes, used once.

    Raises:
        OperationTimeoutError: a node did not come within ``connect_timeout_s``; ``ranks`` names those missing.
        ProtocolError: a node speaks another version.
    """
    if not 0 <= node < nodes:
        raise ArgumentError(f"node {node} of {nodes}: nodes are numbered from 0 to {nodes - 1}")
    mesh = _Mesh(network, node, nodes, settings or config.load(TransportSettings))
    try:
        mesh.connect(store, name)
    except BaseException:
        mesh.close()
        raise
    return mesh


def _from_store(store: Store, key: str, owner: int, node: int, timeout_s: float) -> str:
    try:
        store.wait([key], timedelta(seconds=timeout_s))
        return bytes(store.get(key)).decode()
    except Exception as error:  # DistStoreError from a TCPStore, RuntimeError from others
        raise OperationTimeoutError(
            f"node {node}: node {owner} did not come to the store within {timeout_s:g} s; is it running?",
            ranks=(owner,),
        ) from error


# kind, version, sender, number of the message (data) or of messages taken (the others)
_HEADER = struct.Struct("<BxHiQ")
_DATA, _HELLO, _BEAT, _BYE = range(4)


@dataclass
class _Peer:
    """What a node knows of another. Guarded by the mesh's condition."""

    heard_s: float
    greeted: bool = False
    lost: str = ""  # why
    loss_told: bool = False
    sent: int = 0
    taken_by_peer: int = 0
    next_number: int = 0
    early: dict[int, bytes | None] = field(default_factory=dict)  # None: the peer's farewell
    taken: int = 0  # of the peer's messages, by our caller
    taken_told: int = 0


class _Mesh:
    """A :class:`Transport` over any native network: numbers, greetings, credit and heartbeats.

    One thread receives, and beats; callers send. A peer may have ``high_water_mark`` messages under way that
    our caller has not taken; beats and messages tell it how many were.
    """

    def __init__(self, network: _native.Network, node: int, nodes: int, settings: TransportSettings) -> None:
        self._node = node
        self._settings = settings
        self._inbound = network.open(f"node-{node}")
        self._outbound = network.open(f"node-{node}")
        self._condition = threading.Condition()
        self._peers = {peer: _Peer(time.monotonic()) for peer in range(nodes) if peer != node}
        self._inbox: deque[Received] = deque()
        self._failure: TorchRelayError | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"torchrelay-transport-{node}", daemon=True)

    @property
    def node(self) -> int:
        return self._node

    @property
    def nodes(self) -> int:
        return len(self._peers) + 1

    def connect(self, store: Store, name: str) -> None:
        prefix = f"torchrelay/transport/{name}"
        timeout_s = self._settings.connect_timeout_s
        deadline_s = time.monotonic() + timeout_s
        store.set(f"{prefix}/{self._node}", self._inbound.address)
        for peer in self._peers:
            left_s = max(0.001, deadline_s - time.monotonic())
            self._outbound.connect(peer, _from_store(store, f"{prefix}/{peer}", peer, self._node, left_s))
        with self._condition:
            for peer, state in self._peers.items():
                state.heard_s = time.monotonic()
                self._post(_HELLO, peer, state)
        self._thread.start()
        with self._condition:
            greeted = self._condition.wait_for(
                lambda: self._failure or all(peer.greeted for peer in self._peers.values()),
                max(0.001, deadline_s - time.monotonic()),
            )
            if self._failure:
                raise self._failure
            if not greeted:
                missing = [peer for peer, state in self._peers.items() if not state.greeted]
                raise OperationTimeoutError(
                    f"node {self._node}: nodes {missing} did not answer within {timeout_s:g} s; can they be "
                    "reached, and do all nodes have the same key file?",
                    ranks=missing,
                )

    def send(self, peer: int, data: bytes, timeout_s: float = 30.0) -> None:
        state = self._peers.get(peer)
        if state is None:
            raise ArgumentError(
                f"node {self._node}: send to node {peer}: peers are the other nodes of {self.nodes}"
            )
        if len(data) > self._settings.max_message_bytes:
            raise ArgumentError(
                f"node {self._node}: send to node {peer}: {len(data)} bytes are more than max_message_bytes = "
                f"{self._settings.max_message_bytes}"
            )
        limit = self._settings.high_water_mark
        with self._condition:
            free = self._condition.wait_for(
                lambda: state.lost or self._closed or state.sent - state.taken_by_peer < limit, timeout_s
            )
            if state.lost or self._closed:
                raise PeerLostError(self._lost_message("send", peer), ranks=(peer,))
            if not free:
                raise OperationTimeoutError(
                    f"node {self._node}: send to node {peer}: it has left {limit} messages untaken for "
                    f"{timeout_s:g} s; is it still receiving?",
                    ranks=(peer,),
                )
            self._post(_DATA, peer, state, data)
            state.sent += 1
        telemetry.count("transport.sent_bytes", len(data))

    def receive(self, timeout_s: float = 30.0) -> Received:
        with self._condition:
            self._condition.wait_for(self._something_to_tell, timeout_s)
            if self._inbox:
                return self._take()
            if self._failure:
                raise self._failure
            for peer, state in self._peers.items():
                if state.lost and not state.loss_told:
                    state.loss_told = True
                    raise PeerLostError(self._lost_message("receive", peer), ranks=(peer,))
            if self._closed:
                raise PeerLostError(
                    f"node {self._node}: receive: the transport is closed", ranks=(self._node,)
                )
        raise OperationTimeoutError(f"node {self._node}: receive: nothing came for {timeout_s:g} s")

    def close(self) -> None:
        with self._condition:
            if self._closed:
                return
            self._closed = True
            for peer, state in self._peers.items():
                if state.greeted and not state.lost:
                    self._post(_BYE, peer, state)
            self._condition.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        del self._inbound, self._outbound

    def _something_to_tell(self) -> bool:
        lost = any(state.lost and not state.loss_told for state in self._peers.values())
        return bool(self._inbox or self._failure or lost or self._closed)

    def _take(self) -> Received:
        received = self._inbox.popleft()
        state = self._peers[received.peer]
        state.taken += 1
        if state.taken - state.taken_told >= max(1, self._settings.high_water_mark // 2) and not state.lost:
            self._post(_BEAT, received.peer, state)
        telemetry.count("transport.received_bytes", len(received.data))
        return received

    def _lost_message(self, operation: str, peer: int) -> str:
        return f"node {self._node}: {operation}: node {peer} {self._peers[peer].lost or 'is out of reach: closed'}"

    def _post(self, kind: int, peer: int, state: _Peer, data: bytes = b"") -> None:
        number = state.sent if kind in (_DATA, _BYE) else state.taken
        if kind == _BEAT:
            state.taken_told = state.taken
        self._outbound.send(peer, _HEADER.pack(kind, PROTOCOL_VERSION, self._node, number) + data)

    def _run(self) -> None:
        beat_s = self._settings.heartbeat_s
        next_beat_s = time.monotonic()
        while not self._closed and not self._failure:
            try:
                message = self._inbound.receive(max(0.0, min(beat_s, next_beat_s - time.monotonic(), 0.05)))
                with self._condition:
                    if message is not None:
                        self._handle(message)
                    if time.monotonic() >= next_beat_s:
                        next_beat_s = time.monotonic() + beat_s
                        self._beat()
            except TorchRelayError as error:
                with self._condition:
                    self._failure = error
                    self._condition.notify_all()

    def _beat(self) -> None:
        now_s = time.monotonic()
        for peer, state in self._peers.items():
            if state.lost:
                continue
            self._post(_BEAT if state.greeted else _HELLO, peer, state)
            if state.greeted and now_s - state.heard_s > self._settings.silence_s:
                state.lost = (
                    f"has not been heard of for {now_s - state.heard_s:.1f} s; it died or cannot be reached"
                )
                telemetry.event("transport.peer_lost", node=self._node, peer=peer)
                self._condition.notify_all()

    def _handle(self, message: bytes) -> None:
        if len(message) < _HEADER.size:
            raise ProtocolError(
                f"node {self._node}: a message of {len(message)} bytes is shorter than a header"
            )
        kind, version, peer, number = _HEADER.unpack_from(message)
        if version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"node {self._node}: node {peer} speaks version {version} of the transport's protocol, this node "
                f"version {PROTOCOL_VERSION}; install the same torchrelay on all nodes"
            )
        state = self._peers.get(peer)
        if state is None or kind > _BYE:
            raise ProtocolError(f"node {self._node}: a message of kind {kind} claims to be from node {peer}")
        state.heard_s = time.monotonic()
        state.greeted = True
        if kind == _DATA:
            self._put(peer, state, number, message[_HEADER.size :])
        elif kind == _BYE:
            self._put(peer, state, number, None)
        else:
            state.taken_by_peer = max(state.taken_by_peer, number)
        self._condition.notify_all()

    def _put(self, peer: int, state: _Peer, number: int, data: bytes | None) -> None:
        """Takes message ``number``: each once, in order."""
        if number < state.next_number:
            return
        state.early[number] = data
        while state.next_number in state.early:
            payload = state.early.pop(state.next_number)
            state.next_number += 1
            if payload is None:
                state.lost = "closed its transport"
                return
            self._inbox.append(Received(peer, payload))

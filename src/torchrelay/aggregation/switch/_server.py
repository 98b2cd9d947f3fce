"""A switch: a data plane, and the control plane that admits workers to its sessions."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from torchrelay._resource import Resource
from torchrelay.aggregation.switch import _messages as messages
from torchrelay.aggregation.switch._data_plane import (
    ControlMessage,
    DataPlane,
    SessionShape,
    SwitchStats,
)
from torchrelay.aggregation.switch._messages import Kind
from torchrelay.errors import ArgumentError, TorchRelayError, UnavailableError

__all__ = ["SwitchServer"]

_POLL_S = 0.2
_EVERYONE = ("0.0.0.0/0",)


@dataclass
class _Session:
    shape: SessionShape
    left: set[int] = field(default_factory=set)


class SwitchServer(Resource):
    """Runs a data plane's control plane: opens sessions for workers that join, and closes them.

    A session ends when all its workers have left. When there are ``max_sessions``, a new one takes
    the place of the one that has been idle longest, if that is at least ``idle_timeout_s``;
    otherwise it is refused. That bounds the switch's memory: each session has at most ``max_slots``
    slots.

    Args:
        plane: closed with the server.
        max_workers: of one session.
        allow: networks whose workers may join; the default is all that reach the switch's address.
    """

    def __init__(
        self,
        plane: DataPlane,
        *,
        max_sessions: int = 64,
        max_slots: int = 1024,
        max_workers: int = 1024,
        idle_timeout_s: float = 3600.0,
        allow: Iterable[str] = _EVERYONE,
    ) -> None:
        self.plane = plane
        self.max_slots = max_slots
        self._max_sessions, self._max_workers = max_sessions, max_workers
        self._idle_timeout_s = idle_timeout_s
        self._allowed = [ipaddress.IPv4Network(network) for network in allow]
        self._sessions: dict[int, _Session] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, name="torchrelay-switch-control", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        return f"{self.plane.address}:{self.plane.port}"

    def stats(self) -> SwitchStats:
        """Return what the switch has done so far."""
        return self.plane.stats()

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._stopping.set()
        self._thread.join()
        self.plane.close()

    def is_allowed(self, address: str) -> bool:
        """Whether a worker of this address may join."""
        return any(ipaddress.IPv4Address(address) in network for network in self._allowed)

    def join(
        self, session_id: int, rank: int, shape: SessionShape, address: str, ports: tuple[int, int]
    ) -> None:
        """Make the worker at ``ports`` (the first, and how many; 0 for all) a member; a repetition
        does nothing.

        Raises:
            ArgumentError: as :meth:`open`, or the address is another worker's.
            UnavailableError: there is no place for another session.
        """
        with self._lock:
            self._admit(session_id, rank, shape, address)
            self.plane.add_worker(session_id, rank, address, *ports)

    def open(self, session_id: int, rank: int, shape: SessionShape, address: str) -> None:
        """Make a session that a worker may join, if there is none of this id.

        Raises:
            ArgumentError: the session has another shape or exceeds a limit, or workers of this rank
                or address may not join.
            UnavailableError: there is no place for another session.
        """
        with self._lock:
            self._admit(session_id, rank, shape, address)

    def reset(self, session_id: int) -> None:
        """Forget a session, if there is one."""
        with self._lock:
            self._sessions.pop(session_id, None)
            self.plane.close_session(session_id)

    def _admit(self, session_id: int, rank: int, shape: SessionShape, address: str) -> None:
        if not self.is_allowed(address):
            raise ArgumentError(f"workers at {address} are not allowed here")
        known = self._sessions.get(session_id)
        if known is not None and known.shape != shape:
            raise ArgumentError(
                f"the session was made for {known.shape}, but worker {rank} expects {shape}"
            )
        if not 0 <= rank < shape.num_workers:
            raise ArgumentError(f"rank {rank} is not below the {shape.num_workers} workers")
        if known is None:
            self._open(session_id, shape)

    def _open(self, session_id: int, shape: SessionShape) -> None:
        if shape.num_slots > self.max_slots or shape.num_workers > self._max_workers:
            raise ArgumentError(
                f"this switch allows {self.max_slots} slots and {self._max_workers} workers in a "
                f"session, not {shape.num_slots} and {shape.num_workers}; lower "
                "max_outstanding_packets, or raise its limits"
            )
        if len(self._sessions) >= self._max_sessions:
            self._evict()
        self.plane.open_session(session_id, shape)
        self._sessions[session_id] = _Session(shape)

    def _evict(self) -> None:
        idle = max(self.plane.stats().sessions, key=lambda session: session.idle_s)
        if idle.idle_s < self._idle_timeout_s:
            raise UnavailableError(
                f"this switch has its {self._max_sessions} sessions, and none is idle"
            )
        self._sessions.pop(idle.session_id, None)
        self.plane.close_session(idle.session_id)

    def _serve(self) -> None:
        while not self._stopping.is_set():
            message = self.plane.receive_control(_POLL_S)
            if message is None:
                continue
            answer = self._answer(message)
            if answer is not None:
                self.plane.send_control(answer, message.address, message.port)

    def _answer(self, message: ControlMessage) -> bytes | None:
        """Return the answer to a message, if any; only a refusal may be longer than its request."""
        if message.coalesced:
            return messages.encode(Kind.COALESCED, 0)
        if not message.data:
            return messages.encode(Kind.UNKNOWN_SESSION, 0)
        request = messages.parse(message.data)
        if request is None:
            return None
        if request.kind == Kind.JOIN:
            return self._answer_join(request, message)
        if request.kind == Kind.LEAVE:
            self._leave(request)
        if request.kind == Kind.ASK_MISSING and request.session_id in self._sessions:
            ranks = self.plane.missing(request.session_id)
            return messages.encode(Kind.MISSING, request.session_id, messages.encode_ranks(ranks))
        return None

    def _answer_join(self, request: messages.Message, message: ControlMessage) -> bytes | None:
        join = messages.decode_join(request.body)
        if join is None:
            return None
        try:
            self.join(request.session_id, join.rank, join.shape, message.address, (message.port, 1))
        except TorchRelayError as error:
            return messages.encode(Kind.REFUSED, request.session_id, str(error).encode()[:400])
        return messages.encode(Kind.JOINED, request.session_id)

    def _leave(self, request: messages.Message) -> None:
        with self._lock:
            session = self._sessions.get(request.session_id)
            if session is None:
                return
            session.left.update(messages.decode_ranks(request.body)[:1])
            if len(session.left) == session.shape.num_workers:
                del self._sessions[request.session_id]
                self.plane.close_session(request.session_id)

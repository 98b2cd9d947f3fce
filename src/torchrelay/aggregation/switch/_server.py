"""A switch: a data plane, and the control plane that admits workers to its sessions."""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from torchrelay._resource import Resource
from torchrelay.aggregation.switch import _control as control
from torchrelay.aggregation.switch._client import Uplink
from torchrelay.aggregation.switch._control import ControlKind, ControlRequest, Join
from torchrelay.aggregation.switch._data_plane import (
    ControlMessage,
    DataPlane,
    SessionShape,
    SwitchStats,
)
from torchrelay.errors import ArgumentError, ConfigError, TorchRelayError, UnavailableError

__all__ = ["SwitchServer"]

_logger = logging.getLogger("torchrelay.aggregation.switch")
_POLL_S = 0.2
_SWEEP_S = 1.0
_TURN_S, _MAX_PER_TURN = 0.1, 200  # messages: a flood must not take a core
_TAKEOVER_S = 3.0  # a worker that is silent for so long has lost its ports to a new one
_SHARE = 4  # one address may use a quarter
_MAX_PORTS = 1024  # of one address
_MAX_WORKERS = 1024  # of one session
_EVERYONE = ("0.0.0.0/0",)


@dataclass
class _Session:
    shape: SessionShape
    opener: str  # address of the worker that joined first
    ranks: range  # of the workers here; the data plane numbers them from 0
    clients: dict[int, int] = field(default_factory=dict)  # which of a rank's workers has joined
    ports: dict[tuple[str, int], int] = field(default_factory=dict)  # ranks by address and port
    left: set[int] = field(default_factory=set)


class SwitchServer(Resource):
    """Runs a data plane's control plane: opens sessions for workers that join, and closes them.

    A session ends when all its workers have left, or have been silent for ``session_timeout_s``.
    SwitchML's own workers neither leave nor send signs of life, so their sessions end when one of
    their addresses joins another session, or after ``idle_timeout_s``. If a new session does
    not fit, those end that never summed anything and are silent.

    ``max_sessions`` and ``max_slots`` bound the switch's memory. One address opens at most a
    quarter of the sessions and of the slots, so no host can shut out the others.

    Args:
        plane: closed with the server.
        allow: networks whose workers may join; the default is all that reach the switch's address.
        uplink: the switch above this one, which then serves the workers of one rack.

    Raises:
        ConfigError: the data plane has no uplinks.
    """

    def __init__(
        self,
        plane: DataPlane,
        *,
        max_sessions: int = 64,
        max_slots: int = 8192,
        session_timeout_s: float = 15.0,
        idle_timeout_s: float = 3600.0,
        allow: Iterable[str] = _EVERYONE,
        uplink: Uplink | None = None,
    ) -> None:
        if uplink and not plane.has_uplinks:
            raise ConfigError(
                f"switch: the data plane {plane.name} has no uplink, because what it receives it "
                "can only send to its own ports' workers; use udp in the racks and any above them"
            )
        self.plane, self._uplink = plane, uplink
        self.max_slots = max_slots
        self._max_sessions = max_sessions
        self._session_timeout_s, self._idle_timeout_s = session_timeout_s, idle_timeout_s
        self._allowed = [ipaddress.IPv4Network(network) for network in allow]
        self._sessions: dict[int, _Session] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="switch-control", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"{self.plane.address}:{self.plane.port}"

    def stats(self) -> SwitchStats:
        """Return what the switch has done so far."""
        return self.plane.stats()

    def check(self) -> None:
        """Raise if the control plane's thread has ended.

        Raises:
            UnavailableError: workers can no longer join.
        """
        if self._error is not None:
            raise UnavailableError(
                f"switch {self.address}: its control thread has failed and no longer serves: "
                f"{self._error!r}; start it again"
            )

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._stopping.set()
        self._thread.join()
        for session_id, session in self._sessions.items():
            if self._uplink:
                self._uplink.leave(session_id, session.shape)
        self.plane.close()

    def join(self, session_id: int, join: Join, address: str, ports: tuple[int, int]) -> None:
        """Make the worker at ``ports`` (the first, and how many; 0 for all) a member; a repetition
        does nothing.

        If another client was this rank's worker, it is gone, and the session begins anew without
        members. If the ports were those of a worker of another session, which has been silent for
        seconds, that session ends.

        Raises:
            ArgumentError: the session has another shape or exceeds a limit, or workers of this rank
                or address may not join.
            UnavailableError: this address can have no further session now, or the ports are another
                worker's. Try again.
        """
        first, count = ports
        taken = {(address, port) for port in range(first, first + max(1, count))}
        with self._lock:
            known = self._sessions.get(session_id)
            if known is not None and known.clients.get(join.rank, join.client) != join.client:
                self._close(session_id)
            session = self._admit(session_id, join.rank, join.shape, address)
            owners = [one for each in self._sessions.values() for one, _ in each.ports]
            if len(taken - session.ports.keys()) + owners.count(address) > _MAX_PORTS:
                raise UnavailableError(f"workers at {address} have {_MAX_PORTS} ports already")
            for other_id, other in list(self._sessions.items()):
                if other is not session and not taken.isdisjoint(other.ports):
                    self._end_former(other_id, taken)
            rank = session.ranks.index(join.rank)
            self.plane.add_worker(session_id, rank, address, *ports)
            session.clients[join.rank] = join.client
            session.ports.update(dict.fromkeys(taken, rank))

    def reset(self, session_id: int) -> None:
        """Forget a session, if there is one."""
        with self._lock:
            self._close(session_id)

    def _admit(self, session_id: int, rank: int, shape: SessionShape, address: str) -> _Session:
        ip = ipaddress.IPv4Address(address)
        if ip.is_unspecified or ip.is_multicast or ip.is_reserved:
            raise ArgumentError(f"{address} is not the address of one worker")
        if not any(ip in network for network in self._allowed):
            raise ArgumentError(f"workers at {address} are not allowed here")
        known = self._sessions.get(session_id)
        if known is not None and known.shape != shape:
            raise ArgumentError(
                f"the session was made for {known.shape}, but worker {rank} expects {shape}"
            )
        if not 0 <= rank < shape.num_workers:
            raise ArgumentError(f"rank {rank} is not below the {shape.num_workers} workers")
        ranks = self._uplink.ranks(shape) if self._uplink else range(shape.num_workers)
        if rank not in ranks:
            raise ArgumentError(
                f"this is a rack's switch for the workers {ranks[0]} to {ranks[-1]} of "
                f"{shape.num_workers}, not for worker {rank}"
            )
        return known or self._open(session_id, _Session(shape, address, ranks))

    def _open(self, session_id: int, session: _Session) -> _Session:
        shape = session.shape
        if shape.num_slots > self.max_slots or shape.num_workers > _MAX_WORKERS:
            raise ArgumentError(
                f"this switch allows {self.max_slots} slots and {_MAX_WORKERS} workers in a "
                f"session, not {shape.num_slots} and {shape.num_workers}; lower "
                "max_outstanding_packets, or raise its limits"
            )
        self._check_capacity(shape, session.opener)
        socket = self._uplink.join(session_id, shape) if self._uplink else None
        here = dataclasses.replace(shape, num_workers=len(session.ranks))
        self.plane.open_session(session_id, here, socket)
        self._sessions[session_id] = session
        return session

    def _check_capacity(self, shape: SessionShape, opener: str) -> None:
        """Raise if another session is more than the opener's share, or does not fit; in either case
        after those that count there, never summed anything and are silent have ended.
        """
        for of in (opener, None):
            if self._lacks(shape, of):
                self._end_unused(of)
                if reason := self._lacks(shape, of):
                    raise UnavailableError(reason)

    def _lacks(self, shape: SessionShape, opener: str | None) -> str:
        """Return why an opener, or all (None), can have no further session; empty if they can."""
        share = 1 if opener is None else _SHARE
        sessions, slots = self._max_sessions, self.plane.max_slots
        theirs = [one for one in self._sessions.values() if opener in (None, one.opener)]
        used = sum(one.shape.num_slots for one in theirs)
        has_slots = used + shape.num_slots <= slots // share
        if not theirs or (len(theirs) < sessions // share and has_slots):
            return ""
        if opener is None:
            return (
                f"{len(theirs)} of this switch's {sessions} sessions and {used} of its {slots} "
                "slots are in use"
            )
        return (
            f"{opener} has opened {len(theirs)} sessions, and one address may use a quarter of "
            f"this switch's {sessions} sessions and {slots} slots (--max-sessions)"
        )

    def _end_unused(self, opener: str | None) -> None:
        """End the silent sessions, of an opener or of all, that never summed anything."""
        for stats in self.plane.stats().sessions:
            is_theirs = opener in (None, self._sessions[stats.session_id].opener)
            is_silent = stats.idle_s >= self._session_timeout_s
            if is_theirs and is_silent and not stats.counts["completed"]:
                self._close(stats.session_id)

    def _end_former(self, session_id: int, ports: set[tuple[str, int]]) -> None:
        """End a session whose worker's ports another one has now; raise if that worker lives."""
        ranks = self._sessions[session_id].ports
        (stats,) = [one for one in self.plane.stats().sessions if one.session_id == session_id]
        silent_s, (address, port) = min(
            (stats.workers[ranks[port]].silent_s, port) for port in ports & ranks.keys()
        )
        if silent_s < _TAKEOVER_S:
            raise UnavailableError(
                f"another worker has {f'port {port}' if port else 'all ports'} of {address}, and "
                f"sent a packet {silent_s:.1f} s ago"
            )
        self._close(session_id)

    def _close(self, session_id: int) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None and self._uplink:
            self._uplink.leave(session_id, session.shape)
        self.plane.close_session(session_id)

    def _end_silent(self) -> None:
        """End sessions that are silent (live workers of TorchRelay never are), and those that the
        switch above does not know any more.
        """
        with self._lock:
            lost = set(self._sessions)
            for session in self.plane.stats().sessions:
                sequenced = session.shape.sequenced
                limit_s = self._session_timeout_s if sequenced else self._idle_timeout_s
                if session.idle_s <= limit_s:
                    lost.discard(session.session_id)
            for session_id in lost:
                _logger.info(
                    "a session of %d workers ends: all are silent, or it was lost above",
                    self._sessions[session_id].shape.num_workers,
                )
                self._close(session_id)

    def _serve(self) -> None:
        try:
            self._answer_all()
        except BaseException as error:
            self._error = error
            _logger.critical("the control thread has failed", exc_info=True)

    def _answer_all(self) -> None:
        next_sweep_s, turn_s, handled = time.monotonic() + _SWEEP_S, 0.0, 0
        while not self._stopping.is_set():
            now_s = time.monotonic()
            if now_s >= next_sweep_s:
                self._end_silent()
                next_sweep_s = now_s + _SWEEP_S
            if now_s >= turn_s + _TURN_S:
                turn_s, handled = now_s, 0
            if handled == _MAX_PER_TURN:  # workers ask again for what is lost meanwhile
                self._stopping.wait(turn_s + _TURN_S - now_s)
                continue
            message = self.plane.receive_control(_POLL_S)
            if message is not None:
                handled += 1
                self._handle(message)

    def _handle(self, message: ControlMessage) -> None:
        try:
            answer = self._answer(message)
            if answer is not None:
                self.plane.send_control(answer, message.address, message.port, message.switch_port)
        except Exception:  # of one request; the others go on
            _logger.exception("a message of %s:%d", message.address, message.port)

    def _answer(self, message: ControlMessage) -> bytes | None:
        """Return the answer to a message, if any; only a refusal may be longer than its request."""
        if message.coalesced:
            return control.encode(ControlKind.COALESCED, 0)
        if not message.data:
            return control.encode(ControlKind.UNKNOWN_SESSION, 0)
        request = control.parse(message.data)
        if request is None:
            return None
        if request.kind == ControlKind.JOIN:
            return self._answer_join(request, message)
        if request.kind == ControlKind.ASK_MISSING:
            return self._answer_missing(request.session_id)
        if request.kind == ControlKind.LEAVE:
            self._leave(request)
        return None

    def _answer_missing(self, session_id: int) -> bytes | None:
        session = self._sessions.get(session_id)
        if session is None:
            return None
        ranks: list[int] | None = [session.ranks[rank] for rank in self.plane.missing(session_id)]
        if not ranks and self._uplink:
            ranks = self._uplink.missing(session_id, session.shape)
        if ranks is None:
            return None
        return control.encode(ControlKind.MISSING, session_id, control.encode_ranks(ranks))

    def _answer_join(self, request: ControlRequest, message: ControlMessage) -> bytes | None:
        join = control.decode_join(request.body)
        if join is None:
            return None
        try:
            if message.port == 0:  # which add_worker() takes for all ports
                raise ArgumentError("a worker's packets cannot come from port 0")
            self.join(request.session_id, join, message.address, (message.port, 1))
        except TorchRelayError as error:
            kind = ControlKind.BUSY if isinstance(error, UnavailableError) else ControlKind.REFUSED
            return control.encode(kind, request.session_id, str(error).encode()[:400])
        return control.encode(ControlKind.JOINED, request.session_id)

    def _leave(self, request: ControlRequest) -> None:
        with self._lock:
            session = self._sessions.get(request.session_id)
            if session is None:
                return
            session.left.update(control.decode_ranks(request.body)[:1])
            if len(session.left) == len(session.ranks):
                self._close(request.session_id)

"""The contract between a switch's control plane and its data plane.

A data plane holds sessions, each with slots of its own. Only a session's members may write to its
slots; a member is known by the source address and port of its packets. All methods may be called
from any thread.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torchrelay import _native
from torchrelay._telemetry import MetricSample

__all__ = [
    "ControlMessage",
    "DataPlane",
    "SessionShape",
    "SessionStats",
    "SessionWorkerStats",
    "SwitchStats",
]


@dataclass(frozen=True)
class SessionShape:
    """The shape of a session: what its slots are for.

    Args:
        packet_numel: 64 or 256.
        sequenced: the ids of the workers' packets only grow, which shows which ones are late.
    """

    num_workers: int
    num_slots: int
    packet_numel: int
    sequenced: bool = False


@dataclass(frozen=True)
class SessionWorkerStats:
    """Statistics of one worker of a session."""

    received: int  # data packets
    retransmissions: int
    silent_s: float  # since its last packet or sign of life


@dataclass(frozen=True)
class SessionStats:
    """Statistics of one session: its data packets, in total and by rank.

    ``counts`` has the first ``_native.SWITCH_NUM_SESSION_STATS`` names of
    ``_native.switch_stats()``, which gives their meanings.
    """

    session_id: int
    shape: SessionShape
    counts: Mapping[str, int]
    workers: tuple[SessionWorkerStats, ...]

    @property
    def idle_s(self) -> float:
        """Seconds since a worker's last packet or sign of life."""
        return min(worker.silent_s for worker in self.workers)


@dataclass(frozen=True)
class SwitchStats:
    """Statistics of a switch since its start, including ended sessions.

    ``counts`` has the names of ``_native.switch_stats()``.
    """

    data_plane: str
    address: str
    port: int
    counts: Mapping[str, int]
    sessions: tuple[SessionStats, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values; without session ids, which are secrets that admit to sessions."""
        values = dataclasses.asdict(self)
        values |= values.pop("counts")
        for index, (stats, session) in enumerate(
            zip(self.sessions, values["sessions"], strict=True)
        ):
            session |= {"index": index, "idle_s": stats.idle_s, **session.pop("counts")}
            session["workers"] = dict(enumerate(session["workers"]))
            del session["session_id"]
        return values

    def samples(self) -> Iterator[MetricSample]:
        """Yield the statistics for Prometheus."""
        labels = {"data_plane": self.data_plane}
        for name, meaning in _native.switch_stats().items():
            yield MetricSample(f"switch_{name}", meaning, "counter", self.counts[name], labels)
        sessions = "Sessions that are open"
        yield MetricSample("switch_sessions", sessions, "gauge", len(self.sessions), labels)
        again = "Packets that a worker of an open session sent again"
        for index, session in enumerate(self.sessions):
            for rank, worker in enumerate(session.workers):
                place = {"session": str(index), "worker": str(rank)}
                count = worker.retransmissions
                yield MetricSample("switch_worker_retransmissions", again, "gauge", count, place)


@dataclass(frozen=True)
class ControlMessage:
    """A datagram for the control plane; empty where a data packet's sender is in no session.

    Args:
        switch_port: to which it was sent.
        coalesced: it is a member's data packet, which arrived as part of a larger one.
    """

    data: bytes
    address: str
    port: int
    switch_port: int
    coalesced: bool = False


class DataPlane(Protocol):
    """Aggregates the packets of several sessions."""

    name: str
    address: str
    port: int
    max_slots: int  # of all sessions together
    has_uplinks: bool  # whether it can be the data plane of a leaf switch

    def open_session(
        self, session_id: int, shape: SessionShape, uplink: socket.socket | None = None
    ) -> None:
        """Create a session with empty slots and no members, replacing one of the same id.

        Args:
            uplink: of a leaf's session: connected to the switch above, which knows it; owned from
                now on. The session ends when that switch stops or does not know it any more.

        Raises:
            ArgumentError: the shape is impossible for this data plane.
            UnavailableError: there is no memory for it.
        """

    def add_worker(
        self, session_id: int, rank: int, address: str, first_port: int, num_ports: int
    ) -> None:
        """Admit packets from ``num_ports`` ports of ``address`` as ``rank``'s; 0 means all its
        ports.

        Raises:
            ArgumentError: no such session or rank, or the ports are another worker's.
            UnavailableError: it is not known yet how to reach the address; try again.
        """

    def close_session(self, session_id: int) -> None:
        """Forget a session; nothing happens if there is none."""

    def missing(self, session_id: int) -> list[int]:
        """Return the workers that the packets in progress wait for."""

    def receive_control(self, timeout_s: float) -> ControlMessage | None:
        """Return the next message for the control plane to answer: at most 256 from one address per
        second, and as many data packets whose senders are in no session.
        """

    def send_control(self, message: bytes, address: str, port: int, switch_port: int) -> None:
        """Send a control message from a port of the switch. It may be lost; one that cannot be sent
        is counted.

        Raises:
            UnavailableError: the data plane is closed.
        """

    def stats(self) -> SwitchStats: ...
    def close(self) -> None:
        """End the threads and unload what was loaded. Idempotent."""

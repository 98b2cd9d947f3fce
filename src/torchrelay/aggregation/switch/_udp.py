"""The switch data plane in user space, on one UDP socket."""

from __future__ import annotations

import ipaddress
import socket

from torchrelay import _native
from torchrelay._platform import need_core
from torchrelay._resource import Resource
from torchrelay.aggregation.switch._data_plane import (
    ControlMessage,
    SessionShape,
    SessionStats,
    SessionWorkerStats,
    SwitchStats,
)

__all__ = ["UdpDataPlane"]


class UdpDataPlane(Resource):
    """A :class:`DataPlane` on a UDP socket, with a native thread.

    Args:
        address: the IPv4 address to bind; 0.0.0.0 is all of this host's.
        port: 0 is any free one; 48864 (0xBEE0) takes the 16 ports from there, as SwitchML does.
        drop_ingress: probability with which an arriving packet is lost, for tests.
        drop_egress: probability with which a packet that leaves is lost, for tests.
        drop_seed: of those losses.

    Raises:
        UnavailableError: the address or port cannot be bound.
    """

    name = "udp"
    max_slots = 64 * 1024
    has_uplinks = True

    def __init__(
        self,
        address: str = "127.0.0.1",
        port: int = _native.SWITCH_UDP_PORT,
        *,
        drop_ingress: float = 0.0,
        drop_egress: float = 0.0,
        drop_seed: int = 0,
    ) -> None:
        need_core("a switch")
        self.address = address
        self._native = _native.UdpSwitch(address, port, drop_ingress, drop_egress, drop_seed)
        self.port: int = self._native.port

    def open_session(
        self, session_id: int, shape: SessionShape, uplink: socket.socket | None = None
    ) -> None:
        native = _native.SwitchTableShape(
            shape.num_workers, shape.num_slots, shape.packet_numel, shape.sequenced
        )
        self._native.open_session(session_id, native, uplink.detach() if uplink else -1)

    def add_worker(
        self, session_id: int, rank: int, address: str, first_port: int, num_ports: int
    ) -> None:
        ip = int(ipaddress.IPv4Address(address))
        self._native.add_worker(session_id, rank, ip, first_port, num_ports)

    def close_session(self, session_id: int) -> None:
        self._native.close_session(session_id)

    def missing(self, session_id: int) -> list[int]:
        return self._native.missing(session_id)

    def receive_control(self, timeout_s: float) -> ControlMessage | None:
        got = self._native.receive_control(timeout_s)
        if got is None:
            return None
        data, ip, port, switch_port = got
        return ControlMessage(data, str(ipaddress.IPv4Address(ip)), port, switch_port)

    def send_control(self, message: bytes, address: str, port: int, switch_port: int) -> None:
        self._native.send_control(message, int(ipaddress.IPv4Address(address)), port, switch_port)

    def stats(self) -> SwitchStats:
        sessions = tuple(map(_session_stats, self._native.sessions()))
        return SwitchStats(self.name, self.address, self.port, self._native.stats(), sessions)

    def close(self) -> None:
        self._native.stop()


def _session_stats(info: _native.SwitchSessionInfo) -> SessionStats:
    shape = info.shape
    return SessionStats(
        info.id,
        SessionShape(shape.num_workers, shape.num_slots, shape.numel, shape.sequenced),
        info.counts,
        tuple(
            SessionWorkerStats(worker.received, worker.retransmissions, worker.silent_s)
            for worker in info.workers
        ),
    )

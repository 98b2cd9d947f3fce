"""The switch data plane in the kernel: ``native/bpf/switch.bpf.c`` at the ports of this host.

The program sums packets where the driver has received them. This module loads it, fills its maps,
and reads the statistics; control messages come through an ordinary UDP socket, to which the program
lets them pass.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from torchrelay import _native
from torchrelay._addresses import DISCARD_PORT, mac_of_device
from torchrelay._platform import need_core
from torchrelay._resource import Resource
from torchrelay.aggregation.switch._data_plane import (
    ControlMessage,
    SessionShape,
    SessionStats,
    SessionWorkerStats,
    SwitchStats,
)
from torchrelay.aggregation.switch._libbpf import BpfObject
from torchrelay.errors import ArgumentError, ConfigError, UnavailableError

__all__ = ["XdpDataPlane"]

_OBJECT = Path(_native.__file__).parent / "switch.bpf.o"
_SO_RCVBUFFORCE, _BUFFER_BYTES = 33, 4 << 20
_MAX_PORTS, _MAX_WORKERS = _native.SWITCH_XDP_MAX_PORTS, _native.SWITCH_XDP_MAX_WORKERS
_SIOCGARP, _ATF_COM = 0x8954, 2
_SESSION_COUNTS = tuple(_native.switch_stats())[: _native.SWITCH_NUM_SESSION_STATS]

_u8, _u16, _u32, _u64 = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64


# --- the maps of the program


class SourceKey(ctypes.Structure):
    _fields_ = (("ip", _u8 * 4), ("port", _u8 * 2), ("zero", _u16))

    @classmethod
    def of(cls, address: str, port: int) -> SourceKey:
        """Return the key of an address and one of its ports; 0 is all."""
        return cls.from_buffer_copy(socket.inet_aton(address) + port.to_bytes(2, "big") + bytes(2))


class MemberEntry(ctypes.Structure):
    _fields_ = (("session", _u32), ("rank", _u32))


class SessionEntry(ctypes.Structure):
    _fields_ = (
        ("heard_ns", _u64 * _MAX_WORKERS),
        ("stats", _u64 * len(_SESSION_COUNTS)),
        ("worker_received", _u64 * _MAX_WORKERS),
        ("worker_again", _u64 * _MAX_WORKERS),
        *((name, _u32) for name in ("num_workers", "num_slots", "first_slot", "numel")),
        ("sequenced", _u32),
        ("switch_ips", _u32 * _MAX_WORKERS),
        ("switch_ports", _u16 * _MAX_WORKERS),
        ("pad", _u32),
    )


class WorkerKey(ctypes.Structure):
    _fields_ = (("session", _u32), ("ifindex", _u32))


class WorkerEntry(ctypes.Structure):
    _fields_ = (
        ("mac", _u8 * 6),
        ("port_mac", _u8 * 6),
        ("ip", _u8 * 4),
        ("rank", _u32),
        ("pad", _u32),
    )


class SlotEntry(ctypes.Structure):
    _fields_ = (
        ("lock", _u32),
        *((name, _u32 * 2) for name in ("count", "tsi", "used")),
        ("exponents", ctypes.c_int32 * 2 * 2),
        ("pad", _u32),
        ("bitmap", _u64 * 2),
        ("ports", _u16 * _MAX_WORKERS * 2),
        ("values", ctypes.c_int32 * _native.SWITCH_MAX_NUMEL * 2),
    )


# --- the data plane


@dataclass
class _OpenSession:
    """The state of a session in the control plane."""

    index: int
    shape: SessionShape
    first_slot: int
    joined_s: list[float]  # when, by rank; for those that have not joined: since it was opened
    ports: dict[int, int] = field(default_factory=dict)  # ifindex: rank
    sources: dict[tuple[str, int], int] = field(default_factory=dict)  # ranks by address and port

    @property
    def slots(self) -> range:
        return range(self.first_slot, self.first_slot + self.shape.num_slots)

    def stats(self, session_id: int, entry: SessionEntry) -> SessionStats:
        now_s = time.monotonic()  # like the kernel's heard_ns, CLOCK_MONOTONIC
        arrays = entry.worker_received, entry.worker_again, entry.heard_ns
        workers = tuple(
            SessionWorkerStats(received, again, now_s - max(heard_ns / 1e9, joined_s))
            for joined_s, received, again, heard_ns in zip(self.joined_s, *arrays, strict=False)
        )
        return SessionStats(session_id, self.shape, _counts(entry), workers)


class XdpDataPlane(Resource):
    """A :class:`DataPlane` in the kernel of this host, with one worker of a session behind each
    port.

    Args:
        interfaces: the ports. Workers address the switch by an IPv4 address of its own on their
            network.
        port: UDP; 0 is any free one; 48864 (0xBEE0) takes the 16 ports from there, as SwitchML
            does. The program takes the packets that arrive for them.
        mode: "generic" works with any driver; "native" runs in the driver, and is faster, for
            drivers that support it and send what the programs of other ports redirect.
        max_slots: of all sessions together; one takes 2.4 KiB of the kernel's memory.
        max_sessions: that may be open at a time.

    Raises:
        ConfigError: an interface does not exist.
        UnavailableError: this build has no program (clang was missing), or libbpf, the privilege,
            or a feature of the kernel is missing.
    """

    name = "xdp"
    has_uplinks = False

    def __init__(
        self,
        interfaces: Sequence[str],
        port: int = _native.SWITCH_UDP_PORT,
        *,
        mode: str = "generic",
        max_slots: int = 32768,
        max_sessions: int = 64,
    ) -> None:
        need_core("a switch")
        if not _OBJECT.exists():
            raise UnavailableError(
                f"XDP: {_OBJECT} is missing: torchrelay was built where clang or libbpf's headers "
                "were not; install them (Debian: clang, libbpf-dev) and build again, or use "
                "--data-plane udp"
            )
        self._interfaces = _indices_of(interfaces)
        self.address, self.max_slots = "0.0.0.0", max_slots
        self._lock = threading.RLock()
        self._sessions: dict[int, _OpenSession] = {}
        self._free_indices = list(range(max_sessions))
        self._send_lost = 0
        self._ended: Counter[str] = Counter()
        with contextlib.ExitStack() as stack:
            num_ports = _native.SWITCH_NUM_UDP_PORTS if port == _native.SWITCH_UDP_PORT else 1
            bound = [stack.enter_context(_bind(port + place)) for place in range(num_ports)]
            self._sockets = {sock.getsockname()[1]: sock for sock in bound}
            self._readable = stack.enter_context(selectors.PollSelector())
            for sock in bound:
                self._readable.register(sock, selectors.EVENT_READ)
            self.port: int = min(self._sockets)
            constants = struct.pack("=HH", self.port, ~(num_ports - 1) & 0xFFFF)
            sizes = {"slots": max_slots, "sessions": max_sessions}
            bpf = stack.enter_context(BpfObject(_OBJECT, sizes, constants))
            self._slots = bpf.map("slots", _u32, SlotEntry)
            self._entries = bpf.map("sessions", _u32, SessionEntry)
            self._members = bpf.map("members", SourceKey, MemberEntry)
            self._workers = bpf.map("workers", WorkerKey, WorkerEntry)
            self._counts = bpf.map("stats", _u32, _u64, per_cpu=True)
            bpf.attach(self._interfaces, mode)
            self._resources = stack.pop_all()

    def open_session(
        self, session_id: int, shape: SessionShape, uplink: socket.socket | None = None
    ) -> None:
        if (
            not 1 <= shape.num_workers <= _MAX_WORKERS
            or shape.packet_numel not in (64, 256)
            or shape.num_slots < 1
        ):
            raise ArgumentError(
                f"XDP: a session has 1 to {_MAX_WORKERS} workers and 64 or 256 values, not {shape}"
            )
        with self._lock:
            self.close_session(session_id)
            first_slot = self._free_slots(shape.num_slots)
            if not self._free_indices:
                raise UnavailableError("XDP: all sessions are in use; try again later")
            joined_s = [time.monotonic()] * shape.num_workers
            opened = _OpenSession(self._free_indices.pop(), shape, first_slot, joined_s)
            empty = SlotEntry()
            for slot in opened.slots:
                self._slots[_u32(slot)] = empty
            self._entries[_u32(opened.index)] = SessionEntry(
                num_workers=shape.num_workers,
                num_slots=shape.num_slots,
                first_slot=first_slot,
                numel=shape.packet_numel,
                sequenced=shape.sequenced,
            )
            self._sessions[session_id] = opened

    def _free_slots(self, size: int) -> int:
        """Return the start of the first gap of ``size`` slots."""
        begin = 0
        for taken in sorted(
            (session.slots for session in self._sessions.values()), key=lambda slots: slots.start
        ):
            if taken.start - begin >= size:
                break
            begin = taken.stop
        if begin + size > self.max_slots:
            raise UnavailableError(f"XDP: no {size} slots are free, of {self.max_slots} in all")
        return begin

    def add_worker(
        self, session_id: int, rank: int, address: str, first_port: int, num_ports: int
    ) -> None:
        with self._lock:
            opened = self._session(session_id)
            if not 0 <= rank < opened.shape.num_workers:
                raise ArgumentError(
                    f"switch: rank {rank} is not below the session's {opened.shape.num_workers} "
                    "workers"
                )
            ports = range(first_port, first_port + num_ports) if num_ports else (0,)
            sources = {(address, port): rank for port in ports}
            for session in self._sessions.values():
                for source, other in session.sources.items():
                    is_other = session is not opened or other != rank
                    if is_other and source in sources:
                        raise ArgumentError("switch: another worker has this address and port")
                    if not is_other and source[0] != address:
                        raise ArgumentError(f"switch: rank {rank} has another address")
            self._place_worker(opened, rank, address)
            opened.joined_s[rank] = time.monotonic()
            opened.sources.update(sources)
            for source in sources:
                self._members[SourceKey.of(*source)] = MemberEntry(opened.index, rank)

    def _place_worker(self, opened: _OpenSession, rank: int, address: str) -> None:
        """Send results for ``rank`` through the port of its address."""
        ifindex, mac, port_mac = _link_to(address, self._interfaces, self._sockets[self.port])
        if opened.ports.setdefault(ifindex, rank) != rank:
            raise ArgumentError(
                f"XDP: {self._interfaces[ifindex]} already leads to worker {opened.ports[ifindex]} "
                "of this session, and a port serves one; use --data-plane udp"
            )
        addresses = mac + port_mac + socket.inet_aton(address)
        worker = WorkerEntry.from_buffer_copy(addresses.ljust(ctypes.sizeof(WorkerEntry), b"\0"))
        worker.rank = rank
        self._workers[WorkerKey(opened.index, ifindex)] = worker

    def close_session(self, session_id: int) -> None:
        with self._lock:
            opened = self._sessions.pop(session_id, None)
            if opened is None:
                return
            for source in opened.sources:
                self._members.discard(SourceKey.of(*source))
            for ifindex in opened.ports:
                self._workers.discard(WorkerKey(opened.index, ifindex))
            self._ended.update(_counts(self._entries[_u32(opened.index)]))
            self._free_indices.append(opened.index)

    def _session(self, session_id: int) -> _OpenSession:
        if session_id not in self._sessions:
            raise ArgumentError(f"switch: no session has the id {session_id}")
        return self._sessions[session_id]

    def missing(self, session_id: int) -> list[int]:
        with self._lock:
            opened = self._session(session_id)
            present = (1 << opened.shape.num_workers) - 1
            for slot in (self._slots[_u32(at)] for at in opened.slots):
                for set_ in (0, 1):
                    if slot.count[set_]:
                        present &= slot.bitmap[set_]
            return [rank for rank in range(opened.shape.num_workers) if not present >> rank & 1]

    def receive_control(self, timeout_s: float) -> ControlMessage | None:
        ready = self._readable.select(timeout_s)
        if not ready:
            return None
        sock = cast(socket.socket, ready[0][0].fileobj)
        data, (address, port) = sock.recvfrom(1 << 16)
        switch_port: int = sock.getsockname()[1]
        if data and data[0] >> 4 == _native.SWITCH_CONTROL_TYPE:
            return ControlMessage(data, address, port, switch_port)
        with self._lock:
            members = set().union(*(session.sources for session in self._sessions.values()))
        is_member = not members.isdisjoint({(address, port), (address, 0)})
        return ControlMessage(b"", address, port, switch_port, coalesced=is_member)

    def send_control(self, message: bytes, address: str, port: int, switch_port: int) -> None:
        try:
            self._sockets[switch_port].sendto(message, (address, port))
        except OSError:  # port 0, or no route
            self._send_lost += 1

    def stats(self) -> SwitchStats:
        with self._lock:
            sessions = tuple(
                opened.stats(session_id, self._entries[_u32(opened.index)])
                for session_id, opened in sorted(self._sessions.items())
            )
            counts = {
                name: sum(self._counts[_u32(place)])
                for place, name in enumerate(_native.switch_stats())
            }
            counts["send_lost"] += self._send_lost
            total = sum((Counter(one.counts) for one in sessions), self._ended)
            return SwitchStats(self.name, self.address, self.port, {**counts, **total}, sessions)

    def close(self) -> None:
        self._resources.close()


def _bind(port: int) -> socket.socket:
    """Return a socket of the control plane."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        with contextlib.suppress(PermissionError):  # which loading the program reports
            sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        sock.bind(("", port))
    except OSError as error:
        sock.close()
        raise UnavailableError(f"XDP: UDP port {port} cannot be bound: {error}") from error
    return sock


def _counts(entry: SessionEntry) -> dict[str, int]:
    return dict(zip(_SESSION_COUNTS, entry.stats, strict=True))


def _indices_of(interfaces: Sequence[str]) -> dict[int, str]:
    """Return the names of network interfaces by index.

    Raises:
        ConfigError: there is no such interface, or they are too many.
    """
    if not 1 <= len(interfaces) <= _MAX_PORTS:
        raise ConfigError(f"XDP: {len(interfaces)} interfaces; it takes 1 to {_MAX_PORTS}")
    found = {}
    for name in interfaces:
        try:
            found[socket.if_nametoindex(name)] = name
        except OSError:
            raise ConfigError(f"XDP: there is no network interface {name!r}") from None
    return found


def _link_to(
    address: str, interfaces: Mapping[int, str], sock: socket.socket
) -> tuple[int, bytes, bytes]:
    """Return which of the ports, whose names are given by index, leads to a host; its MAC address,
    and the port's.

    Args:
        sock: any UDP socket in the network namespace of the ports.

    Raises:
        UnavailableError: it is not known yet where the host is; try again.
    """
    for ifindex, interface in interfaces.items():
        mac = _arp_entry(address, interface, sock)
        if mac is not None:
            return ifindex, mac, mac_of_device(interface, sock)
    with contextlib.suppress(OSError):  # makes the kernel resolve the address
        sock.sendto(b"", (address, DISCARD_PORT))
    raise UnavailableError(
        f"XDP: {address} has not answered ARP yet at any of this switch's ports "
        f"({', '.join(interfaces.values())}); is it on the network of one?"
    )


def _arp_entry(address: str, interface: str, sock: socket.socket) -> bytes | None:
    family = struct.pack("=H2x4s8x", socket.AF_INET, socket.inet_aton(address))
    request = struct.pack("=16s16xi16x16s", family, 0, interface.encode())
    try:
        entry = fcntl.ioctl(sock, _SIOCGARP, request)
    except OSError:
        return None
    flags: int = struct.unpack_from("=i", entry, 32)[0]
    return entry[18:24] if flags & _ATF_COM else None

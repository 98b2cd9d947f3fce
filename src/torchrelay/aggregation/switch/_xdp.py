"""The switch data plane in the kernel: ``native/bpf/switch.bpf.c`` at the ports of this host.

The program sums packets where the driver has received them. This module loads it, fills its maps,
and reads the statistics; control messages come through an ordinary UDP socket, to which the program
lets them pass.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchrelay import _native
from torchrelay._addresses import DISCARD_PORT, mac_of_device
from torchrelay._resource import Resource
from torchrelay.aggregation.switch._data_plane import (
    ControlMessage,
    SessionShape,
    SessionStats,
    SessionWorkerStats,
    SwitchStats,
)
from torchrelay.aggregation.switch._libbpf import XDP_DRIVER, XDP_GENERIC, BpfObject
from torchrelay.errors import ArgumentError, ConfigError, UnavailableError

__all__ = ["XdpDataPlane"]

_OBJECT = Path(_native.__file__).parent / "switch.bpf.o"
_MAX_WORKERS, _MAX_PORTS, _MAX_NUMEL = 64, 64, 256
_CONTROL_TYPE = 2
_PROBES, _PROBE_S, _MIN_FRAME_BYTES = 4, 0.1, 60
_logger = logging.getLogger("torchrelay.aggregation.switch")
_SO_RCVBUFFORCE, _BUFFER_BYTES = 33, 4 << 20
_SIOCGARP, _ATF_COM = 0x8954, 2

# The program counts these, and then what it alone has.
_STATS = (*_native.switch_stats(), "coalesced", "probes")
_SESSION_STATS = _STATS[: _native.SWITCH_NUM_SESSION_STATS]


class _SourceKey(ctypes.Structure):
    _fields_ = (("ip", ctypes.c_uint8 * 4), ("port", ctypes.c_uint8 * 2), ("zero", ctypes.c_uint16))


class _MemberEntry(ctypes.Structure):
    _fields_ = (("session", ctypes.c_uint32), ("rank", ctypes.c_uint32))


class _SessionEntry(ctypes.Structure):
    _fields_ = (
        ("heard_ns", ctypes.c_uint64 * _MAX_WORKERS),
        ("stats", ctypes.c_uint64 * len(_SESSION_STATS)),
        ("worker_received", ctypes.c_uint64 * _MAX_WORKERS),
        ("worker_again", ctypes.c_uint64 * _MAX_WORKERS),
        ("num_workers", ctypes.c_uint32),
        ("num_slots", ctypes.c_uint32),
        ("first_slot", ctypes.c_uint32),
        ("numel", ctypes.c_uint32),
        ("sequenced", ctypes.c_uint32),
        ("switch_ips", ctypes.c_uint32 * _MAX_WORKERS),
        ("switch_ports", ctypes.c_uint16 * _MAX_WORKERS),
        ("pad", ctypes.c_uint32),
    )


class _WorkerKey(ctypes.Structure):
    _fields_ = (("session", ctypes.c_uint32), ("ifindex", ctypes.c_uint32))


class _WorkerEntry(ctypes.Structure):
    _fields_ = (
        ("mac", ctypes.c_uint8 * 6),
        ("port_mac", ctypes.c_uint8 * 6),
        ("ip", ctypes.c_uint8 * 4),
        ("rank", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    )


class _SlotEntry(ctypes.Structure):
    _fields_ = (
        ("lock", ctypes.c_uint32),
        ("count", ctypes.c_uint32 * 2),
        ("tsi", ctypes.c_uint32 * 2),
        ("used", ctypes.c_uint32 * 2),
        ("exponents", ctypes.c_int32 * 2 * 2),
        ("pad", ctypes.c_uint32),
        ("bitmap", ctypes.c_uint64 * 2),
        ("ports", ctypes.c_uint16 * _MAX_WORKERS * 2),
        ("values", ctypes.c_int32 * _MAX_NUMEL * 2),
    )


class _PortEntry(ctypes.Structure):  # struct bpf_devmap_val
    _fields_ = (("ifindex", ctypes.c_uint32), ("program", ctypes.c_uint32))


# Sizes of key and value of each map that this module reads or writes.
_LAYOUTS = {
    "slots": (ctypes.sizeof(ctypes.c_uint32), ctypes.sizeof(_SlotEntry)),
    "sessions": (ctypes.sizeof(ctypes.c_uint32), ctypes.sizeof(_SessionEntry)),
    "members": (ctypes.sizeof(_SourceKey), ctypes.sizeof(_MemberEntry)),
    "workers": (ctypes.sizeof(_WorkerKey), ctypes.sizeof(_WorkerEntry)),
    "ports": (ctypes.sizeof(ctypes.c_uint32), ctypes.sizeof(_PortEntry)),
    "stats": (ctypes.sizeof(ctypes.c_uint32), ctypes.sizeof(ctypes.c_uint64)),
}


@dataclass
class _OpenSession:
    """The state of a session in the control plane."""

    index: int
    shape: SessionShape
    first_slot: int
    opened: float = field(default_factory=time.monotonic)
    addresses: dict[int, str] = field(default_factory=dict)  # by rank
    ports: dict[int, int] = field(default_factory=dict)  # ifindex: rank
    sources: set[tuple[str, int]] = field(default_factory=set)
    joined: dict[int, float] = field(default_factory=dict)  # when, by rank


class XdpDataPlane(Resource):
    """A :class:`DataPlane` in the kernel of this host, with one worker of a session behind each
    port.

    Args:
        interfaces: the ports. Workers address the switch by an IPv4 address of its own on their
            network.
        port: UDP; 0 is any free one; 48864 (0xBEE0) takes the 16 ports from there, as SwitchML
            does. The program takes the packets that arrive for them.
        mode: "native" runs in the driver; "generic" later, with any driver, and slower; "auto"
            uses native if all ports support it, and switches to generic if the first worker behind
            a port does not receive what the program sends there. :attr:`mode` is the one in use.
        max_slots: of all sessions together; one takes 2.4 KiB of the kernel's memory.
        max_sessions: that may be open at a time.

    Raises:
        ConfigError: an interface does not exist.
        UnavailableError: this build has no program (clang was missing), or libbpf, the privilege,
            or a feature of the kernel is missing.
    """

    name = "xdp"

    def __init__(
        self,
        interfaces: Sequence[str],
        port: int = _native.SWITCH_UDP_PORT,
        *,
        mode: str = "auto",
        max_slots: int = 32768,
        max_sessions: int = 64,
    ) -> None:
        if not _OBJECT.exists():
            raise UnavailableError(
                f"XDP: {_OBJECT} is missing: torchrelay was built where clang or libbpf's headers "
                "were not; install them (Debian: clang, libbpf-dev) and build again, or use "
                "--data-plane udp"
            )
        if not 1 <= len(interfaces) <= _MAX_PORTS:
            raise ConfigError(f"XDP: {len(interfaces)} interfaces; it takes 1 to {_MAX_PORTS}")
        self.interfaces = {_ifindex(name): name for name in interfaces}
        self.address = "0.0.0.0"
        self._lock = threading.Lock()
        self._sessions: dict[int, _OpenSession] = {}
        self._members: dict[tuple[str, int], tuple[int, int]] = {}  # session id and rank, by source
        self._free_indices = list(range(max_sessions))
        self.max_slots = max_slots
        self._send_lost = 0
        self._ended: Counter[str] = Counter()
        self._sockets: dict[int, socket.socket] = {}  # by port
        try:
            for place in range(
                _native.SWITCH_NUM_UDP_PORTS if port == _native.SWITCH_UDP_PORT else 1
            ):
                self._bind(port + place)
            self.port = min(self._sockets)
            sizes = {"slots": max_slots, "sessions": max_sessions}
            mask = ~(len(self._sockets) - 1) & 0xFFFF
            constants = struct.pack("=HH", self.port, mask)
            self._bpf = BpfObject(_OBJECT, sizes, constants, _LAYOUTS)
        except BaseException:
            self._close_sockets()
            raise
        self._socket = self._sockets[self.port]
        self._is_closed = False
        self._may_change_mode = mode == "auto"
        self._proven: set[int] = set()  # ports through which the program's frames arrive
        try:
            self.mode = self._attach(mode)
        except BaseException:
            self.close()
            raise

    def _bind(self, port: int) -> None:
        """Open a socket of the control plane."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            with contextlib.suppress(PermissionError):  # which loading the program reports
                sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
            sock.bind(("", port))
        except OSError as error:
            sock.close()
            raise UnavailableError(f"XDP: UDP port {port} cannot be bound: {error}") from error
        self._sockets[sock.getsockname()[1]] = sock

    def _close_sockets(self) -> None:
        for sock in self._sockets.values():
            sock.close()

    def _attach(self, mode: str) -> str:
        """Attach the program to all ports; return the mode that all of them have."""
        port_program = self._bpf.program("torchrelay_port")
        for place, ifindex in enumerate(self.interfaces):
            self._bpf.update(
                self._bpf.map("ports"), ctypes.c_uint32(place), _PortEntry(ifindex, port_program)
            )
        modes = {
            "native": [XDP_DRIVER],
            "generic": [XDP_GENERIC],
            "auto": [XDP_DRIVER, XDP_GENERIC],
        }
        if mode not in modes:
            raise ConfigError(f"XDP: mode {mode!r}; there are {', '.join(modes)}")
        program = self._bpf.program("torchrelay_switch")
        for flags in modes[mode]:
            error, name = self._attach_all(program, flags)
            if not error:
                return "native" if flags == XDP_DRIVER else "generic"
            if error == errno.EBUSY:
                break
        advice = (
            "another XDP program is there" if error == errno.EBUSY else f"mode {mode} cannot be had"
        )
        raise UnavailableError(f"XDP: interface {name}: {os.strerror(error)}; {advice}")

    def _attach_all(self, program: int, flags: int) -> tuple[int, str]:
        for ifindex, name in self.interfaces.items():
            error = self._bpf.attach(program, ifindex, flags)
            if error:
                self._bpf.detach()
                return error, name
        return 0, ""

    def open_session(self, session_id: int, shape: SessionShape) -> None:
        if (
            not 1 <= shape.num_workers <= _MAX_WORKERS
            or shape.packet_numel not in (64, 256)
            or shape.num_slots < 1
        ):
            raise ArgumentError(
                f"XDP: a session has 1 to {_MAX_WORKERS} workers and 64 or 256 values, not {shape}"
            )
        with self._lock:
            self._close_session(session_id)
            first_slot = self._free_slots(shape.num_slots)
            if not self._free_indices:
                raise UnavailableError("XDP: all sessions are in use; try again later")
            opened = _OpenSession(self._free_indices.pop(), shape, first_slot)
            slots, empty = self._bpf.map("slots"), _SlotEntry()
            for at in range(first_slot, first_slot + shape.num_slots):
                self._bpf.update(slots, ctypes.c_uint32(at), empty)
            session = _SessionEntry(
                num_workers=shape.num_workers,
                num_slots=shape.num_slots,
                first_slot=first_slot,
                numel=shape.packet_numel,
                sequenced=shape.sequenced,
            )
            self._bpf.update(self._bpf.map("sessions"), ctypes.c_uint32(opened.index), session)
            self._sessions[session_id] = opened

    def _free_slots(self, size: int) -> int:
        """Return the start of the first gap of ``size`` slots."""
        begin = 0
        for taken in sorted(self._sessions.values(), key=lambda session: session.first_slot):
            if taken.first_slot - begin >= size:
                break
            begin = taken.first_slot + taken.shape.num_slots
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
            if opened.addresses.get(rank, address) != address:
                raise ArgumentError(f"switch: rank {rank} of the session has another address")
            ports = range(first_port, first_port + num_ports) if num_ports else (0,)
            for port in ports:
                if self._members.get((address, port), (session_id, rank)) != (session_id, rank):
                    raise ArgumentError("switch: another worker has this address and port")
            if rank not in opened.addresses:
                self._place_worker(opened, rank, address)
            opened.addresses[rank] = address
            opened.joined[rank] = time.monotonic()
            for port in ports:
                source = _source(address, port)
                self._bpf.update(self._bpf.map("members"), source, _MemberEntry(opened.index, rank))
                self._members[address, port] = (session_id, rank)
                opened.sources.add((address, port))

    def _place_worker(self, opened: _OpenSession, rank: int, address: str) -> None:
        """Send results for ``rank`` through the port of its address."""
        mac, ifindex = self._neighbor(address)
        interface = self.interfaces[ifindex]
        port_mac = mac_of_device(interface, self._socket)
        if self.mode == "native" and ifindex not in self._proven:
            self._prove_port(ifindex, port_mac, address)
        if opened.ports.setdefault(ifindex, rank) != rank:
            raise ArgumentError(
                f"XDP: {interface} already leads to worker {opened.ports[ifindex]} of this "
                "session, and a port serves one; use --data-plane udp"
            )
        ip = socket.inet_aton(address)
        worker = _WorkerEntry(_array(mac), _array(port_mac), _array(ip), rank)
        self._bpf.update(self._bpf.map("workers"), _WorkerKey(opened.index, ifindex), worker)

    def _prove_port(self, ifindex: int, port_mac: bytes, address: str) -> None:
        """Leave native mode if frames that the program sends through a port do not arrive.

        A driver may take them and drop them all, as veth does unless the other end has GRO or a
        program too.
        """
        arrives = self._probe(list(self.interfaces).index(ifindex), port_mac, address)
        if arrives or (arrives is None and not self._may_change_mode):
            self._proven.add(ifindex)
            return
        trouble = (
            f"XDP: what the program sends in native mode through {self.interfaces[ifindex]} "
            + (
                "cannot be probed on this kernel"
                if arrives is None
                else f"does not reach {address}"
            )
        )
        if not self._may_change_mode:
            raise ArgumentError(f"{trouble}; start the switch with --mode generic")
        _logger.warning("%s; the switch continues in generic mode", trouble)
        self._bpf.detach()
        self.mode = self._attach("generic")

    def _probe(self, port: int, port_mac: bytes, address: str) -> bool | None:
        """Whether a host answers an ARP request that the program sends; None: the kernel cannot.

        As by RFC 5227, the sender's IP address is 0, which distinguishes the answer from others.
        """
        arp = struct.pack(">HHBBH", 1, 0x0800, 6, 4, 1) + port_mac + bytes(10)
        frame = b"\xff" * 6 + port_mac + b"\x08\x06" + arp + socket.inet_aton(address)
        frame = (frame + struct.pack("=I", port)).ljust(_MIN_FRAME_BYTES, b"\0")
        program, before = self._bpf.program("torchrelay_probe"), self._global("probes")
        for _ in range(_PROBES):
            if not self._bpf.run(program, frame):
                return None
            deadline_s = time.monotonic() + _PROBE_S
            while time.monotonic() < deadline_s:
                if self._global("probes") != before:
                    return True
                time.sleep(_PROBE_S / 20)
        return False

    def _neighbor(self, address: str) -> tuple[bytes, int]:
        """Return the MAC address of a host behind one of the ports, and the port."""
        for ifindex, interface in self.interfaces.items():
            mac = self._arp_entry(address, interface)
            if mac is not None:
                return mac, ifindex
        with contextlib.suppress(OSError):  # makes the kernel resolve the address
            self._socket.sendto(b"", (address, DISCARD_PORT))
        raise UnavailableError(
            f"XDP: {address} has not answered ARP yet at any of this switch's ports "
            f"({', '.join(self.interfaces.values())}); is it on the network of one?"
        )

    def _arp_entry(self, address: str, interface: str) -> bytes | None:
        family = struct.pack("=H2x4s8x", socket.AF_INET, socket.inet_aton(address))
        request = struct.pack("=16s16xi16x16s", family, 0, interface.encode())
        try:
            entry = fcntl.ioctl(self._socket, _SIOCGARP, request)
        except OSError:
            return None
        flags: int = struct.unpack_from("=i", entry, 32)[0]
        return entry[18:24] if flags & _ATF_COM else None

    def close_session(self, session_id: int) -> None:
        with self._lock:
            self._close_session(session_id)

    def _close_session(self, session_id: int) -> None:
        opened = self._sessions.pop(session_id, None)
        if opened is None:
            return
        for source in opened.sources:
            self._bpf.delete(self._bpf.map("members"), _source(*source))
            del self._members[source]
        for ifindex in opened.ports:
            self._bpf.delete(self._bpf.map("workers"), _WorkerKey(opened.index, ifindex))
        self._ended.update(_counts(self._read_session(opened)))
        self._free_indices.append(opened.index)

    def _session(self, session_id: int) -> _OpenSession:
        if session_id not in self._sessions:
            raise ArgumentError(f"switch: no session has the id {session_id}")
        return self._sessions[session_id]

    def missing(self, session_id: int) -> list[int]:
        with self._lock:
            opened = self._session(session_id)
            slots, slot = self._bpf.map("slots"), _SlotEntry()
            everyone = (1 << opened.shape.num_workers) - 1
            present = everyone
            for at in range(opened.first_slot, opened.first_slot + opened.shape.num_slots):
                self._bpf.lookup(slots, ctypes.c_uint32(at), slot)
                for set_ in (0, 1):
                    if slot.count[set_]:
                        present &= slot.bitmap[set_]
            return [rank for rank in range(opened.shape.num_workers) if not present >> rank & 1]

    def receive_control(self, timeout_s: float) -> ControlMessage | None:
        ready = select.select(self._sockets.values(), [], [], timeout_s)[0]
        if not ready:
            return None
        data, (address, port) = ready[0].recvfrom(1 << 16)
        switch_port: int = ready[0].getsockname()[1]
        if data and data[0] >> 4 == _CONTROL_TYPE:
            return ControlMessage(data, address, port, switch_port)
        is_member = (address, port) in self._members or (address, 0) in self._members
        return ControlMessage(b"", address, port, switch_port, coalesced=is_member)

    def send_control(self, message: bytes, address: str, port: int, switch_port: int) -> None:
        try:
            self._sockets[switch_port].sendto(message, (address, port))
        except OSError:  # port 0, or no route
            self._send_lost += 1

    def _read_session(self, opened: _OpenSession) -> _SessionEntry:
        session = _SessionEntry()
        self._bpf.lookup(self._bpf.map("sessions"), ctypes.c_uint32(opened.index), session)
        return session

    def _global(self, name: str) -> int:
        values = (ctypes.c_uint64 * self._bpf.num_cpus())()
        self._bpf.lookup(self._bpf.map("stats"), ctypes.c_uint32(_STATS.index(name)), values)
        return sum(values)

    def stats(self) -> SwitchStats:
        with self._lock:
            if self._is_closed:
                return self._last
            sessions = tuple(
                _session_stats(session_id, opened, self._read_session(opened))
                for session_id, opened in sorted(self._sessions.items())
            )
            counts = {name: self._global(name) for name in _native.switch_stats()}
            counts["send_lost"] += self._send_lost
            total = sum((Counter(one.counts) for one in sessions), self._ended)
            return SwitchStats(self.name, self.address, self.port, {**counts, **total}, sessions)

    def close(self) -> None:
        if self._is_closed:
            return
        self._last = self.stats()
        self._is_closed = True
        self._bpf.close()
        self._close_sockets()


def _ifindex(name: str) -> int:
    try:
        return socket.if_nametoindex(name)
    except OSError:
        raise ConfigError(f"XDP: there is no network interface {name!r}") from None


def _array(data: bytes) -> ctypes.Array[ctypes.c_uint8]:
    return (ctypes.c_uint8 * len(data))(*data)


def _source(address: str, port: int) -> _SourceKey:
    return _SourceKey(_array(socket.inet_aton(address)), _array(port.to_bytes(2, "big")), 0)


def _counts(session: _SessionEntry) -> dict[str, int]:
    return dict(zip(_SESSION_STATS, session.stats, strict=True))


def _session_stats(session_id: int, opened: _OpenSession, session: _SessionEntry) -> SessionStats:
    now_s = time.monotonic()  # like the kernel's heard_ns, CLOCK_MONOTONIC
    workers = tuple(
        SessionWorkerStats(
            session.worker_received[rank],
            session.worker_again[rank],
            now_s - max(session.heard_ns[rank] / 1e9, opened.joined.get(rank, opened.opened)),
        )
        for rank in range(opened.shape.num_workers)
    )
    return SessionStats(session_id, opened.shape, _counts(session), workers)

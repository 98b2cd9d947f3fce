"""Networks for tests of the aggregation switch: hosts with UDP sockets, and a data plane that they
reach.

Every test of packets runs over each kind of network, so the data planes are held to the same
behaviour.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import resource
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

import namespaces
from torchrelay import _native
from torchrelay.aggregation.switch import DataPlane, SessionShape, UdpDataPlane, XdpDataPlane
from torchrelay.errors import UnavailableError
from waiting import eventually

__all__ = [
    "NETWORKS",
    "Network",
    "Worker",
    "add_worker",
    "beyond_select",
    "checksum",
    "header",
    "ip_packet",
    "packet",
    "udp_network",
    "values_of",
    "within",
    "xdp_network",
]

PATIENCE_S = 60.0
T = TypeVar("T")


@dataclass
class Worker:
    """A socket of one host, connected to the switch."""

    sock: socket.socket
    address: str
    port: int

    def send(self, datagram: bytes) -> None:
        self.sock.send(datagram)

    def receive(self) -> bytes:
        self.sock.settimeout(PATIENCE_S)
        return self.sock.recv(1 << 16)

    def has_received(self) -> bool:
        self.sock.setblocking(False)
        try:
            self.sock.recv(1 << 16, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        return True


@dataclass
class Network:
    """``plane`` on a network whose hosts ``connect(host)`` opens sockets on; each call opens one
    more.
    """

    plane: DataPlane
    connect: Callable[[int], Worker]
    within: Callable[[int, Callable[[], socket.socket]], socket.socket]  # opens one on a host
    workers: dict[tuple[int, int], Worker] = field(default_factory=dict)  # by session and rank
    pids: list[int] = field(default_factory=list)  # of the hosts' namespaces, where they have some

    def open_session(
        self,
        num_workers: int,
        numel: int = 64,
        session_id: int = 1,
        sequenced: bool = False,
        slots: int = 8,
    ) -> None:
        """Make a session whose worker ``i`` is on host ``i``."""
        self.plane.open_session(session_id, SessionShape(num_workers, slots, numel, sequenced))
        for rank in range(num_workers):
            worker = self.connect(rank)
            add_worker(self.plane, session_id, rank, worker.address, worker.port, 1)
            self.workers[session_id, rank] = worker

    def send(self, worker: Worker, datagram: bytes) -> None:
        """Send, and wait until the switch has dealt with it."""
        before = self.dealt_with()
        worker.send(datagram)
        eventually(lambda: self.dealt_with() != before)

    def forge(self, host: int, ip: bytes) -> None:
        """Send an IP packet from ``host`` as it is; only IP's own checksum is filled in."""

        def raw() -> socket.socket:
            return socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)

        if os.geteuid() != 0:
            pytest.skip("raw sockets need root")
        with self.within(host, raw) as sock:
            sock.sendto(ip, (socket.inet_ntoa(ip[16:20]), 0))

    def dealt_with(self) -> int:
        counts = self.plane.stats().counts
        return sum(counts[name] for name in ("received", "malformed", "strangers", "control"))


def add_worker(
    plane: DataPlane, session_id: int, rank: int, address: str, port: int, num_ports: int
) -> None:
    """Add a worker once the data plane knows how to reach it."""

    def is_added() -> bool:
        try:
            plane.add_worker(session_id, rank, address, port, num_ports)
        except UnavailableError:
            return False
        return True

    eventually(is_added)


@contextlib.contextmanager
def beyond_select() -> Iterator[None]:
    """Descriptors that are opened meanwhile are too large for ``select.select``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while stack.enter_context(open(os.devnull)).fileno() < 1024:
            pass
        yield


@contextlib.contextmanager
def udp_network(hosts: int) -> Iterator[Network]:
    """All hosts are this one: they differ by their loopback addresses."""
    with contextlib.ExitStack() as stack:
        plane = stack.enter_context(UdpDataPlane(port=0))

        def connect(host: int) -> Worker:
            assert host < hosts
            sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            sock.bind((f"127.0.0.{2 + host}", 0))
            sock.connect((plane.address, plane.port))
            return Worker(sock, *sock.getsockname())

        yield Network(plane, connect, lambda _, function: function())


def within(pid: int, function: Callable[[], T]) -> T:
    """Return what ``function`` returns in a thread that is in the network namespace of ``pid``."""

    def enter_and_run() -> T:
        namespaces.enter(pid)
        return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(enter_and_run).result()


@contextlib.contextmanager
def xdp_network(hosts: int, mode: str = "generic") -> Iterator[Network]:
    """Each host is a network namespace with a link of its own to the switch's."""
    reason = missing_for_xdp()
    if reason:
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        star = stack.enter_context(namespaces.star(hosts))
        if mode == "native":
            for pid in star.pids:
                within(pid, enable_gro)  # or the kernel's veth would not take redirected frames
        names = [f"port{host}" for host in range(hosts)]
        plane = stack.enter_context(within(star.switch, lambda: XdpDataPlane(names, 0, mode=mode)))

        def connect(host: int) -> Worker:
            def connected() -> socket.socket:
                sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                sock.connect((f"10.78.{host}.1", plane.port))
                return sock

            sock = stack.enter_context(within(star.pids[host], connected))
            return Worker(sock, *sock.getsockname())

        yield Network(
            plane, connect, lambda host, function: within(star.pids[host], function), pids=star.pids
        )


def missing_for_xdp() -> str:
    """Why there can be no XDP switch here; empty if there can."""
    if reason := namespaces.missing():
        return reason
    try:
        ctypes.CDLL("libbpf.so.1")
    except OSError as error:
        return f"XDP needs libbpf: {error}"
    return (
        "" if (Path(_native.__file__).parent / "switch.bpf.o").exists() else "built without clang"
    )


def enable_gro() -> None:
    """``ethtool -K eth0 gro on``."""
    value = (ctypes.c_uint32 * 2)(0x2C, 1)  # ETHTOOL_SGRO
    request = struct.pack("16sP16x", b"eth0", ctypes.addressof(value))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8946, request)  # SIOCETHTOOL


NETWORKS: dict[str, Callable[[int], contextlib.AbstractContextManager[Network]]] = {
    "udp": udp_network,
    "xdp-generic": xdp_network,
    "xdp-native": functools.partial(xdp_network, mode="native"),
}


def header(
    job: int = 0,
    tsi: int = 0,
    slot: int = 0,
    set: int = 0,
    exponent: int = 0,
    numel: int = 64,
    second_exponent: int = 0,
) -> bytes:
    """The header of a data packet, as SwitchML's P4 program lays it out."""
    type_and_size = 1 << 4 | {64: 1, 256: 3}[numel]
    return struct.pack(
        ">BBIHbb", type_and_size, job, tsi, set << 15 | slot, exponent, second_exponent
    )


def packet(values: list[int] | int, *, numel: int = 64, **fields: int) -> bytes:
    """A data packet; one value stands for all."""
    all_values = [values] * numel if isinstance(values, int) else values
    return header(numel=numel, **fields) + b"".join(
        (value % (1 << 32)).to_bytes(4, "big") for value in all_values
    )


def checksum(data: bytes) -> int:
    """The Internet checksum (RFC 1071)."""
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ip_packet(
    source: tuple[str, int],
    destination: tuple[str, int],
    datagram: bytes,
    udp_checksum: int | None = None,
) -> bytes:
    """A UDP datagram (of even length) with its IP header; the right checksum unless given."""
    addresses = socket.inet_aton(source[0]) + socket.inet_aton(destination[0])
    size = 8 + len(datagram)
    ports = struct.pack(">HHH", source[1], destination[1], size)
    if udp_checksum is None:
        pseudo_header = addresses + struct.pack(">HH", socket.IPPROTO_UDP, size)
        udp_checksum = checksum(pseudo_header + ports + datagram)
    head = struct.pack(">BxHHxxBBxx", 0x45, 20 + size, 1, 64, socket.IPPROTO_UDP) + addresses
    head = head[:10] + checksum(head).to_bytes(2, "big") + head[12:]
    return head + ports + udp_checksum.to_bytes(2, "big") + datagram


def values_of(datagram: bytes) -> set[int]:
    """The different values of a packet."""
    data = datagram[10:]
    return {int.from_bytes(data[at : at + 4], "big", signed=True) for at in range(0, len(data), 4)}

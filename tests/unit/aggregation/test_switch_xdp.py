"""The XDP switch beyond its packets: whole sums, loading and unloading, and what it refuses."""

from __future__ import annotations

import ctypes
import secrets
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import namespaces
from switch_ports import (
    add_worker,
    ip_packet,
    missing_for_xdp,
    packet,
    values_of,
    within,
    xdp_network,
)
from torchrelay.aggregation.switch import (
    SessionShape,
    SwitchClient,
    SwitchServer,
    XdpDataPlane,
    _xdp,
)
from torchrelay.config import Aggregation
from torchrelay.errors import ArgumentError, ConfigError, UnavailableError
from waiting import eventually

needs_xdp = pytest.mark.skipif(bool(missing_for_xdp()), reason=missing_for_xdp())


def programs(pid: int) -> int:
    """How many interfaces of a namespace have an XDP program."""
    command = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-details", "link"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.count(
        "prog/xdp"
    )


@needs_xdp
def test_workers_sum_through_the_kernel() -> None:
    options = Aggregation(num_worker_threads=2, max_outstanding_packets=32)
    with namespaces.star(3) as star:
        plane = within(
            star.switch, lambda: XdpDataPlane(["port0", "port1", "port2"], 0, mode="generic")
        )
        with SwitchServer(plane) as server:
            session_id = secrets.randbits(64)

            def work(rank: int) -> list[torch.Tensor]:
                namespaces.enter(star.pids[rank])
                address = f"10.78.{rank}.1:{plane.port}"
                with SwitchClient(address, rank, 3, session_id, options) as client:
                    floats = torch.arange(20_000, dtype=torch.float32) * (rank + 1)
                    floats[77] = torch.nan if rank == 1 else 1.0
                    integers = torch.full((20_000,), 10**rank, dtype=torch.int32)
                    client.all_reduce(floats)
                    client.all_reduce(integers)
                    return [floats, integers]

            with ThreadPoolExecutor(3) as pool:
                results = list(pool.map(work, range(3)))
            exact = torch.arange(20_000, dtype=torch.float64) * 6
            for floats, integers in results:
                assert (integers == 111).all()
                assert floats[77].isnan()
                error = (floats - exact).abs()
                error[77] = 0
                assert (error <= 9 * 2**16 / 2**32 + exact * 1e-7).all()
            stats = server.stats()
            assert stats.counts["completed"] > 0
            assert stats.counts["sent"] >= 3 * stats.counts["completed"]


@needs_xdp
def test_it_loads_unloads_and_refuses() -> None:
    with namespaces.star(2) as star:
        shape = SessionShape(2, 16, 64)
        with within(
            star.switch, lambda: XdpDataPlane(["port0", "port1"], 0, max_slots=32)
        ) as plane:
            assert programs(star.switch) == 2
            with pytest.raises(UnavailableError, match="another XDP program is there"):
                within(star.switch, lambda: XdpDataPlane(["port0"], 0))
            plane.open_session(1, shape)
            plane.open_session(2, shape)
            with pytest.raises(UnavailableError, match="no 16 slots are free"):
                plane.open_session(3, shape)
            plane.close_session(1)
            plane.open_session(3, shape)
            with pytest.raises(ArgumentError, match="1 to 64 workers"):
                plane.open_session(4, SessionShape(65, 16, 64))
            within(star.switch, lambda: add_worker(plane, 2, 0, "10.78.0.2", 4000, 2))
            with pytest.raises(ArgumentError, match="already leads to worker 0"):
                plane.add_worker(2, 1, "10.78.0.2", 5000, 1)
            with pytest.raises(ArgumentError, match="another worker"):
                plane.add_worker(3, 0, "10.78.0.2", 4001, 1)
        assert programs(star.switch) == 0
        plane.close()
        with pytest.raises(ConfigError, match="no network interface 'port7'"):
            within(star.switch, lambda: XdpDataPlane(["port7"], 0))
        with pytest.raises(ConfigError, match="mode 'fast'"):
            within(star.switch, lambda: XdpDataPlane(["port0"], 0, mode="fast"))
        assert programs(star.switch) == 0


@needs_xdp
def test_a_packet_with_a_wrong_ip_checksum_is_not_summed() -> None:
    with xdp_network(1) as network:
        network.open_session(1)
        worker = network.workers[1, 0]
        good = ip_packet((worker.address, worker.port), worker.sock.getpeername(), packet(5))

        def link() -> socket.socket:
            return socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM)

        with network.within(0, link) as sock:
            bad = good[:8] + b"\x20" + good[9:]  # another time to live
            sock.sendto(bad, ("eth0", 0x0800, 0, 0, b"\xff" * 6))
            eventually(lambda: network.plane.stats().counts["malformed"] == 1)
            assert not worker.has_received()
            sock.sendto(good, ("eth0", 0x0800, 0, 0, b"\xff" * 6))
        assert values_of(worker.receive()) == {5}


@needs_xdp
def test_a_program_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class LaterEntry(_xdp.SlotEntry):
        _fields_ = (("more", ctypes.c_uint64),)

    monkeypatch.setattr(_xdp, "SlotEntry", LaterEntry)
    with (
        namespaces.star(1) as star,
        pytest.raises(UnavailableError, match="of another version: its map slots"),
    ):
        within(star.switch, lambda: XdpDataPlane(["port0"], 0))


def test_a_build_without_the_program_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_xdp, "_OBJECT", tmp_path / "switch.bpf.o")
    with pytest.raises(UnavailableError, match="clang, libbpf-dev"):
        XdpDataPlane([socket.if_indextoname(1)], 0)

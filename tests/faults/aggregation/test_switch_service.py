"""A switch and its workers: joining, refusals, lost workers and lost switches."""

from __future__ import annotations

import json
import secrets
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch

import namespaces
import preloaded
from ranks import free_port
from switch_ports import within
from torchrelay.aggregation.switch import (
    SwitchClient,
    SwitchServer,
    UdpDataPlane,
)
from torchrelay.config import Aggregation
from torchrelay.errors import (
    ArgumentError,
    ConfigError,
    OperationTimeoutError,
    PeerLostError,
    UnavailableError,
)
from waiting import eventually

SMALL = Aggregation(num_worker_threads=2, max_outstanding_packets=16, packet_numel=64)


@pytest.fixture
def server() -> Iterator[SwitchServer]:
    with SwitchServer(UdpDataPlane(port=0, drop_ingress=0.02, drop_egress=0.02)) as server:
        yield server


def at_once(num_workers: int, work: Callable[[int], Any]) -> list[Any]:
    """Return ``work(rank)`` of each worker, run in threads."""
    with ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(work, range(num_workers)))


def test_sessions_run_side_by_side_and_end_with_their_last_worker(server: SwitchServer) -> None:
    sessions = {secrets.randbits(64): num_workers for num_workers in (1, 2, 3)}
    ready = threading.Barrier(sum(sessions.values()) + 1)

    def work(session_id: int, rank: int) -> None:
        num_workers = sessions[session_id]
        with SwitchClient(server.address, rank, num_workers, session_id, SMALL) as client:
            ready.wait(60)
            for size in (1, 300, 5000):
                integers = torch.full((size,), 10**rank, dtype=torch.int32)
                floats = torch.arange(size, dtype=torch.float32) * (rank + 1)
                client.all_reduce(integers)
                client.all_reduce(floats)
                assert (integers == (10**num_workers - 1) // 9).all()
                exact = torch.arange(size, dtype=torch.float64) * (
                    num_workers * (num_workers + 1) // 2
                )
                assert (
                    floats - exact
                ).abs().max() <= num_workers**2 * 2**14 / 2**32 + exact.max() * 1e-7
            stats = client.stats()
            assert (stats.jobs, stats.payload_bytes) == (6, 8 * (1 + 300 + 5000))
            packets = stats.packets
            assert packets.sent == packets.results + packets.retransmissions

    with ThreadPoolExecutor(6) as pool:
        done = [
            pool.submit(work, id_, rank) for id_, size in sessions.items() for rank in range(size)
        ]
        ready.wait(60)
        assert len(server.stats().sessions) == 3
        for future in done:
            future.result()
    eventually(lambda: not server.stats().sessions)


def test_a_missing_worker_is_named(server: SwitchServer) -> None:
    session_id = secrets.randbits(64)
    ready = threading.Barrier(2)

    def work(rank: int) -> str:
        with SwitchClient(server.address, rank, 3, session_id, SMALL) as client:
            ready.wait(60)
            with pytest.raises(OperationTimeoutError, match="it waits for worker 2") as error:
                client.all_reduce(torch.ones(1000), timeout_s=3.0)
            assert error.value.ranks == (2,)
            with pytest.raises(PeerLostError, match="first error"):
                client.all_reduce(torch.ones(1), timeout_s=1.0)
            return str(error.value)

    for rank, message in enumerate(at_once(2, work)):
        assert f"switch {server.address}: all_reduce of 1000 float32, worker {rank} of 3" in message
        assert " s, with " in message


def test_what_does_not_fit_is_refused(server: SwitchServer) -> None:
    with SwitchClient(server.address, 0, 2, 1, SMALL) as client:
        for tensor in (
            torch.ones(2, dtype=torch.float64),
            torch.ones(4, 4).t(),
            torch.ones(2, device="meta"),
        ):
            with pytest.raises(ArgumentError, match="contiguous CPU tensors"):
                client.all_reduce(tensor)
        with pytest.raises(UnavailableError, match="the session was made for"):
            SwitchClient(server.address, 1, 3, 1, SMALL)
        with pytest.raises(UnavailableError, match="rank 5"):
            SwitchClient(server.address, 5, 2, 1, SMALL)
    with (
        SwitchServer(UdpDataPlane(port=0), max_slots=1024) as small,
        pytest.raises(UnavailableError, match="allows 1024 slots"),
    ):
        SwitchClient(small.address, 0, 2, 2, Aggregation(max_outstanding_packets=2048))
    with pytest.raises(ConfigError):
        Aggregation(packet_numel=100)
    with pytest.raises(ConfigError):
        Aggregation(num_worker_threads=0)
    with pytest.raises(ConfigError):
        Aggregation(packet_timeout_s=0)
    with pytest.raises(ConfigError, match="host or host:port"):
        SwitchClient("switch:x", 0, 1, 1)


def test_limits_and_networks() -> None:
    with (
        SwitchServer(UdpDataPlane(port=0), allow=["10.0.0.0/8"]) as server,
        pytest.raises(UnavailableError, match=r"127.0.0.1 are not allowed"),
    ):
        SwitchClient(server.address, 0, 1, 1, SMALL)
    with (
        SwitchServer(UdpDataPlane(port=0), max_sessions=1) as server,
        SwitchClient(server.address, 0, 1, 1, SMALL) as client,
    ):
        with pytest.raises(
            UnavailableError, match=r"not admitted within 5 s: .* may use a quarter"
        ):
            SwitchClient(server.address, 0, 1, 2, SMALL, timeout_s=5.0)  # for an answer in time
        client.all_reduce(torch.ones(1))


def test_joining_waits_for_a_place() -> None:
    with (
        SwitchServer(UdpDataPlane(port=0), max_sessions=1) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        with SwitchClient(server.address, 0, 1, 1, SMALL):
            joining = pool.submit(SwitchClient, server.address, 0, 1, 2, SMALL)
            eventually(
                lambda: server.stats().counts["control"] >= 4
            )  # two for each socket of the first
        with joining.result(60) as client:
            client.all_reduce(torch.ones(1))


def test_an_idle_worker_keeps_its_session_and_a_lost_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        SwitchServer(UdpDataPlane(port=0)) as server,
        SwitchClient(server.address, 0, 1, 1, SMALL) as idle,
    ):
        heard = server.stats().counts["control"]
        eventually(
            lambda: server.stats().counts["control"] > heard
        )  # of a worker that does nothing
        idle.all_reduce(torch.ones(1))
        monkeypatch.setattr(server, "_session_timeout_s", 0.0)  # as if it were silent
        eventually(lambda: not server.stats().sessions)
        with pytest.raises(PeerLostError, match="does not know this session"):
            idle.all_reduce(torch.ones(1))


def test_a_closed_data_plane_has_given_its_port_back() -> None:
    plane = UdpDataPlane(port=0)
    plane.close()
    with UdpDataPlane(port=plane.port) as again:
        assert again.port == plane.port
    with pytest.raises(UnavailableError, match="stopped and sends no more"):
        plane.send_control(b"x", "127.0.0.1", 9, plane.port)
    assert plane.stats().port == plane.port
    plane.close()


def test_no_switch_is_an_error_that_names_it() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=f"switch {address}: no answer within 0.3 s"):
            SwitchClient(address, 0, 1, 1, SMALL, timeout_s=0.3)


def test_a_switch_without_a_route_is_a_timeout() -> None:
    if reason := namespaces.missing():
        pytest.skip(reason)
    with namespaces.star(1) as star:
        plane = within(star.switch, lambda: UdpDataPlane("0.0.0.0", 0))

        def work() -> None:
            with SwitchClient(f"10.78.0.1:{plane.port}", 0, 2, 1, SMALL) as client:
                subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
                with pytest.raises(OperationTimeoutError, match="the switch does not answer"):
                    client.all_reduce(torch.ones(1), timeout_s=0.2)

        with SwitchServer(plane):
            within(star.pids[0], work)


def test_a_client_that_is_closed_meanwhile_asks_no_more(server: SwitchServer) -> None:
    with SwitchClient(server.address, 0, 2, 1, SMALL) as client:
        client._control.close()  # as close() in another thread does
        with pytest.raises(OperationTimeoutError, match="the switch does not answer"):
            client.all_reduce(torch.ones(1), timeout_s=0.2)


class Command:
    """``torchrelay switch --json`` in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        command = [
            sys.executable,
            "-c",
            "from torchrelay.cli import main; main()",
            "switch",
            "--json",
        ]
        self.process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.output = self.process.stdout
        self.start: dict[str, str] = json.loads(self.output.readline())

    def end(self, number: int) -> list[dict[str, Any]]:
        self.process.send_signal(number)
        lines = [json.loads(line) for line in self.output]
        self.process.wait(60)
        self.output.close()
        return lines


def test_the_command_and_the_loss_of_its_process() -> None:
    port = str(free_port())  # nobody else is given it while the command is restarted
    command = Command("--port", port, "--metrics-port", "0")
    try:
        address = command.start["switch"]
        clients = at_once(2, lambda rank: SwitchClient(address, rank, 2, 1, SMALL))
        tensors = [torch.ones(5000) for _ in clients]
        at_once(2, lambda rank: clients[rank].all_reduce(tensors[rank]))
        assert all((tensor == 2).all() for tensor in tensors)
        with urllib.request.urlopen(command.start["metrics"], timeout=60) as page:
            metrics = page.read().decode()
        assert 'torchrelay_switch_sessions{data_plane="udp",rank="0"} 1' in metrics
        assert 'torchrelay_switch_received_total{data_plane="udp",rank="0"}' in metrics
        assert 'retransmissions{rank="0",session="0",worker="1"}' in metrics
        command.end(signal.SIGKILL)
        with pytest.raises(PeerLostError, match=f"switch {address}.*nothing listens"):
            clients[0].all_reduce(tensors[0], timeout_s=100)
        command = Command("--port", port)
        with pytest.raises(PeerLostError, match=f"switch {address}.*was it restarted"):
            clients[1].all_reduce(tensors[1], timeout_s=100)
        for client in clients:
            client.close()
        with SwitchClient(address, 0, 1, 2, SMALL) as again:
            again.all_reduce(tensors[0])
        last = command.end(signal.SIGTERM)[-1]
        assert command.process.returncode == 0
        assert last["completed"] > 0
        assert last["strangers"] > 0
        assert "session_id" not in json.dumps(last)
    finally:
        command.process.kill()
        command.process.wait()
        command.output.close()


def test_a_killed_worker_is_named(server: SwitchServer, tmp_path: Path) -> None:
    code = f"""
import time, torch
from torchrelay.aggregation.switch import SwitchClient
with SwitchClient({server.address!r}, 1, 2, 5) as client:
    tensor = torch.ones(1000)
    client.all_reduce(tensor)
    print(tensor[0].item(), flush=True)
    time.sleep(1000)
"""
    with SwitchClient(server.address, 0, 2, 5) as client:
        with subprocess.Popen(
            [preloaded.python(), "-c", code], stdout=subprocess.PIPE, text=True
        ) as other:
            client.all_reduce(torch.ones(1000), timeout_s=100)
            assert other.stdout is not None
            assert other.stdout.readline() == "2.0\n"
            other.kill()
        with pytest.raises(OperationTimeoutError, match="it waits for worker 1"):
            client.all_reduce(torch.ones(1000), timeout_s=2.0)


def _signal_a_call(server: SwitchServer, handler: str, number: int) -> str:
    """Return what a worker prints that gets a signal while it waits for another worker.

    Args:
        handler: statements of its signal handler.
    """
    code = f"""
import signal, torch
from torchrelay.aggregation.switch import SwitchClient
client = SwitchClient({server.address!r}, 0, 2, 5)
def handle(*_):
{indent(handler, "    ")}
signal.signal({number}, handle)
print("ready", flush=True)
client.all_reduce(torch.ones(1000), timeout_s=1000)
"""
    with subprocess.Popen(
        [preloaded.python(), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            eventually(lambda: server.stats().counts["received"] > 0)
            process.send_signal(number)
            return "".join(process.communicate(timeout=60))
        finally:
            process.kill()


def test_ctrl_c_ends_a_call(server: SwitchServer) -> None:
    said = _signal_a_call(server, "signal.default_int_handler(*_)", signal.SIGINT)
    assert "KeyboardInterrupt" in said


def test_a_signal_handler_may_close_the_client_but_not_sum(server: SwitchServer) -> None:
    handler = """
try:
    client.all_reduce(torch.ones(1))
except Exception as error:
    print(type(error).__name__, error)
client.close()
"""
    said = _signal_a_call(server, handler, signal.SIGTERM)
    assert f"UnavailableError switch {server.address}: a signal handler made this call" in said
    assert "PeerLostError: switch" in said and "the worker was closed" in said

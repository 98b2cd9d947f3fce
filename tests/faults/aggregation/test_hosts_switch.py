"""Switches, leaders and hosts that are lost in groups whose hosts sum through a switch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.store import barrier as meet

import torchrelay.aggregation  # noqa: F401 - registers the backend
from torchrelay.aggregation import Options
from torchrelay.aggregation._switch_transport import SwitchTransport
from torchrelay.aggregation.switch import SwitchClient
from torchrelay.errors import (
    ConfigError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    TorchRelayError,
    UnavailableError,
)
from torchrelay.world import World

if TYPE_CHECKING:
    from ranks import RunProcesses

HOSTS = "aabb"


class Switch:
    """``torchrelay switch`` in a process of its own, on ``address``."""

    def __init__(self, port: str = "0") -> None:
        command = [
            sys.executable,
            "-c",
            "from torchrelay.cli import main; main()",
            "switch",
            "--json",
        ]
        self.process = subprocess.Popen(
            [*command, "--port", port], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout
        self.address: str = json.loads(self.output.readline())["switch"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.output.close()


def start(world: World, switch: str, timeout_s: float = 60.0, **settings: Any) -> Any:
    os.environ["TORCHRELAY_HOST_ID"] = HOSTS[world.rank]
    store = world.connect(60)
    dist.init_process_group(
        "sml",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_s),
        pg_options=Options(switch=switch, **settings),
    )
    return store


def reduce_until_it_fails() -> tuple[str, str, tuple[int, ...]]:
    """Kind, message and ranks of the error; the group cannot be used after it."""
    tensor = torch.ones(1_000_000)
    with pytest.raises((PeerLostError, OperationTimeoutError)) as caught:  # noqa: PT012 - nobody knows which one fails
        while True:
            dist.all_reduce(tensor)
    with pytest.raises(type(caught.value), match="failed before"):
        dist.barrier()
    return type(caught.value).__name__, str(caught.value), caught.value.ranks


def _lose_the_switch(world: World) -> list[tuple[str, str, tuple[int, ...]]]:
    """It is stopped and continued, then killed in mid-collective; then, in another group, restarted
    between two collectives.
    """
    store = world.connect(60)
    switch = Switch() if world.rank == 0 else None
    if switch is not None:
        store.set("switch", switch.address)
    address = store.get("switch").decode()
    start(world, address)
    dist.all_reduce(torch.ones(1000))
    dist.barrier()
    if switch is not None:
        switch.process.send_signal(signal.SIGSTOP)
        threading.Timer(0.5, switch.process.send_signal, [signal.SIGCONT]).start()
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full_like(tensor, world.size))
    dist.barrier()
    if switch is not None:
        threading.Timer(0.3, switch.process.kill).start()
    results = [reduce_until_it_fails()]
    dist.destroy_process_group()
    if switch is not None:
        switch.kill()
        switch = Switch(address.split(":")[1])
        store.set("restarted", "")
    store.wait(["restarted"])

    start(world, address)
    dist.all_reduce(torch.ones(1000))
    dist.barrier()
    if switch is not None:
        switch.kill()
        switch = Switch(address.split(":")[1])
        store.set("again", "")
    store.wait(["again"])
    results.append(reduce_until_it_fails())
    dist.destroy_process_group()
    if switch is not None:
        switch.kill()
    return [(kind, message.replace(address, "SWITCH"), ranks) for kind, message, ranks in results]


def test_a_lost_switch_is_named_by_every_rank(run_processes: RunProcesses) -> None:
    for rank, result in enumerate(run_processes(_lose_the_switch, 4)):
        assert result.ok, result.error
        killed, restarted = result.value
        for (kind, message, ranks), why in (
            (killed, "was the switch stopped"),
            (restarted, "was it restarted"),
        ):
            assert (kind, ranks) == ("PeerLostError", ()), message
            assert (
                f"rank {rank}, all_reduce" in message
                and "switch SWITCH" in message
                and why in message
            )


def _lose_ranks(world: World, victims: list[int], address: str) -> tuple[str, str, tuple[int, ...]]:
    store = start(world, address)
    store.set(f"pid/{world.rank}", str(os.getpid()))
    pids = [int(store.get(f"pid/{rank}")) for rank in range(world.size)]
    dist.all_reduce(torch.ones(1000))
    if world.rank == victims[-1]:

        def kill() -> None:
            for rank in victims:
                os.kill(pids[rank], signal.SIGKILL)

        threading.Timer(0.3, kill).start()
    return reduce_until_it_fails()


@pytest.mark.parametrize("victims", [[3], [2], [2, 3]], ids=["rank", "leader", "host"])
def test_killed_ranks_are_named_while_others_wait_for_the_switch(
    victims: list[int], run_processes: RunProcesses
) -> None:
    switch = Switch()
    try:
        results = run_processes(_lose_ranks, 4, victims=victims, address=switch.address)
    finally:
        switch.kill()
    for rank in range(4):
        if rank in victims:
            assert results[rank].exitcode == -signal.SIGKILL
            continue
        assert results[rank].ok, results[rank].error
        kind, message, ranks = results[rank].value
        assert kind == "PeerLostError" and ranks == tuple(victims), message
        assert f"rank {rank}, all_reduce" in message


def _fail_to_join(world: World, address: str) -> list[str]:
    messages = []
    meet(world.connect(60), world.size, "here", barrier_timeout=60)
    with pytest.raises(UnavailableError) as caught:
        start(world, address, timeout_s=3)
    messages.append(str(caught.value))
    settings = {"packet_numel": 64 if world.rank == 3 else 256}
    with pytest.raises(MismatchError) as differs:
        start(world, address, **settings)
    messages.append(str(differs.value))
    with pytest.raises(MismatchError) as none:
        start(world, "" if world.rank == 2 else address)
    messages.append(str(none.value))
    with pytest.raises(ConfigError) as impossible:
        start(world, address, num_worker_threads=9, max_outstanding_packets=8)
    messages.append(str(impossible.value))
    return messages


def test_a_switch_that_cannot_be_joined_is_named_by_every_rank(
    run_processes: RunProcesses,
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        results = run_processes(_fail_to_join, 4, address=address)
    for rank, result in enumerate(results):
        assert result.ok, result.error
        absent, differs, none, impossible = result.value
        assert (
            f"rank {rank}, sml: rank 0 could not join its switch: switch {address}: no answer"
            in absent
        )
        assert "packet_numel=256" in differs and "packet_numel=64" in differs
        assert "the use of a switch is " in none and " off " in none
        assert "max_outstanding_packets = 8" in impossible


def _be_late(world: World, address: str) -> tuple[str, tuple[int, ...]]:
    """Rank 2, a leader, stands still once all have agreed on the call."""
    store = start(world, address)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    if world.rank == 2:
        original = SwitchClient.all_reduce

        def wait_first(client: SwitchClient, tensor: torch.Tensor, timeout_s: float) -> None:
            store.wait(["done"], timedelta(seconds=60))
            original(client, tensor, timeout_s)

        SwitchClient.all_reduce = wait_first  # type: ignore[method-assign,assignment]
    with pytest.raises((PeerLostError, OperationTimeoutError)) as caught:
        dist.all_reduce(torch.ones(1000))
    if world.rank == 0:
        store.set("done", "")
    return str(caught.value), caught.value.ranks


def test_a_leader_that_sends_nothing_is_named(run_processes: RunProcesses) -> None:
    switch = Switch()
    try:
        results = run_processes(_be_late, 4, address=switch.address)
    finally:
        switch.kill()
    for result in results:
        assert result.ok, result.error
        message, ranks = result.value
        assert ranks == (2,) and "it waits for worker 1: rank 2" in message, message


def _fail_to_sum(world: World, address: str) -> str:
    start(world, address)

    def submit(*_: object) -> None:
        raise MemoryError("on purpose")

    if world.rank == 0:
        SwitchTransport._submit = submit  # type: ignore[method-assign,assignment]
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    messages = set()
    for _ in range(2):
        with pytest.raises(TorchRelayError) as caught:
            work.wait()
        messages.add(f"{type(caught.value).__name__}: {caught.value}")
    (message,) = messages
    return message


def test_an_unexpected_error_is_raised_as_often_as_somebody_waits(
    run_processes: RunProcesses,
) -> None:
    switch = Switch()
    try:
        results = run_processes(_fail_to_sum, 4, address=switch.address)
    finally:
        switch.kill()
    for rank, result in enumerate(results):
        assert result.ok, result.error
        error, text = (
            ("UnavailableError", "") if rank == 0 else ("PeerLostError", "rank 0 failed (")
        )
        assert result.value.startswith(error) and text in result.value, result.value
        assert "MemoryError: on purpose" in result.value, result.value

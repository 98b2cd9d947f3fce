"""Processes that die, leave with an error, or are stopped for a while: who notices, and who is
named.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import torch

from nodes import Worker
from torchrelay.errors import PeerLostError
from torchrelay.parameters import Table
from torchrelay.world import World

if TYPE_CHECKING:
    from ranks import RunProcesses

KEYS, DIM = 40, 3
# What is noticed sooner is not noticed by silence.
PATIENT = {"TORCHRELAY_TRANSPORT_PEER_TIMEOUT_S": "100"}


def _push_for_ever(worker: Worker, keys: torch.Tensor) -> None:
    while True:
        worker.push(keys, torch.ones(len(keys), DIM))


def _wait_and_push_for_ever(worker: Worker, keys: torch.Tensor) -> None:
    worker.barrier()
    _push_for_ever(worker, keys)


def _wait_or_push_for_ever(worker: Worker, waits: bool) -> None:
    worker.barrier()  # may see already that another process has left it, and then the table
    if waits:
        worker.barrier()
    _push_for_ever(worker, torch.arange(KEYS))


def _exit_as_leader(world: World, nodes: int) -> tuple[str, tuple[int, ...]]:
    """The first process of the last node ends without a word. The others use only what is at their
    node.
    """
    node_of = lambda rank: rank * nodes // world.size  # noqa: E731
    worker = Table.create(KEYS, DIM, node_of_rank=node_of)._worker
    if world.rank == world.size // nodes * (nodes - 1):
        worker.barrier()
        os._exit(0)
    with pytest.raises(PeerLostError) as raised:
        _wait_and_push_for_ever(worker, torch.tensor([node_of(world.rank)]))
    return str(raised.value), raised.value.ranks


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_leader_that_exits_is_named_by_all(run_processes: RunProcesses, nodes: int) -> None:
    """In seconds: where connections are refused, nobody waits for the silence to become long."""
    results = run_processes(_exit_as_leader, 4, environ=PATIENT, nodes=nodes)
    leader = 4 // nodes * (nodes - 1)
    for rank, result in enumerate(results):
        if rank == leader:
            continue
        assert result.ok, result.error
        message, ranks = result.value
        assert ranks == (nodes - 1,), message
        own = rank * nodes // 4 == nodes - 1
        assert (f"which serves node {nodes - 1}, has died" if own else "it died") in message or (
            own and ("is lost" in message or (leader == 0 and "store through which" in message))
        )


def _leave_with_an_error(world: World, nodes: int) -> tuple[int, str, tuple[int, ...]]:
    table = Table.create(KEYS, DIM, node_of_rank=lambda rank: rank * nodes // world.size)
    if world.rank == world.size - 1:
        table._worker.barrier()
        table._server.abort()  # as a table does that an exception leaves
        return os.getpid(), "", ()
    with pytest.raises(PeerLostError) as raised:
        _wait_or_push_for_ever(table._worker, waits=world.rank == 0)
    return os.getpid(), str(raised.value), raised.value.ranks


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_process_that_leaves_with_an_error_is_named_at_once(
    run_processes: RunProcesses, nodes: int
) -> None:
    results = run_processes(_leave_with_an_error, 4, environ=PATIENT, timeout_s=180, nodes=nodes)
    for result in results:
        assert result.ok, result.error
    left_process = results[3].value[0]
    for rank in range(3):
        _, message, ranks = results[rank].value
        assert ranks == (nodes - 1,)
        own = f"process {left_process} of node {nodes - 1} has left" in message
        other = f"node {nodes - 1} is lost" in message and "shut down" in message
        assert own if rank * nodes // 4 == nodes - 1 else other, message


def _stop_all(world: World) -> float:
    """Every process is stopped for longer than a peer may be silent, as by Ctrl-Z."""
    table = Table.create(KEYS, DIM, node_of_rank=lambda rank: rank)
    worker, keys = table._worker, torch.arange(KEYS)
    worker.barrier()
    pids = table._server.topology.gather("pid", os.getpid(), "give its process id")
    worker.barrier()
    if world.rank == 0:
        script = "import os, signal, sys, time\npids = [int(p) for p in sys.argv[1:]]\n"
        script += "[os.kill(p, signal.SIGSTOP) for p in pids]\ntime.sleep(5)\n"
        script += "[(os.kill(p, signal.SIGCONT), time.sleep(0.3)) for p in pids]"
        helper = subprocess.Popen([sys.executable, "-c", script, *map(str, pids)])
        started = time.monotonic()
        helper.wait()
        assert time.monotonic() - started >= 5
    for _ in range(20):
        worker.push(keys, torch.ones(KEYS, DIM))
        time.sleep(0.05)
    worker.wait_sync()
    worker.barrier()
    out = torch.empty(KEYS, DIM)
    worker.pull(keys, out)
    worker.barrier()
    table.close()
    return float(out[0, 0])


def test_a_job_that_is_stopped_for_longer_than_a_peer_may_be_silent_goes_on(
    run_processes: RunProcesses,
) -> None:
    quick = {"TORCHRELAY_TRANSPORT_HEARTBEAT_S": "0.2", "TORCHRELAY_TRANSPORT_PEER_TIMEOUT_S": "3"}
    for result in run_processes(_stop_all, 3, environ=quick):
        assert result.ok, result.error
        assert result.value == 60

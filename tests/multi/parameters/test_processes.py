"""Nodes as processes, with and without encryption; several processes of a node on one slab."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

from torchrelay.errors import PeerLostError
from torchrelay.parameters import Table
from torchrelay.world import World

if TYPE_CHECKING:
    from ranks import RunProcesses

PUSHES, BATCH, KEYS = 280, 60, 500  # 6 workers: 100,800 pushes


def _push_and_count(world: World) -> None:
    table = Table.create(KEYS, 2, node_of_rank=lambda rank: rank // 2)
    worker, keys = table._worker, torch.arange(KEYS)
    generator = torch.Generator().manual_seed(world.rank)
    batches = [torch.randint(0, KEYS, (BATCH,), generator=generator) for _ in range(PUSHES)]
    for clock, batch in enumerate(batches):
        if clock + 3 < PUSHES:
            worker.intent(batches[clock + 3], clock + 3, clock + 5)
        worker.push(batch, torch.ones(BATCH, 2), True)
        worker.advance_clock()
    worker.wait_all()
    worker.wait_sync()
    worker.barrier()
    out = torch.empty(KEYS, 2)
    worker.pull(keys, out)
    expected = torch.zeros(KEYS)
    for rank in range(world.size):
        generator = torch.Generator().manual_seed(rank)
        for _ in range(PUSHES):
            batch = torch.randint(0, KEYS, (BATCH,), generator=generator)
            expected += torch.bincount(batch, minlength=KEYS)
    wrong = (out != expected[:, None]).any(1).nonzero()[:, 0]
    assert not len(wrong), (
        f"keys {wrong.tolist()}: {out[wrong].tolist()}, not {expected[wrong].tolist()}"
    )
    statistics = table._server.statistics()
    assert statistics["relocations"] + statistics["replicas_made"] > 0
    assert statistics["protocol_errors"] == 0
    table.close()


@pytest.mark.parametrize(
    "environ",
    [{}, {"TORCHRELAY_TRANSPORT_KEY": "3a" * 32, "TORCHRELAY_TRANSPORT_LOCAL_SOCKETS": "0"}],
    ids=["plain", "encrypted"],
)
def test_asynchronous_pushes_of_three_nodes_with_two_processes_each_are_all_counted_once(
    run_processes: RunProcesses, environ: dict[str, str]
) -> None:
    for result in run_processes(_push_and_count, 6, environ=environ):
        assert result.ok, result.error


@pytest.mark.processes(2)
def test_two_processes_of_one_node_share_its_memory(world: World) -> None:
    table = Table.create(10, 1)
    table._worker.push(torch.arange(10), torch.full((10,), world.rank + 1.0))
    table._worker.barrier()
    out = torch.empty(10)
    assert table._worker.pull_if_local(torch.arange(10), out)
    assert (out == 3).all()
    table._worker.barrier()
    table.close()


def _lose_a_node(world: World) -> tuple[int, ...]:
    table = Table.create(100, 4, node_of_rank=lambda rank: rank)
    worker, keys = table._worker, torch.arange(100)
    worker.push(keys, torch.ones(100, 4))
    worker.barrier()
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            worker.pull(keys, torch.empty(100, 4))
    except PeerLostError as error:
        return error.ranks


def test_a_killed_node_is_named_within_the_timeout(run_processes: RunProcesses) -> None:
    environ = {
        "TORCHRELAY_TRANSPORT_PEER_TIMEOUT_S": "5",
        "TORCHRELAY_TRANSPORT_HEARTBEAT_S": "0.1",
    }
    results = run_processes(_lose_a_node, 3, environ=environ)
    assert results[2].exitcode == -signal.SIGKILL
    for rank in (0, 1):
        assert results[rank].ok, results[rank].error
        assert results[rank].value == (2,)


def _lose_a_worker(world: World) -> float:
    """Two processes a node; one worker dies while it pushes, the others go on."""
    table = Table.create(50, 8, node_of_rank=lambda rank: rank // 2)
    worker, keys = table._worker, torch.arange(50)
    worker.intent(keys, 0, 10_000)
    worker.barrier()
    if world.rank == 3:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    for _ in range(100_000 if world.rank == 3 else 300):
        worker.push(keys, torch.ones(50, 8))
    out = torch.empty(50, 8)
    deadline = time.monotonic() + 60
    while True:
        worker.wait_sync()
        worker.pull(keys, out)
        if out.min() >= 900 or time.monotonic() > deadline:
            break
    store = table._server.topology.ranks.store
    assert store is not None
    store.set(f"done/{world.rank}", "")
    store.wait([f"done/{rank}" for rank in range(3)])
    store.set(f"left/{world.rank}", "")
    if world.rank == 0:  # it has the store
        store.wait([f"left/{rank}" for rank in range(3)])
    return float(out.min())


def test_a_killed_worker_leaves_no_lock_and_loses_nothing_of_the_others(
    run_processes: RunProcesses,
) -> None:
    results = run_processes(_lose_a_worker, 4, timeout_s=100)
    assert results[3].exitcode == -signal.SIGKILL
    for rank in range(3):
        assert results[rank].ok, results[rank].error
        assert results[rank].value >= 900

"""Nodes that die, leave or may not join, as processes; and training that goes on from a
checkpoint.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import preloaded
from torchrelay.checkpoint import load, save
from torchrelay.errors import MismatchError, PeerLostError, UnavailableError
from torchrelay.parameters import Embedding, Table, optim
from torchrelay.transport import create_key
from torchrelay.world import World

if TYPE_CHECKING:
    from ranks import RunProcesses

KEYS, DIM = 40, 3
QUICK_TO_NOTICE = {
    "TORCHRELAY_TRANSPORT_HEARTBEAT_S": "0.1",
    "TORCHRELAY_TRANSPORT_PEER_TIMEOUT_S": "2",
}


def _lose_the_leader(world: World) -> tuple[int, ...]:
    """Two processes a node. Rank 2 serves node 1; rank 3 goes on with what is at node 1, so asks
    nobody.
    """
    table = Table.create(KEYS, DIM, node_of_rank=lambda rank: rank // 2)
    worker = table._worker
    keys = torch.arange(1 if world.rank == 3 else 0, KEYS, 2)
    worker.push(keys, torch.ones(len(keys), DIM))
    worker.barrier()
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            worker.push(keys, torch.ones(len(keys), DIM))
            if world.rank == 3:  # traffic of a node that nobody serves any more
                worker.push(torch.tensor([0]), torch.ones(1, DIM), True)
    except PeerLostError as error:
        return error.ranks


def test_a_node_whose_serving_process_died_is_named_also_by_its_own_workers(
    run_processes: RunProcesses,
) -> None:
    results = run_processes(_lose_the_leader, 4, environ=QUICK_TO_NOTICE)
    for rank in (0, 1, 3):
        result = results[rank]
        assert result.ok, result.error
        assert result.value == (1,)


def _lose_a_member(world: World) -> tuple[str, tuple[int, ...]]:
    """Two processes a node. Rank 3 serves nobody; the others wait for it."""
    worker = Table.create(KEYS, DIM, node_of_rank=lambda rank: rank // 2)._worker
    worker.barrier()
    if world.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        worker.barrier()
    except (PeerLostError, UnavailableError) as error:
        return str(error), getattr(error, "ranks", ())
    return "", ()


def test_a_process_that_died_before_a_barrier_is_named(
    run_processes: RunProcesses,
) -> None:
    results = run_processes(_lose_a_member, 4, environ=QUICK_TO_NOTICE)
    for rank in (0, 1, 2):
        result = results[rank]
        assert result.ok, result.error
        message, ranks = result.value
        # When it heard of node 1.
        own_leader_left = rank == 1 and "node 0 has been shut down" in message
        assert ranks == (1,) or own_leader_left, message
    assert "workers [1] of node 1 have died" in results[2].value[0]


def _leave_early(world: World) -> tuple[str, tuple[int, ...]]:
    table = Table.create(KEYS, DIM, node_of_rank=lambda rank: rank)
    table._worker.barrier()
    if world.rank == 1:
        table._server.abort()
        return "", ()
    try:
        while True:
            table._worker.pull(torch.arange(KEYS), torch.empty(KEYS, DIM))
    except PeerLostError as error:
        return str(error), error.ranks


def test_a_node_that_leaves_while_it_is_needed_is_named_at_once(
    run_processes: RunProcesses,
) -> None:
    results = run_processes(_leave_early, 3, environ={"TORCHRELAY_TRANSPORT_PEER_TIMEOUT_S": "100"})
    for rank in (0, 2):
        assert results[rank].ok, results[rank].error
        message, ranks = results[rank].value
        assert ranks == (1,)
        assert "node 1 is lost" in message and "shut down" in message


def _count_with_key(world: World, files: list[str]) -> tuple[float, str]:
    os.environ["TORCHRELAY_TRANSPORT_KEY_FILE"] = files[world.rank]
    os.environ["TORCHRELAY_TRANSPORT_LOCAL_SOCKETS"] = "0"
    try:
        with Table.create(KEYS, DIM, node_of_rank=lambda rank: rank) as table:
            table.push(torch.arange(KEYS), torch.ones(KEYS, DIM))
            table.sync()
            return float(table.pull(torch.arange(KEYS)).sum()), ""
    except MismatchError as error:
        return 0.0, str(error)


def test_tables_are_encrypted_and_a_node_without_the_key_is_refused(
    run_processes: RunProcesses, tmp_path: Path
) -> None:
    for name in ("ours", "theirs"):
        create_key(tmp_path / name)
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    for result in run_processes(_count_with_key, 2, files=[ours, ours]):
        assert result.value == (2 * KEYS * DIM, ""), result
    for files in ([ours, theirs], [ours, ""]):
        for rank, result in enumerate(run_processes(_count_with_key, 2, files=files)):
            assert result.ok, result.error
            _, message = result.value
            assert f"and rank {1 - rank} made different" in message
            assert "the key (TORCHRELAY_TRANSPORT_KEY_FILE or TORCHRELAY_TRANSPORT_KEY)" in message


CHECKPOINT_AT, LOST_AT, STEPS = 6, 9, 12


def _gradients(step: int, size: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of the step's 24 keys, whatever the number of ranks is."""
    generator = torch.Generator().manual_seed(step)
    keys = torch.randperm(KEYS, generator=generator)[:24]
    values = torch.randn(24, DIM, generator=generator)
    return keys[rank::size], values[rank::size]


def _train(
    world: World, path: str, first: int, dies: bool
) -> tuple[int, list[list[float]] | tuple[int, ...]]:
    """Trains from step ``first`` on; the step that was reached, and the rows or who was lost."""
    dist.init_process_group("gloo")
    table = Table.create(KEYS, DIM, optimizer=optim.adagrad(0.1), node_of_rank=lambda rank: rank)
    if first:
        load({"table": table}, path)
    step = first
    try:
        for step in range(first, STEPS):
            if step == CHECKPOINT_AT and not first:
                save({"table": table}, path)
            if step == LOST_AT and dies and world.rank == world.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            keys, values = _gradients(step, world.size, world.rank)
            table.intent(keys, table.clock)
            table.push(keys, values)
            table.sync()
            table.advance_clock()
    except PeerLostError as error:
        return step, error.ranks
    rows = torch.empty(KEYS, table.row_length)
    table._worker.pull_rows(torch.arange(KEYS), rows)
    table.sync()
    table.close()
    dist.barrier()
    return step, rows.tolist()


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_training_goes_on_from_the_last_checkpoint_on_another_number_of_nodes(
    before: int, after: int, run_processes: RunProcesses, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    results = run_processes(_train, before, environ=QUICK_TO_NOTICE, path=path, first=0, dies=True)
    for result in results[:-1]:
        assert result.ok, result.error
        assert result.value == (LOST_AT, (before - 1,))
    expected = torch.zeros(KEYS, DIM, requires_grad=True)
    reference = torch.optim.Adagrad([expected], lr=0.1)
    for step in range(STEPS):
        keys, values = _gradients(step, 1, 0)
        expected.grad = torch.zeros(KEYS, DIM).index_add_(0, keys, values)
        reference.step()
    for result in run_processes(_train, after, path=path, first=CHECKPOINT_AT, dies=False):
        assert result.ok, result.error
        step, rows = result.value
        assert step == STEPS - 1
        torch.testing.assert_close(torch.tensor(rows)[:, :DIM], expected.detach())


def _fork_and_go_on(world: World, *, leave: str, nodes: int) -> None:
    held: Any = [
        Table.create(
            8, 2, node_of_rank=lambda rank: rank * nodes // world.size, optimizer=optim.sgd(1.0)
        )
    ]
    held.append(Embedding(8, 2, table=held[0]))
    held.append(held[0].optimizer())
    held[1](torch.tensor([1])).sum().backward()
    held[2].step()
    held[0].advance_clock()
    child = os.fork()
    if child == 0:
        if leave == "close":
            held[0].close()
        else:
            held.clear()
            gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    table, module, optimizer = held
    assert table.clock == 1
    table.sync()
    optimizer.zero_grad()
    module(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert torch.equal(table.pull(torch.tensor([1])), torch.full((1, 2), -2.0))
    table.close()


@pytest.mark.parametrize(
    ("nodes", "leave", "network"),
    [
        (1, "drop", "plain"),
        (2, "close", "plain"),
        (2, "drop", "plain"),
        (2, "drop", "encrypted"),
    ],
)
def test_a_forked_child_leaves_the_table_of_its_parent_alone(
    run_processes: RunProcesses,
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    leave: str,
    network: str,
) -> None:
    if network == "encrypted":
        monkeypatch.setenv("TORCHRELAY_TRANSPORT_KEY", "3a" * 32)
        monkeypatch.setenv("TORCHRELAY_TRANSPORT_LOCAL_SOCKETS", "0")
    for result in run_processes(_fork_and_go_on, 2, leave=leave, nodes=nodes):
        assert result.ok, result.error


def test_a_forked_child_that_ends_leaves_the_table_of_its_parent_alone() -> None:
    script = """if True:
        import os, sys
        from torchrelay.parameters import Table
        table = Table.create(4, 2)
        table.advance_clock()
        child = os.fork()
        if child == 0:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert table.clock == 1 and not table._server.store.dead_workers()
        table.close()
    """
    environ = preloaded.environment(PYTHONWARNINGS="ignore")
    command = [preloaded.python(), "-c", script]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr

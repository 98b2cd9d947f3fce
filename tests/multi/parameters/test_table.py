"""Tables over several processes: nodes of their own, shared nodes, checkpoints onto other numbers
of workers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from torchrelay.checkpoint import load, save
from torchrelay.errors import ArgumentError, CorruptionError, PeerLostError
from torchrelay.parameters import Embedding, IntentLoader, KeyInit, Table, _intents, optim
from torchrelay.world import World

if TYPE_CHECKING:
    from ranks import RunProcesses

KEYS, DIM = 300, 4

LAYOUTS = {
    "a node each": lambda rank: rank,
    "one node": lambda rank: 0,
    "pairs": lambda rank: rank // 2,
}


def integers(seed: int, *shape: int) -> torch.Tensor:
    """Small whole numbers: their float32 sums are exact in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.processes(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pushes_of_all_workers_add_up(world: World, layout: str) -> None:
    with Table.create(KEYS, DIM, node_of_rank=LAYOUTS[layout]) as table:
        assert (table.worker_index, table.workers) == (world.rank, 4)
        expected = torch.zeros(KEYS, DIM)
        for rank in range(4):
            for step in range(10):
                seed = 1000 * rank + step
                keys = torch.randint(KEYS, (50,), generator=torch.Generator().manual_seed(seed))
                values = integers(seed, 50, DIM)
                expected.index_add_(0, keys, values)
                if rank == world.rank:
                    table.push(keys, values, wait=step % 2 == 0)
        table.sync()
        assert torch.equal(table.pull(torch.arange(KEYS)), expected)
        table.sync()


@pytest.mark.processes(2)
@pytest.mark.parametrize("techniques", ["all", "replication_only", "relocation_only"])
def test_a_loader_brings_keys_home(world: World, techniques: str) -> None:
    with Table.create(
        KEYS,
        DIM,
        optimizer=optim.sgd(0.5),
        techniques=techniques,
        node_of_rank=lambda rank: rank,
        apply_gradients="backward",
    ) as table:
        module = Embedding(KEYS, DIM, table=table)
        mine = torch.arange(world.rank * 150, world.rank * 150 + 150)
        batches = [mine[torch.randint(150, (20,))] for _ in range(300)]
        pushed = torch.zeros(KEYS)
        late = None
        for step, keys in enumerate(IntentLoader(batches, lambda batch: batch, table=table)):
            if step == 200:
                late = table.metrics()
            module(keys).sum().backward()
            pushed.index_add_(0, keys, torch.ones(20))
        assert late is not None
        assert (table.metrics() - late).locality > 0.95
        table.sync()
        assert torch.equal(table.pull(mine), (-0.5 * pushed[mine]).unsqueeze(1).expand(-1, DIM))
        table.sync()


@pytest.mark.processes(2)
def test_the_first_step_has_its_keys_too_and_a_local_sample_is_here(world: World) -> None:
    _intents.FIRST_WAIT_S = 60.0  # the process is the test's own
    with Table.create(KEYS, DIM, node_of_rank=lambda rank: rank) as table:
        mine = torch.arange(world.rank * 150, world.rank * 150 + 150)
        assert not table.is_local(mine)
        for keys in IntentLoader([mine] * 3, lambda batch: batch, table=table):
            assert table.is_local(keys)
            table.pull(keys)
        assert table.metrics().remote_pulls == 0
        table.sync()
        with pytest.raises(ArgumentError, match="sampling was not enabled"):
            table.sample(3)
        table.enable_sampling_support("local", seed=world.rank)
        drawn = table.sample(1000)
        assert set(drawn.tolist()) <= set(mine.tolist()) and len(drawn.unique()) > 100
        table.sync()


def _save(world: World, path: str) -> None:
    dist.init_process_group("gloo")
    with Table.create(
        KEYS,
        DIM,
        optimizer=optim.adagrad(0.1),
        node_of_rank=lambda rank: rank,
        apply_gradients="backward",
    ) as table:
        module = Embedding(KEYS, DIM, table=table)
        keys = torch.arange(world.rank, KEYS, world.size)
        (module(keys) * (keys + 1).unsqueeze(1)).sum().backward()
        dcp.save({"table": table.state_dict()}, checkpoint_id=path)
        save({"table": table}, f"{path}-ours")
    dist.barrier()


def _load_by_dcp(table: Table, path: str) -> None:
    state = {"table": table.state_dict()}
    dcp.load(state, checkpoint_id=path)
    table.load_state_dict(state["table"])


def _load_by_ours(table: Table, path: str) -> None:
    load({"table": table}, path)


def _load(world: World, path: str) -> list[list[float]]:
    dist.init_process_group("gloo")
    with Table.create(
        KEYS, DIM, optimizer=optim.adagrad(0.1), node_of_rank=lambda rank: rank
    ) as table:
        found = []
        ways = ((_load_by_dcp, path), (_load_by_ours, path), (_load_by_ours, f"{path}-ours"))
        for load_rows, place in ways:
            table.set(torch.arange(KEYS), torch.zeros(KEYS, DIM))
            table.sync()
            load_rows(table, place)
            found.append(torch.empty(KEYS, table.row_length))
            table._worker.pull_rows(torch.arange(KEYS), found[-1])
            table.sync()
        rows = found[0]
        assert all(torch.equal(one, rows) for one in found)
        if world.size == 1:  # the last that loads it
            file = next(Path(f"{path}-ours").glob("*.safetensors"))
            os.truncate(file, file.stat().st_size - 1)
            with pytest.raises(CorruptionError, match="cut short"):
                _load_by_ours(table, f"{path}-ours")
    dist.barrier()
    return rows.tolist()


def test_save_on_three_nodes_load_on_others(run_processes: RunProcesses, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    for result in run_processes(_save, 3, path=path):
        assert result.ok, result.error
    gradient = torch.arange(1, KEYS + 1).float().unsqueeze(1).expand(-1, DIM)
    for size in (2, 5, 1):
        for result in run_processes(_load, size, path=path):
            assert result.ok, result.error
            rows = torch.tensor(result.value)
            torch.testing.assert_close(rows[:, DIM:], gradient.square())
            torch.testing.assert_close(rows[:, :DIM], torch.full((KEYS, DIM), -0.1))


@pytest.mark.processes(2)
def test_processes_with_one_seed_draw_different_rows(world: World) -> None:
    init = KeyInit("normal", 0.0, 1.0)
    with Table.create(KEYS, DIM, optimizer=optim.sgd(1.0), init=init) as table:
        torch.manual_seed(0)
        Embedding(KEYS, DIM, table=table).reset_parameters()
        assert len(table.pull(torch.arange(KEYS)).unique(dim=0)) == KEYS
        table.sync()


@pytest.mark.processes(2)
def test_a_table_closed_and_made_again_starts_anew(world: World) -> None:
    for round_ in range(3):
        with Table.create(2, DIM, name="again", node_of_rank=lambda rank: rank) as table:
            table.push(torch.tensor([1]), torch.full((1, DIM), float(round_ + 1)))
            table.sync()
            assert torch.equal(
                table.pull(torch.tensor([1])), torch.full((1, DIM), 2.0 * (round_ + 1))
            )
            table.sync()


def _fail_on_rank_1(world: World) -> bool:
    try:
        with Table.create(2, DIM, node_of_rank=lambda rank: rank) as table:
            if world.rank == 1:
                raise KeyError("a mistake in the caller's loop")
            table.sync()
    except (KeyError, PeerLostError):
        return True
    return False


def test_an_error_leaves_the_table_without_waiting(
    run_processes: RunProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHRELAY_TRANSPORT_PEER_TIMEOUT_S", "3")
    results = run_processes(_fail_on_rank_1, 2)
    assert all(result.ok and result.value for result in results), results

"""Processes that ``torch.multiprocessing.spawn`` starts, and models that FSDP1 wraps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ranks import free_port
from torchrelay.parameters import Embedding, Table, optim
from torchrelay.world import World

ROWS, DIM = 6, 2


def spawned(rank: int, port: int, folder: str) -> None:
    """As users write it: no launcher's variables, only the process group."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0), reduction="sum") as table:
        optimizer = table.optimizer()
        Embedding(ROWS, DIM, table=table)(torch.tensor([1, 2 + rank])).sum().backward()
        optimizer.step()
        table.sync()
        torch.save(table.pull(torch.arange(ROWS)), Path(folder) / f"{rank}.pt")
        table.sync()
    dist.destroy_process_group()


@pytest.mark.timeout(400)  # two processes that import torch
def test_spawned_processes_share_a_table(tmp_path: Path) -> None:
    mp.spawn(spawned, args=(free_port(), str(tmp_path)), nprocs=2)
    for rank in range(2):
        rows = torch.load(tmp_path / f"{rank}.pt")
        assert rows[:, 0].tolist() == [0, -2, -1, -1, 0, 0]


@pytest.mark.processes(2)
def test_fsdp1_leaves_tables_alone_or_is_refused(world: World) -> None:
    dist.init_process_group("gloo")
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0), reduction="sum") as table:
        optimizer = table.optimizer()
        rows = Embedding(ROWS, DIM, table=table)
        model: Any = nn.Sequential(rows, nn.Linear(DIM, 1))
        nn.init.ones_(model[1].weight)
        wrapped = FullyShardedDataParallel(
            model, ignored_modules=[rows], device_id=torch.device("cpu")
        )
        wrapped(torch.tensor([1, 2 + world.rank])).sum().backward()
        optimizer.step()
        table.sync()
        assert table.pull(torch.arange(ROWS))[:, 0].tolist() == [0, -2, -1, -1, 0, 0]
        table.sync()

        taken = nn.Sequential(Embedding(ROWS, DIM, table=table), nn.Linear(DIM, 1))
        with pytest.raises(RuntimeError, match=r"unflattened parameter: .*0\.weight.*TableWeight"):
            FullyShardedDataParallel(taken, device_id=torch.device("cpu"))
        table.sync()

"""State dicts and checkpoints of tables on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp

from torchrelay.checkpoint import load, save
from torchrelay.errors import MismatchError
from torchrelay.parameters import Embedding, Table, optim
from torchrelay.world import World

ROWS, DIM = 9, 2


def trained() -> tuple[Any, torch.Tensor]:
    """A model over a table that both processes have trained, and all rows with their optimizer
    state.
    """
    model: Any = nn.Sequential(
        Embedding(ROWS, DIM, optimizer=optim.adagrad(0.1)), nn.Linear(DIM, 1)
    )
    table: Table = model[0].table
    optimizer = table.optimizer()
    model(torch.arange(dist.get_rank(), ROWS, 2)).sum().backward()
    optimizer.step()
    return model, table.rows()


def fresh() -> Embedding:
    return Embedding(ROWS, DIM, optimizer=optim.adagrad(0.1))


@pytest.mark.processes(2)
def test_all_rows_are_saved_and_loaded(world: World, tmp_path: Path) -> None:
    dist.init_process_group("gloo")
    model, rows = trained()
    table = model[0].table

    # Rank 0 saves alone, as it may: all have the same state dict, and none needs the others.
    if world.rank == 0:
        torch.save(model.state_dict(), tmp_path / "alone.pt")
    dist.barrier()
    state = torch.load(tmp_path / "alone.pt", weights_only=True)
    assert torch.equal(state["0.rows"], rows)
    # All make a state dict, rank 0 saves.
    every = model.state_dict()
    if world.rank == 0:
        torch.save(every, tmp_path / "every.pt")
    dist.barrier()
    state = torch.load(tmp_path / "every.pt", weights_only=True)
    other: Any = nn.Sequential(fresh(), nn.Linear(DIM, 1))
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    assert torch.equal(other[0].table.rows(), rows)

    # One process's share is refused by all, whoever got a wrong one.
    share = table.state_dict()
    torch.save(share, tmp_path / f"share{world.rank}.pt")
    dist.barrier()
    first = torch.load(tmp_path / "share0.pt", weights_only=True)
    with pytest.raises(
        MismatchError, match="worker 1 of 2 was given the rows 0 to 3, but loads 4 to 8"
    ):
        other[0].table.load_state_dict(first)
    mine = torch.load(tmp_path / f"share{world.rank}.pt", weights_only=True)
    again = fresh()
    again.table.load_state_dict(mine)
    assert torch.equal(again.table.rows(), rows)

    for module in (model[0], other[0], again):
        module.close()
    dist.barrier()


def _state(module: Embedding, form: str) -> dict[str, Any]:
    module.sharded_state_dict = form == "sharded module"
    return module.table.state_dict() if form == "table" else module.state_dict()


@pytest.mark.processes(2)
def test_distributed_checkpoints(world: World, tmp_path: Path) -> None:
    dist.init_process_group("gloo")
    model, rows = trained()
    other = fresh()
    for form in ("table", "module", "sharded module"):
        path = str(tmp_path / form)
        dcp.async_save(_state(model[0], form), checkpoint_id=path).result()  # type: ignore[union-attr]
        dist.barrier()
        for read in ("table", "module", "sharded module"):
            other.reset_parameters()
            state = _state(other, read)
            dcp.load(state, checkpoint_id=path)
            (other.table if read == "table" else other).load_state_dict(state)
            assert torch.equal(other.table.rows(), rows), (form, read)
            dist.barrier()  # the other process reads all rows too, before they are drawn anew
    model[0].close()
    other.close()
    dist.barrier()


@pytest.mark.processes(4)
def test_checkpoints_of_fewer_rows_than_processes(world: World, tmp_path: Path) -> None:
    dist.init_process_group("gloo")
    with Table.create(3, DIM, optimizer=optim.adagrad(0.1)) as table:
        rows = torch.arange(3.0 * table.row_length).view(3, -1)
        table.load_state_dict({"rows": rows})
        dcp.save({"table": table.state_dict()}, checkpoint_id=str(tmp_path / "dcp"))
        save({"table": table}, tmp_path / "ours")
        for name in ("dcp", "ours"):
            table.load_state_dict({"rows": torch.full_like(rows, -1.0)})
            if name == "dcp":
                state = {"table": table.state_dict()}
                dcp.load(state, checkpoint_id=str(tmp_path / name))
                table.load_state_dict(state["table"])
            else:
                load({"table": table}, tmp_path / name)
            assert torch.equal(table.rows(), rows), name
            dist.barrier()

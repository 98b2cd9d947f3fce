"""Who shares a table, and that all of them describe the same one."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchrelay.errors import ArgumentError, ConfigError, MismatchError
from torchrelay.parameters import KeyInit, Table, optim
from torchrelay.world import World

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
KEYS, DIM = 10, 2


def count_pushes(table: Table) -> float:
    """How many processes have pushed to the table, each its one."""
    with table:
        table.push(torch.tensor([3]), torch.ones(1, DIM))
        table.sync()
        pushes = float(table.pull(torch.tensor([3]))[0, 0])
        table.sync()
    return pushes


@pytest.mark.processes(3)
def test_a_process_group_without_launcher_variables(world: World) -> None:
    """As ``mp.spawn`` starts processes; torchrun's variables come back to see what disagrees."""
    environ = {name: os.environ.pop(name) for name in LAUNCHER}
    address = f"tcp://127.0.0.1:{world.master_port}"
    dist.init_process_group("gloo", init_method=address, rank=world.rank, world_size=3)
    assert count_pushes(Table.create(KEYS, DIM)) == 3
    assert count_pushes(Table.create(KEYS, DIM, node_of_rank=lambda rank: rank)) == 3

    group = dist.new_group([0, 2])
    if world.rank != 1:
        assert count_pushes(Table.create(KEYS, DIM, process_group=group)) == 2
    else:
        with pytest.raises(ArgumentError, match="not in the process group"):
            Table.create(KEYS, DIM, process_group=group)

    os.environ.update(environ, WORLD_SIZE="4")
    with pytest.raises(ConfigError, match=r"of 3 in the default process group, but rank \d of 4"):
        Table.create(KEYS, DIM)
    assert count_pushes(Table.create(KEYS, DIM, process_group=dist.group.WORLD)) == 3
    os.environ.update(environ)
    assert count_pushes(Table.create(KEYS, DIM)) == 3


SGD = optim.sgd(0.5)
DIFFERENT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("float16", {"dtype": torch.float16}, {"dtype": torch.bfloat16}),
    ("dim", {"dim": 2}, {"dim": 3}),
    ("keys", {"num_keys": 10}, {"num_keys": 11}),
    ("sgd", {"optimizer": SGD}, {"optimizer": optim.adagrad(0.5)}),
    ("lr=0.5", {"optimizer": SGD}, {"optimizer": optim.sgd(0.25)}),
    ("weight_decay=0.1", {"optimizer": SGD}, {"optimizer": optim.sgd(0.5, weight_decay=0.1)}),
    ("seed=1", {"init": KeyInit("normal", 0, 1, 0)}, {"init": KeyInit("normal", 0, 1, 1)}),
    ("all", {"techniques": "all"}, {"techniques": "replication_only"}),
    ("backward", {"optimizer": SGD}, {"optimizer": SGD, "apply_gradients": "backward"}),
    ("sum", {"optimizer": SGD, "reduction": "sum"}, {"optimizer": SGD}),
]


@pytest.mark.processes(3)
def test_processes_that_describe_different_tables_all_fail(world: World) -> None:
    dist.init_process_group("gloo")  # its store outlives the tables that fail
    for said, first, last in DIFFERENT:
        for node_of_rank in (None, lambda rank: rank):
            mine = {"num_keys": KEYS, "dim": DIM} | (last if world.rank == 2 else first)
            with pytest.raises(MismatchError, match="made different tables") as caught:
                Table.create(**mine, node_of_rank=node_of_rank)
            assert said in str(caught.value), str(caught.value)
    assert count_pushes(Table.create(KEYS, DIM)) == 3


@pytest.mark.processes(2)
def test_arguments_that_one_rank_has_wrong_are_errors_on_all(world: World) -> None:
    """No rank waits for the one that raises, and the next call is the next on all."""
    dist.init_process_group("gloo")  # its store outlives the tables that fail
    wrong: list[dict[str, Any]] = [
        {"dtype": torch.int8},
        {"optimizer": "adam"},
        {"apply_gradients": "never"},
        {"dim": -1},
    ]
    for arguments in wrong:
        mine = {"dim": 2} | (arguments if world.rank == 1 else {})
        with pytest.raises(ArgumentError if world.rank == 1 else MismatchError):
            Table.create(4, **mine)
    rows = torch.ones(4, 2)
    with Table.create(4, 2) as table:
        states: tuple[Any, ...] = (None, {"weight": [1.0]}, {"weight": rows[:3]})
        for state in states:
            with pytest.raises(MismatchError, match=r"state of a table|must be a dense|weight is"):
                table.load_state_dict(state if world.rank == 1 else {"weight": rows})
        table.load_state_dict({"weight": rows})
        assert torch.equal(table.pull(range(4)), rows)
        table.sync()

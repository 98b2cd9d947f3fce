"""Groups: of some of the ranks, of one, and many."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import torchrelay.aggregation
from multi.aggregation.collectives import (
    groups,
)
from torchrelay.world import World


@pytest.mark.processes(4)
def test_overlapping_subgroups(world: World) -> None:
    with groups(world):
        members = [[0, 1], [1, 2, 3], [0, 2], [3]]
        made = [dist.new_group(ranks, backend="sml") for ranks in members]
        for round_ in range(20):
            for ranks, group in zip(members, made, strict=True):
                if world.rank in ranks:
                    tensor = torch.full((round_ + 1,), float(world.rank))
                    dist.all_reduce(tensor, group=group)
                    assert tensor.eq(sum(ranks)).all()
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            assert tensor.eq(4).all()


@pytest.mark.processes(2, together=True)
def test_many_groups_leave_no_descriptors(world: World) -> None:
    with groups(world):
        dist.barrier()
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(30):
            group = dist.new_group(backend="sml")
            dist.all_reduce(torch.ones(5), group=group, async_op=True).wait()
            dist.isend(torch.ones(3), 1 - world.rank, group=group)
            dist.recv(torch.ones(3), 1 - world.rank, group=group)
            dist.destroy_process_group(group)
            del group
        gc.collect()
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


def test_one_process_is_a_world(world: World) -> None:
    dist.init_process_group("sml", store=world.connect(), rank=0, world_size=1)
    try:
        tensor = torch.arange(5.0)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        out = torch.empty(5)
        dist.all_to_all_single(out, tensor)
        cast(Any, dist.group.WORLD)._reduce_scatter_base(out, tensor).wait()
        gathered = [torch.empty(5)]
        dist.all_gather(gathered, tensor)
        dist.barrier()
        assert (
            torch.equal(tensor, torch.arange(5.0))
            and torch.equal(gathered[0], tensor)
            and torch.equal(out, tensor)
        )
    finally:
        dist.destroy_process_group()


def test_the_backend_is_registered() -> None:
    assert dist.Backend("sml") == "sml"
    torchrelay.aggregation.register()

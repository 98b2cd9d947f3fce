"""Groups: of some of the ranks, of one, and many."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchrelay.aggregation
from multi.aggregation.collectives import (
    groups,
)
from torchrelay.errors import ConfigError
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


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("without_launcher")
@pytest.mark.parametrize("backend", ["sml", "cpu:sml", "cpu:gloo,cuda:sml"])
def test_a_program_without_a_launcher_is_a_world_of_one(backend: str) -> None:
    dist.init_process_group(backend)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        dist.barrier(dist.new_group([0]))
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("without_launcher")
def test_without_a_launcher_only_what_asks_for_sml_is_a_world_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="RANK expected, but not set"):
        dist.init_process_group("gloo")
    with pytest.raises(ValueError, match="WORLD_SIZE expected, but not set"):
        dist.init_process_group("sml", rank=0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ConfigError, match="MASTER_ADDR is set, but RANK"):
        dist.init_process_group("sml")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes were started by Open MPI, but MASTER_PORT"):
        dist.init_process_group("sml")
    assert not dist.is_initialized()


@pytest.mark.processes(2)
def test_the_variables_of_mpirun_and_an_address_make_a_group(world: World) -> None:
    os.environ.update(OMPI_COMM_WORLD_RANK=os.environ.pop("RANK"), OMPI_COMM_WORLD_SIZE="2")
    del os.environ["WORLD_SIZE"]
    dist.init_process_group("sml")
    tensor = torch.full((3,), world.rank + 1.0)
    dist.all_reduce(tensor)
    assert dist.get_rank() == world.rank and tensor.eq(3).all()


def test_the_backend_is_registered() -> None:
    assert dist.Backend("sml") == "sml"
    torchrelay.aggregation.register()

"""Collectives over several hosts: the tests of one host again, with ranks that count as ranks of
different hosts.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import torchrelay.aggregation
from multi.aggregation.collectives import COPIED, DTYPES, FLOATS, VIEWS, ReduceOp, groups, same
from torchrelay import _communicators
from torchrelay._communicators import hosts_of
from torchrelay.world import World

TESTS = Path(__file__).parents[2]


@functools.cache
def load(name: str) -> Any:
    """A test file, by its path below ``tests``."""
    spec = importlib.util.spec_from_file_location(f"hosts_{Path(name).stem}", TESTS / name)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if hasattr(module, "SIZES"):
        module.SIZES = (1, 3001)
    return module


FAULTS = load("faults/aggregation/test_failures.py")
TORCH = load("multi/aggregation/test_torch.py")


def place(world: World, hosts: str) -> None:
    """Put this rank on its host: one letter for each rank. Pieces are small, so that there are
    several.
    """
    os.environ["TORCHRELAY_HOST_ID"] = hosts[world.rank]
    _communicators._CHUNK_BYTES = 4096


Case = tuple[Any, ...]  # a file, its test, and the test's parameters


def run(case: Case, world: World, hosts: str) -> None:
    place(world, hosts)
    file, test, *parameters = case
    getattr(load(f"multi/aggregation/test_{file}.py"), f"test_{test}")(world, *parameters)


def name_of(case: Case) -> str:
    return "-".join(map(str, case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("file", ["all_reduce", "reduce", "reduce_scatter"])
@pytest.mark.processes(4, together=True)
def test_reductions_round_robin(world: World, file: str, dtype: torch.dtype) -> None:
    run((file, "values", dtype), world, "abab")


@pytest.mark.parametrize("dtype", COPIED, ids=str)
@pytest.mark.parametrize("file", ["broadcast", "all_gather", "gather", "scatter", "all_to_all"])
@pytest.mark.processes(4, together=True)
def test_copies_block_wise(world: World, file: str, dtype: torch.dtype) -> None:
    run((file, "values", dtype), world, "aabb")


def test_hosts_are_in_the_order_of_their_lowest_ranks() -> None:
    assert hosts_of(["x", "y", "y", "x", "z"]) == ((0, 3), (1, 2), (4,))


UNEVEN: list[Case] = [
    *[
        (file, "views", name)
        for file in ("all_reduce", "all_gather", "send_recv")
        for name in VIEWS
    ],
    ("all_reduce", "odd_tensors"),
    ("all_gather", "uneven_and_empty_tensors"),
    *[(file, "empty_tensors") for file in ("broadcast", "all_to_all", "reduce_scatter")],
    ("send_recv", "values"),
    ("objects", "objects_and_barriers"),
    ("calls", "sparse_tensors_are_added"),
]


@pytest.mark.parametrize("case", UNEVEN, ids=name_of)
@pytest.mark.processes(3, together=True)
def test_uneven_hosts(world: World, case: Case) -> None:
    run(case, world, "aba")


WITH_GLOO = (torch.float32, torch.float64, torch.int32, torch.int64)
SINGLE: list[Case] = [
    *[("all_reduce", "gloo_gives_the_same", dtype) for dtype in WITH_GLOO],
    ("all_to_all", "gloo_gives_the_same_for_uneven_splits"),
    *[
        (file, "premultiplied_sums", dtype)
        for file in ("all_reduce", "reduce_scatter")
        for dtype in FLOATS
    ],
    ("work", "handles_in_any_order"),
    ("work", "an_async_call_does_not_wait_for_the_others"),
    *[(file, "coalesced") for file in ("all_reduce", "all_gather", "reduce_scatter", "send_recv")],
    ("groups", "many_groups_leave_no_descriptors"),
]


@pytest.mark.parametrize("case", SINGLE, ids=name_of)
@pytest.mark.processes(2, together=True)
def test_one_rank_per_host(world: World, case: Case) -> None:
    run(case, world, "ab")


@pytest.mark.processes(3)
def test_different_calls_raise_on_every_rank(world: World) -> None:
    place(world, "abb")
    FAULTS.test_different_calls_raise_on_every_rank_and_name_the_difference(world)


@pytest.mark.parametrize("how", ["ddp", "fsdp1", "fsdp2", "tensor_parallel"])
@pytest.mark.processes(2)
def test_equals_gloo(world: World, how: str, tmp_path: Path) -> None:
    place(world, "ab")
    TORCH.test_equals_gloo(world, how, tmp_path)


@pytest.mark.processes(4)
def test_large_sums_subgroups_and_statistics(world: World) -> None:
    """On two hosts with three ranks and one: the same bits on all ranks, every time."""
    place(world, "aaba")
    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=4)
    reference = None
    for _ in range(2):
        tensor = torch.randn(60_001, generator=torch.Generator().manual_seed(world.rank))
        dist.all_reduce(tensor)
        copies = [torch.empty_like(tensor) for _ in range(4)]
        dist.all_gather(copies, tensor)
        reference = tensor if reference is None else reference
        assert all(torch.equal(copy, reference) for copy in copies)
    inputs = [
        torch.randn(60_001, generator=torch.Generator().manual_seed(rank)) for rank in range(4)
    ]
    torch.testing.assert_close(reference, sum(inputs), rtol=1e-5, atol=1e-5)

    stats = cast(Any, dist.group.WORLD).stats()
    shm, tcp = stats.links
    assert stats.plane == "hosts" and stats.jobs >= 4
    assert (shm.transport, tcp.transport) == ("shm", "tcp") and "no switch" in tcp.reason
    # Leaders, and those that gather for another host.
    sends = world.rank in (0, 2) or world.rank == 1
    assert not sends or tcp.sent_bytes > 0
    assert tcp.busy_s > 0 or world.rank == 3

    near, far = dist.new_group([0, 3], backend="sml"), dist.new_group([1, 2], backend="sml")
    for group, ranks, name in ((near, (0, 3), "shm"), (far, (1, 2), "hosts")):
        if world.rank in ranks:
            ones = torch.ones(5000)
            works = [dist.all_reduce(ones, group=group, async_op=True) for _ in range(3)]
            works[2].wait()
            assert ones.eq(8).all() and group.stats().plane == name
    assert set(torchrelay.aggregation.stats()) == (
        {"hosts", "shm"} if world.rank in (0, 3) else {"hosts"}
    )

    # c10d gives all of these groups of one rank, of which each rank makes two, one name and store.
    outer, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    inner, _ = dist.new_subgroups(group_size=1, group=outer)
    ones = torch.ones(1000)
    dist.all_reduce(ones, group=inner)
    dist.all_reduce(ones, group=outer)
    assert ones.eq(2).all()


@pytest.mark.parametrize("hosts", ["abab", "aaba"])
@pytest.mark.processes(4, together=True)
def test_averages_of_float16_do_not_overflow(world: World, hosts: str) -> None:
    place(world, hosts)
    with groups(world):
        for size in (1, 3001):
            generator = torch.Generator().manual_seed(7)
            inputs = (torch.rand(4, 4 * size, generator=generator) * 60_000).half()
            want = inputs.double().mean(0)
            whole, on_root = inputs[world.rank].clone(), inputs[world.rank].clone()
            dist.all_reduce(whole, ReduceOp.AVG)
            dist.reduce(on_root, 3, ReduceOp.AVG)
            part = torch.empty(size, dtype=torch.float16)
            dist.reduce_scatter_tensor(part, inputs[world.rank].clone(), ReduceOp.AVG)
            own = want.chunk(4)[world.rank]
            torch.testing.assert_close(whole.double(), want, rtol=2**-10, atol=0)
            torch.testing.assert_close(part.double(), own, rtol=2**-10, atol=0)
            assert same(on_root, whole if world.rank == 3 else inputs[world.rank])
            copies = [torch.empty_like(whole) for _ in range(4)]
            dist.all_gather(copies, whole)
            assert all(same(copy, whole) for copy in copies)


@pytest.mark.processes(3)
def test_views_of_one_element_and_of_none(world: World) -> None:
    """Contiguous tensors whose strides are not those of a new one."""
    place(world, "aab")
    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=3)
    rank, to, source = world.rank, (world.rank + 1) % 3, (world.rank + 2) % 3
    for rows in (1, 0):
        mine = torch.full((rows, 5), float(rank))[:, 0]
        dist.all_reduce(mine)
        assert mine.eq(3).all()
        dist.broadcast(mine.fill_(rank), 1)
        assert mine.eq(1).all()
        parts = [torch.zeros(rows, 5)[:, 0] for _ in range(3)]
        dist.all_gather(parts, mine.fill_(rank))
        dist.all_to_all(parts, [part.clone() for part in parts])
        assert all(part.eq(rank).all() for part in parts)
        dist.reduce_scatter(mine, parts)
        assert mine.eq(3).all()
        arriving = torch.zeros(rows, 5)[:, 0]
        sending = dist.isend(mine.fill_(rank), to)
        dist.recv(arriving, source)
        assert sending is not None
        sending.wait()
        assert arriving.eq(source).all()

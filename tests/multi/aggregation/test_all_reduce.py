"""all_reduce, alone and coalesced."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.distributed as dist

from multi.aggregation.collectives import (
    DTYPES,
    FLOATS,
    GRID,
    SIZES,
    VIEWS,
    ReduceOp,
    check,
    expected,
    groups,
    like_view,
    make,
    ops_of,
)
from torchrelay.aggregation import SmlGroup
from torchrelay.errors import ArgumentError, UnsupportedError
from torchrelay.world import World


@pytest.mark.processes(3, together=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(world: World, dtype: torch.dtype) -> None:
    with groups(world):
        for op in ops_of(dtype):
            for size in SIZES:
                inputs = [make(r, size, dtype) for r in range(world.size)]
                mine = inputs[world.rank].clone()
                dist.all_reduce(mine, op)
                check(mine, expected(op, inputs), (op, size))


@pytest.mark.processes(2, together=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64], ids=str)
def test_gloo_gives_the_same(world: World, dtype: torch.dtype) -> None:
    with groups(world) as gloo:
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
            for size in (5, 70_000):
                ours, theirs = make(world.rank, size, dtype), make(world.rank, size, dtype)
                dist.all_reduce(ours, op)
                dist.all_reduce(theirs, op, group=gloo)
                assert torch.equal(ours, theirs), (op, size)


@pytest.mark.processes(3, together=True)
@pytest.mark.parametrize("name", VIEWS)
def test_views(world: World, name: str) -> None:
    with groups(world):
        view, n = VIEWS[name], world.size
        mine = like_view(GRID * (world.rank + 1), view)
        dist.all_reduce(mine)
        assert torch.equal(mine, view * (n * (n + 1) // 2))
        mine = like_view(GRID * (world.rank + 1), view)
        work = dist.all_reduce(mine, async_op=True)
        work.wait()
        assert torch.equal(mine, view * 6)


@pytest.mark.processes(3, together=True)
@pytest.mark.parametrize("size", [1, 1_000, 700_000])
def test_a_sum_into_another_tensor(world: World, size: int) -> None:
    with groups(world):
        host = cast(SmlGroup, dist.group.WORLD).host
        assert host is not None
        inputs = [make(r, size, torch.float32) for r in range(world.size)]
        source, output = inputs[world.rank].clone(), torch.empty(size)
        assert host.sum_now(output, source)
        check(output, expected(ReduceOp.SUM, inputs), size)
        assert torch.equal(source, inputs[world.rank])
        assert host.sum_now(source, source)
        assert torch.equal(source, output)
        assert size == 1 or host.sum_now(output, torch.zeros(size, 2)[:, 0]) is None


@pytest.mark.processes(3, together=True)
def test_odd_tensors(world: World) -> None:
    with groups(world):
        zero_dim = torch.tensor(float(world.rank))
        dist.all_reduce(zero_dim)
        assert zero_dim.shape == () and zero_dim == 3
        dist.all_reduce(torch.empty(0, 5))
        leaf = torch.ones(3, requires_grad=True)
        with torch.no_grad():
            dist.all_reduce(leaf)
        assert leaf.eq(3).all()


@pytest.mark.processes(2, together=True)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_premultiplied_sums(world: World, dtype: torch.dtype) -> None:
    with groups(world):
        mine = torch.full((7,), 2.0, dtype=dtype)
        dist.all_reduce(mine, dist._make_nccl_premul_sum(0.5 + world.rank))
        assert mine.eq(2 * 0.5 + 2 * 1.5).all()


@pytest.mark.processes(2, together=True)
def test_coalesced(world: World) -> None:
    with groups(world):
        tensors = [torch.full((k,), float(world.rank)) for k in (3, 40_000, 1)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        assert all(t.eq(1).all() for t in tensors)


@pytest.mark.processes(2, together=True)
def test_results_are_the_same_bits_on_all_ranks_and_every_time(world: World) -> None:
    with groups(world):
        for size in (100, 100_003):
            for dtype in FLOATS:
                first = None
                for _ in range(3):
                    tensor = torch.randn(
                        size, generator=torch.Generator().manual_seed(world.rank)
                    ).to(dtype)
                    dist.all_reduce(tensor)
                    copies = [torch.empty_like(tensor) for _ in range(2)]
                    dist.all_gather(copies, tensor)
                    assert torch.equal(*copies)
                    first = tensor if first is None else first
                    assert torch.equal(tensor, first)


@pytest.mark.processes(2, together=True)
def test_wrong_arguments_fail_before_anything_is_sent(world: World) -> None:
    with groups(world):
        with pytest.raises(ArgumentError, match="integer"):
            dist.all_reduce(torch.ones(2), ReduceOp.BAND)
        with pytest.raises(ArgumentError, match=r"torch\.bool"):
            dist.all_reduce(torch.ones(2, dtype=torch.bool), ReduceOp.AVG)
        with pytest.raises(UnsupportedError, match="float8"):
            dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))
        op = dist._make_nccl_premul_sum(0.5 + world.rank)
        with pytest.raises(ArgumentError, match="floating"):
            dist.all_reduce(torch.ones(2, dtype=torch.int32), op)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.eq(2).all()

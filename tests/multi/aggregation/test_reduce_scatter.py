"""reduce_scatter, of a list and of a tensor, alone and coalesced."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from multi.aggregation.collectives import (
    DTYPES,
    FLOATS,
    SIZES,
    check,
    expected,
    groups,
    make,
    ops_of,
)
from torchrelay.world import World


@pytest.mark.processes(3, together=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(world: World, dtype: torch.dtype) -> None:
    with groups(world):
        n, me = world.size, world.rank
        for op in ops_of(dtype):
            for size in SIZES:
                blocks = [[make(r * 100 + b, size, dtype) for b in range(n)] for r in range(n)]
                want = expected(op, [blocks[r][me] for r in range(n)])
                out = torch.empty(size, dtype=dtype)
                dist.reduce_scatter(out, [b.clone() for b in blocks[me]], op)
                check(out, want, ("list", op, size))
                out = torch.empty(size, dtype=dtype)
                dist.reduce_scatter_tensor(out, torch.cat(blocks[me]), op)
                check(out, want, ("tensor", op, size))


@pytest.mark.processes(3, together=True)
def test_empty_tensors(world: World) -> None:
    with groups(world):
        dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0))


@pytest.mark.processes(2, together=True)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_premultiplied_sums(world: World, dtype: torch.dtype) -> None:
    with groups(world):
        source = torch.full((14,), 2.0, dtype=dtype)
        out = torch.empty(7, dtype=dtype)
        dist.reduce_scatter_tensor(out, source, dist._make_nccl_premul_sum(0.5 + world.rank))
        assert out.eq(4).all() and source.eq(2).all()


@pytest.mark.processes(2, together=True)
def test_coalesced(world: World) -> None:
    with groups(world):
        outs = [torch.empty(k) for k in (3, 5)]
        with dist._coalescing_manager():
            for out in outs:
                dist.reduce_scatter_tensor(out, torch.ones(world.size * out.numel()))
        assert all(out.eq(world.size).all() for out in outs)

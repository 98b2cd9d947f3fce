"""all_gather, into a list and into a tensor, alone and coalesced."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from multi.aggregation.collectives import (
    COPIED,
    GRID,
    SIZES,
    VIEWS,
    copied_inputs,
    groups,
    like_view,
    same,
)
from torchrelay.errors import ArgumentError
from torchrelay.world import World


@pytest.mark.processes(3, together=True)
@pytest.mark.parametrize("dtype", COPIED, ids=str)
def test_values(world: World, dtype: torch.dtype) -> None:
    with groups(world):
        n, me = world.size, world.rank
        for size in SIZES:
            inputs = copied_inputs(world, size, dtype)
            outs = [torch.zeros(size, dtype=dtype) for _ in range(n)]
            dist.all_gather(outs, inputs[me])
            assert all(map(same, outs, inputs))
            whole = torch.zeros(n * size, dtype=dtype)
            dist.all_gather_into_tensor(whole, inputs[me])
            assert all(map(same, whole.chunk(n), inputs))


@pytest.mark.processes(3, together=True)
@pytest.mark.parametrize("name", VIEWS)
def test_views(world: World, name: str) -> None:
    with groups(world):
        view = VIEWS[name]
        outs = [like_view(torch.zeros(GRID.shape), view) for _ in range(world.size)]
        dist.all_gather(outs, (view * (world.rank + 1)))
        assert all(torch.equal(o, view * (r + 1)) for r, o in enumerate(outs))


@pytest.mark.processes(3, together=True)
def test_uneven_and_empty_tensors(world: World) -> None:
    with groups(world):
        n, me = world.size, world.rank
        dist.all_gather([torch.empty(0, 5) for _ in range(n)], torch.empty(0, 5))
        uneven = [torch.zeros(r + 1) for r in range(n)]
        dist.all_gather(uneven, torch.full((me + 1,), float(me)))
        assert all(t.eq(r).all() for r, t in enumerate(uneven))


@pytest.mark.processes(2, together=True)
def test_coalesced(world: World) -> None:
    with groups(world):
        n, me = world.size, world.rank
        outs = [torch.empty(n * k) for k in (3, 5)]
        with dist._coalescing_manager():
            for out, k in zip(outs, (3, 5), strict=True):
                dist.all_gather_into_tensor(out, torch.full((k,), float(me)))
        assert all(c.eq(r).all() for out in outs for r, c in enumerate(out.chunk(n)))
        rows = [[torch.empty(2), torch.empty(3)] for _ in range(n)]
        cast(Any, dist.group.WORLD).allgather_coalesced(
            rows, [torch.full((2,), float(me)), torch.full((3,), 10.0 + me)]
        ).wait()
        assert all(a.eq(r).all() and b.eq(10 + r).all() for r, (a, b) in enumerate(rows))


@pytest.mark.processes(2, together=True)
def test_wrong_arguments_fail_before_anything_is_sent(world: World) -> None:
    with groups(world):
        group: Any = dist.group.WORLD
        with pytest.raises(ArgumentError, match="one dtype"):
            group._allgather_base(torch.empty(4), torch.ones(2, dtype=torch.int32))
        with pytest.raises(ArgumentError, match="2 ranks"):
            group._allgather_base(torch.empty(5), torch.ones(2))
        dist.barrier()

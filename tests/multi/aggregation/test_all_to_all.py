"""all_to_all, of lists and of tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from multi.aggregation.collectives import (
    COPIED,
    SIZES,
    copied_inputs,
    groups,
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
            dist.all_to_all(outs, list(inputs))
            assert all(same(o, inputs[me]) for o in outs)
            whole = torch.zeros(n * size, dtype=dtype)
            dist.all_to_all_single(
                whole, torch.cat([i.view(torch.uint8) for i in inputs]).view(dtype)
            )
            assert all(same(o, inputs[me]) for o in whole.chunk(n))


@pytest.mark.processes(2, together=True)
def test_gloo_gives_the_same_for_uneven_splits(world: World) -> None:
    with groups(world) as gloo:
        splits = [[1, 4], [2, 3]]
        sent = torch.arange(5 * 6.0).view(5, 6) + 100 * world.rank
        took = [row[world.rank] for row in splits]
        outs = [torch.zeros(sum(took), 6) for _ in range(2)]
        for out, group in zip(outs, (None, gloo), strict=True):
            dist.all_to_all_single(out, sent, took, splits[world.rank], group=group)
        assert torch.equal(*outs)


@pytest.mark.processes(3, together=True)
def test_empty_tensors(world: World) -> None:
    with groups(world):
        dist.all_to_all_single(torch.empty(0), torch.empty(0))


@pytest.mark.processes(2, together=True)
def test_wrong_arguments_fail_before_anything_is_sent(world: World) -> None:
    with groups(world):
        with pytest.raises(ArgumentError, match="splits"):
            dist.all_to_all_single(torch.empty(4), torch.ones(4), [1, 2], [2, 2])
        with pytest.raises(ArgumentError, match="the output is a scalar"):
            dist.all_to_all_single(torch.tensor(0.0), torch.tensor(1.0))
        dist.barrier()

"""broadcast."""

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
from torchrelay.errors import UnsupportedError
from torchrelay.world import World


@pytest.mark.processes(3, together=True)
@pytest.mark.parametrize("dtype", COPIED, ids=str)
def test_values(world: World, dtype: torch.dtype) -> None:
    with groups(world):
        for size in SIZES:
            inputs = copied_inputs(world, size, dtype)
            mine = inputs[world.rank].clone()
            dist.broadcast(mine, 2)
            assert same(mine, inputs[2])


@pytest.mark.processes(3, together=True)
def test_empty_tensors(world: World) -> None:
    with groups(world):
        dist.broadcast(torch.empty(0, 5), 1)


@pytest.mark.processes(2, together=True)
def test_wrong_arguments_fail_before_anything_is_sent(world: World) -> None:
    with groups(world):
        with pytest.raises(UnsupportedError, match="dense"):
            dist.broadcast(torch.eye(2).to_sparse(), 0)
        dist.barrier()

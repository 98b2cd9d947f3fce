"""gather."""

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
from torchrelay.world import World


@pytest.mark.processes(3, together=True)
@pytest.mark.parametrize("dtype", COPIED, ids=str)
def test_values(world: World, dtype: torch.dtype) -> None:
    with groups(world):
        n, me = world.size, world.rank
        for size in SIZES:
            inputs = copied_inputs(world, size, dtype)
            outs = [torch.zeros(size, dtype=dtype) for _ in range(n)]
            dist.gather(inputs[me], outs if me == 1 else None, dst=1)
            assert me != 1 or all(map(same, outs, inputs))

"""scatter."""

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
        for size in SIZES:
            inputs = copied_inputs(world, size, dtype)
            out = torch.zeros(size, dtype=dtype)
            dist.scatter(out, list(inputs) if world.rank == 0 else None, src=0)
            assert same(out, inputs[world.rank])

"""reduce."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from multi.aggregation.collectives import (
    DTYPES,
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
        for op in ops_of(dtype):
            for size in SIZES:
                inputs = [make(r, size, dtype) for r in range(world.size)]
                mine = inputs[world.rank].clone()
                dist.reduce(mine, 1, op)
                want = expected(op, inputs) if world.rank == 1 else inputs[world.rank]
                check(mine, want, (op, size))

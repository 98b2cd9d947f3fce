"""Collectives of objects, and barriers."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch.distributed as dist

from multi.aggregation.collectives import (
    groups,
)
from torchrelay.world import World


@pytest.mark.processes(3, together=True)
def test_objects_and_barriers(world: World) -> None:
    with groups(world):
        n, me = world.size, world.rank
        gathered: list[Any] = [None] * n
        dist.all_gather_object(gathered, {"rank": me, "blob": "x" * (me * 1000)})
        assert [g["rank"] for g in gathered] == [0, 1, 2]
        objects = [me, "text", None] if me == 1 else [None] * 3
        dist.broadcast_object_list(objects, src=1)
        assert objects == [1, "text", None]
        into = [None]
        dist.scatter_object_list(into, ["a", "b", "c"] if me == 0 else None, src=0)
        assert into == ["abc"[me]]
        collected: list[Any] | None = [None] * n if me == 2 else None
        dist.gather_object(me * 2, collected, dst=2)
        assert me != 2 or collected == [0, 2, 4]
        dist.barrier()
        dist.barrier(async_op=True).wait()
        cast(Any, dist.group.WORLD).monitored_barrier()

"""send, recv, isend, irecv and batches of them."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from multi.aggregation.collectives import (
    GRID,
    VIEWS,
    groups,
    like_view,
)
from torchrelay.errors import ArgumentError
from torchrelay.world import World


@pytest.mark.processes(3, together=True)
def test_values(world: World) -> None:
    with groups(world):
        n, me = world.size, world.rank
        for size in (0, 1, 1000, 300_000):
            got = torch.empty(size)
            works: list[Any] = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, torch.full((size,), float(me)), (me + 1) % n),
                    dist.P2POp(dist.irecv, got, (me - 1) % n),
                ]
            )
            for work in works:
                work.wait()
            assert got.eq((me - 1) % n).all()
        # Everybody sends first: a blocking send would never return.
        works = [
            dist.isend(torch.full((200_000,), float(me)), peer, tag=7)
            for peer in range(n)
            if peer != me
        ]
        for peer in reversed([r for r in range(n) if r != me]):
            got = torch.empty(200_000)
            assert dist.recv(got, peer, tag=7) == peer
            assert got.eq(peer).all()
        for work in works:
            work.wait()
        if me == 0:
            seen = set()
            for _ in range(n - 1):
                got = torch.empty(2, dtype=torch.int64)
                seen.add(dist.recv(got))
            assert seen == {1, 2}
        else:
            dist.send(torch.tensor([me, me]), 0)
        if me == 1:
            dist.send_object_list([{"a": 1}, "b"], 2)
        if me == 2:
            objects = [None, None]
            dist.recv_object_list(objects, 1)
            assert objects == [{"a": 1}, "b"]


@pytest.mark.processes(3, together=True)
@pytest.mark.parametrize("name", VIEWS)
def test_views(world: World, name: str) -> None:
    with groups(world):
        n, me, view = world.size, world.rank, VIEWS[name]
        got = like_view(torch.zeros(GRID.shape), view)
        peer, source = (me + 1) % n, (me - 1) % n
        works: list[Any] = [dist.isend(view * (me + 1), peer), dist.irecv(got, source)]
        for work in works:
            work.wait()
        assert torch.equal(got, view * (source + 1))


@pytest.mark.processes(2, together=True)
def test_coalesced(world: World) -> None:
    with groups(world):
        me = world.rank
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            got = torch.empty(4)
            dist.isend(torch.full((4,), float(me)), 1 - me)
            dist.irecv(got, 1 - me)
        manager.wait()
        assert got.eq(1 - me).all()


@pytest.mark.processes(2, together=True)
def test_wrong_arguments_fail_before_anything_is_sent(world: World) -> None:
    with groups(world):
        with pytest.raises(ArgumentError, match="tag"):
            cast(Any, dist.group.WORLD).send([torch.ones(2)], 1 - world.rank, -1)
        dist.barrier()

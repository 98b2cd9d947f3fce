"""Ranks that are threads of one process, each with groups of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchrelay.aggregation import all_reduce_, get_reconfigure_handle, reconfigure
from torchrelay.errors import PeerLostError
from torchrelay.world import World

SIZE = 3


@pytest.mark.processes(1)
def test_ranks_that_are_threads(world: World) -> None:
    from torch.testing._internal.distributed import multi_threaded_pg

    multi_threaded_pg._install_threaded_pg()  # c10d's world becomes each thread's own
    c10d: Any = torch._C._distributed_c10d
    c10d._set_thread_isolation_mode(True)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(SIZE) as pool:
        ranks = [pool.submit(_rank, rank, server.port) for rank in range(SIZE)]
        for each in ranks:
            each.result(60)


def _rank(rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("sml", store=store, rank=rank, world_size=SIZE)
    _use(rank)
    pair = dist.new_group([0, 2], backend="sml")
    if rank != 1:
        tensor = torch.full((4,), float(rank))
        dist.broadcast(tensor, 2, group=pair)
        assert tensor.eq(2).all()
    group: Any = dist.group.WORLD
    store.set(f"handle {rank}", get_reconfigure_handle(group))
    handles = [store.get(f"handle {each}").decode() for each in (2, 1, 0)]
    reconfigure(group, 1, handles, 60)
    assert dist.get_rank() == 2 - rank
    _use(dist.get_rank())
    if rank == 1:
        group.abort()
    else:
        with pytest.raises(PeerLostError):
            group.allreduce([torch.ones(3)]).wait(timedelta(seconds=60))
    reconfigure(group, 2, handles, 60)
    _use(dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()


def _use(rank: int) -> None:
    """Sums by all ways, in one step and in blocks; and other calls."""
    from torch.distributed import _functional_collectives as functional

    for count in (4, 300_000):
        tensor = torch.full((count,), rank + 1.0)
        dist.all_reduce(tensor)
        assert tensor.eq(6).all()
        dist.all_reduce(tensor, async_op=True).wait()
        assert all_reduce_(tensor).eq(54).all()
    total = functional.all_reduce(torch.full((3,), rank + 1.0), "sum", dist.group.WORLD)  # type: ignore[arg-type]
    assert functional.wait_tensor(total).eq(6).all()
    objects: list[object] = [None] * SIZE
    dist.all_gather_object(objects, rank)
    assert objects == list(range(SIZE))
    received = torch.empty(2)
    works = [
        dist.irecv(received, group_src=(rank - 1) % SIZE),
        dist.isend(torch.full((2,), float(rank)), group_dst=(rank + 1) % SIZE),
    ]
    for work in works:
        work.wait()  # type: ignore[union-attr]
    assert received.eq((rank - 1) % SIZE).all()

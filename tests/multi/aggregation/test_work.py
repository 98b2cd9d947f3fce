"""Handles of calls in progress."""

from __future__ import annotations

import weakref
from typing import cast

import pytest
import torch
import torch.distributed as dist

from multi.aggregation.collectives import (
    groups,
)
from torchrelay.world import World


@pytest.mark.processes(2, together=True)
def test_handles_in_any_order(world: World) -> None:
    with groups(world):
        tensors = [
            torch.full((size,), float(world.rank + 1)) for size in (10, 300_000, 1, 50_000) * 5
        ]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        last = torch.ones(4)
        dist.all_reduce(last)  # comes after those in progress
        for i in (7, 0, 19, 3):
            works[i].wait()
            works[i].wait()
            assert works[i].is_completed() and works[i].is_success() and tensors[i].eq(3).all()
        assert [t.shape for t in works[5].result()] == [tensors[5].shape]
        future = works[6].get_future()
        assert torch.equal(future.wait()[0], tensors[6])
        assert all(w.is_completed() for w in works)  # `last` was the last
        assert all(t.eq(3).all() for t in tensors)
        dropped = torch.ones(1_000_000)
        del works
        dist.all_reduce(torch.ones(1_000_000), async_op=True)  # nobody keeps tensor or Work
        dist.all_reduce(dropped)
        assert dropped.eq(2).all()


@pytest.mark.processes(2, together=True)
def test_results_reach_inference_tensors_outside_inference_mode(world: World) -> None:
    with groups(world):
        with torch.inference_mode():
            first, second = torch.ones(3, 4).t(), torch.ones(3, 4).t()
            works = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]
        works[0].wait()
        works[1].get_future().wait()
        assert first.eq(2).all() and second.eq(2).all()


@pytest.mark.processes(2, together=True)
def test_an_async_call_does_not_wait_for_the_others(world: World) -> None:
    with groups(world):
        store = dist.distributed_c10d._get_default_store()
        tensor = torch.ones(100_000)
        if world.rank == 0:
            work = dist.all_reduce(tensor, async_op=True)
            assert not work.is_completed()
            store.set("called", "")
        else:
            store.wait(["called"])
            work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert tensor.eq(2).all()


@pytest.mark.processes(2, together=True)
def test_a_receive_in_progress_does_not_keep_the_tensors_of_later_calls(world: World) -> None:
    with groups(world):
        message, peer = torch.zeros(1), 1 - world.rank
        receiving = cast(dist.Work, dist.irecv(message, peer))
        tensors = []
        for _ in range(20):
            tensor = torch.ones(10)
            cast(dist.Work, dist.all_reduce(tensor, async_op=True)).wait()
            tensors.append(weakref.ref(tensor))
        assert sum(tensor() is not None for tensor in tensors) <= 3
        dist.send(torch.ones(1), peer)
        receiving.wait()
        assert message.eq(1).all()

"""The profiler and dispatch modes see collectives of ``sml`` as they see Gloo's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import torchrelay.aggregation
from torchrelay.world import World

ops = torch.ops.c10d


def calls(world: World) -> dict[str, Callable[[], object]]:
    """Each operator of c10d, and a call that is one."""
    me, peer = world.rank, 1 - world.rank
    one, two = torch.ones(4), [torch.ones(4), torch.ones(4)]
    return {
        "allreduce_": lambda: dist.all_reduce(one),
        "broadcast_": lambda: dist.broadcast(one, 1),
        "reduce_": lambda: dist.reduce(one, 0),
        "allgather_": lambda: dist.all_gather(two, one),
        "_allgather_base_": lambda: dist.all_gather_into_tensor(torch.empty(8), one),
        "gather_": lambda: dist.gather(one, two if me == 0 else None, 0),
        "scatter_": lambda: dist.scatter(one, two if me == 0 else None, 0),
        "reduce_scatter_": lambda: dist.reduce_scatter(one, two),
        "_reduce_scatter_base_": lambda: dist.reduce_scatter_tensor(one, torch.ones(8)),
        "alltoall_": lambda: dist.all_to_all(two, [one, one]),
        "alltoall_base_": lambda: dist.all_to_all_single(torch.empty(4), one),
        "barrier": dist.barrier,
        "send": lambda: dist.isend(one, peer).wait(),  # type: ignore[union-attr]
        "recv_": lambda: dist.irecv(torch.empty(4), peer).wait(),  # type: ignore[union-attr]
    }


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "c10d":
            self.names.append(func._schema.name.removeprefix("c10d::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.processes(2)
def test_modes_and_the_profiler_see_every_collective(world: World) -> None:
    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=2)
    made = calls(world)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for call in made.values():
            call()
    events = {event.key for event in profiled.key_averages()}
    assert {f"c10d::{name}" for name in made} <= events
    assert {"sml:all_reduce", "sml:send", "sml:barrier", "sml:all_to_all"} <= events
    with Seen() as seen, Seen() as inner:
        for name, call in made.items():
            call()
            assert seen.names[-1:] == inner.names[-1:] == [name]
    assert len(seen.names) == len(made)
    with CommDebugMode() as debug:
        tensor = torch.full((3,), 1.0 + world.rank)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.broadcast(tensor, 0)
        torch.distributed._functional_collectives.all_reduce(tensor, "sum", dist.group.WORLD)  # type: ignore[arg-type]
    assert tensor.eq(6).all()
    counts = debug.get_comm_counts()
    assert (
        counts[ops.allreduce_] == 2
        and counts[ops.broadcast_] == 1
        and debug.get_total_counts() == 4
    )
    before = len(seen.names)
    dist.all_reduce(tensor)
    assert tensor.eq(12).all() and len(seen.names) == before


@pytest.mark.processes(2)
def test_tools_see_ddp_and_change_nothing(world: World) -> None:
    """Gradients with and without tools are equal, and equal to Gloo's; DDP's reduction is seen in
    backward.
    """
    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=2)
    gradients = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        for watch in (False, True):
            torch.manual_seed(0)
            module = torch.nn.parallel.DistributedDataParallel(
                torch.nn.Linear(5, 3), process_group=group
            )
            inputs = torch.arange(10.0).view(2, 5) * (world.rank + 1)
            if watch:
                with (
                    CommDebugMode() as debug,
                    profile(activities=[ProfilerActivity.CPU]) as profiled,
                ):
                    module(inputs).square().sum().backward()
                assert debug.get_comm_counts()[ops.allreduce_] == 1
                assert "c10d::allreduce_" in {event.key for event in profiled.key_averages()}
            else:
                module(inputs).square().sum().backward()
            gradients.append(module.module.weight.grad)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients[1:])


@pytest.mark.processes(2)
def test_fake_tensors_are_not_sent(world: World) -> None:
    """As over Gloo: under a fake tensor mode, nothing is communicated."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=2)
    before = torchrelay.aggregation.stats()["shm"].jobs
    with FakeTensorMode():
        fake = torch.ones(4)
        dist.all_reduce(fake)
        dist.broadcast(fake, 1, async_op=True).wait()
    assert torchrelay.aggregation.stats()["shm"].jobs == before
    dist.barrier()

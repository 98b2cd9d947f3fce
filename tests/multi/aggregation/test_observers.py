"""What torch attaches to a group: hooks, recorder, checks; and groups made from a group."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchrelay._torch import has_python_backends
from torchrelay.aggregation import SmlGroup, all_reduce_, get_reconfigure_handle
from torchrelay.errors import OperationTimeoutError, UnsupportedError
from torchrelay.world import World

pytestmark = pytest.mark.skipif(not has_python_backends(), reason="since torch 2.14")
c10d: Any = torch._C._distributed_c10d
CPU = torch.device("cpu")


def start(world: World, **options: Any) -> Any:
    store = world.connect(60)
    dist.init_process_group("sml", store=store, rank=world.rank, world_size=world.size, **options)
    return dist.group.WORLD


@pytest.mark.processes(2, together=True)
def test_hooks_run_before_and_after_every_call(world: World) -> None:
    group = start(world)
    tensor, parts = torch.ones(4), [torch.ones(4), torch.ones(4)]
    calls: dict[str, Callable[[], Any]] = {
        "ALLREDUCE": lambda: dist.all_reduce(tensor),
        "BROADCAST": lambda: dist.broadcast(tensor, 1, async_op=True),
        "ALLGATHER": lambda: dist.all_gather(parts, tensor),
        "REDUCE_SCATTER": lambda: dist.reduce_scatter(tensor, parts),
        "BARRIER": dist.barrier,
    }
    before: list[Any] = []
    after: list[Any] = []
    group.register_pre_hook(1, before.append)
    group.register_post_hook(2, after.append)
    for call in calls.values():
        work = call()
        assert work is None or (work.wait() and work.is_completed() and work.is_success())
    assert [each.name.name for each in before] == [each.name.name for each in after] == [*calls]
    assert [each.op_id for each in before] == [each.op_id for each in after]
    assert all(each.input_tensors[0].data_ptr() == tensor.data_ptr() for each in before[:2])
    other = dist.new_group(backend="sml")
    group.register_pre_hook(3, lambda _: dist.broadcast(torch.ones(2), 0, group=other))
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait() and work.result()[0].data_ptr() == tensor.data_ptr()
    group.unregister_pre_hook(3)
    del before[len(calls) :], after[len(calls) :]
    group.unregister_pre_hook(1)
    group.unregister_post_hook(2)
    dist.all_reduce(tensor)
    assert len(before) == len(after) == len(calls)
    with pytest.raises(UnsupportedError, match="WorkInfo"):
        group._register_on_completion_hook(print)


def recorded() -> list[str]:
    dump = json.loads(c10d._dump_fr_trace_json(backend="sml"))
    return [entry["profiling_name"] for entry in dump.get("entries", [])]


@pytest.mark.skipif(torch.__version__ < "2.15", reason="attached by torch since 2.15")
@pytest.mark.processes(2)
def test_the_flight_recorder(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without being asked for, it does not see blocking sums of one plain tensor."""
    start(world)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    dist.broadcast(tensor, 0)
    seen = ["sml:all_reduce", "sml:all_reduce", "sml:broadcast"]
    assert recorded() == seen
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    group = dist.new_group(backend="sml")
    dist.all_reduce(tensor, group=group)
    assert recorded() == [*seen, "sml:all_reduce"]


@pytest.mark.processes(2, together=True)
def test_numbers_are_checked(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DIST_NAN_CHECK", "1")
        start(world)
    dist.all_reduce(torch.ones(3))
    with pytest.raises(RuntimeError, match="NaN"):
        dist.all_reduce(torch.tensor([1.0, float("nan")]))


@pytest.mark.processes(2, together=True)
def test_calls_are_compared_in_detail(world: World) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        start(world)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    tensor = torch.ones(3)
    for call in (dist.all_reduce, lambda each: dist.all_reduce(each, async_op=True).wait()):
        call(tensor)
    assert tensor.eq(4).all()
    with pytest.raises(RuntimeError, match="mismatch"):
        dist.all_reduce(torch.ones(3 + world.rank))
    with pytest.raises(UnsupportedError, match="DETAIL"):
        get_reconfigure_handle()


@pytest.mark.skipif(torch.__version__ < "2.15", reason="torch asks for a device before 2.15")
@pytest.mark.processes(3, together=True)
def test_a_group_is_split_and_shrunk(world: World) -> None:
    start(world)
    part: Any = dist.split_group(split_ranks=[[2, 0]], timeout=timedelta(seconds=60))
    tensor = torch.full((3,), 1.0 + world.rank)
    if world.rank == 1:
        assert part is dist.GroupMember.NON_GROUP_MEMBER
    else:
        assert isinstance(part, SmlGroup) and part.rank() == [2, 0].index(world.rank)
        dist.all_reduce(tensor, group=part)
        assert all_reduce_(tensor, part).eq(8).all()
        dist.broadcast(tensor, group_src=0, group=part)
    dist.barrier()
    if world.rank == 0:
        return
    smaller = dist.shrink_group([0])
    assert dist.get_rank() == world.rank - 1 and dist.get_world_size() == 2
    tensor = torch.full((3,), 1.0 + world.rank)
    dist.all_reduce(tensor)
    assert all_reduce_(tensor, smaller).eq(10).all()
    dist.barrier()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.processes(2, together=True)
def test_abort_hooks_run_when_the_group_fails(world: World, asynchronous: bool) -> None:
    group = start(world)
    backend = group._get_backend(CPU)
    assert group.supports_abort_hooks and backend.get_error() == c10d.ErrorType.SUCCESS
    ran = threading.Event()
    group.register_abort_hook(7, ran.set)
    never: list[int] = []
    group.register_abort_hook(8, lambda: never.append(1))
    group.unregister_abort_hook(8)
    dist.all_reduce(torch.ones(3))
    assert not ran.is_set()
    store = dist.distributed_c10d._get_default_store()
    if world.rank == 0:
        group.set_timeout(timedelta(seconds=0.5))
        with pytest.raises(OperationTimeoutError, match="rank 1"):
            dist.all_reduce(torch.ones(3), async_op=asynchronous).wait()
        assert ran.wait(60) and not never
        assert backend.get_error() == c10d.ErrorType.TIMEOUT
        store.set("done", "")
    store.wait(["done"])

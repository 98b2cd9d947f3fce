"""A group's device backends: what PyTorch asks of them, and backend strings that name several."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d as c10d

from torchrelay import aggregation
from torchrelay._torch import has_python_backends
from torchrelay.errors import ArgumentError, OperationTimeoutError, UnsupportedError
from torchrelay.world import World

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HAS_BACKENDS = has_python_backends()

# Before torch 2.14 only the private one exists.
set_timeout = getattr(dist, "set_timeout", c10d._set_pg_timeout)


@pytest.mark.processes(2)
@pytest.mark.filterwarnings("error")
def test_what_pytorch_asks_a_group(world: World) -> None:
    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    assert set(group._device_types) == {CPU, CUDA}
    assert {*c10d._device_capability(group)} == {"cpu", "cuda"}
    assert group._get_backend_name() == "sml" and c10d._get_object_coll_device(group) == "cpu"
    backend: Any = group._get_backend(CPU)
    assert backend.name() == "sml" and backend.rank() == world.rank and backend.size() == 2
    assert not backend.supports_coalescing and not backend.supports_time_estimate
    assert backend.supports_splitting == backend.supports_shrinking == HAS_BACKENDS
    assert not isinstance(backend, dist.ProcessGroupGloo)
    assert not backend.supports_tensor_alloc(CPU)
    tensor = torch.ones(3)
    backend.allreduce([tensor]).wait()
    assert tensor.eq(2).all()
    with pytest.raises(RuntimeError, match="No backend type associated with device type xpu"):
        group._get_backend(torch.device("xpu"))
    if torch.__version__ < "2.14":  # it compares the backend's name before it asks the group
        with pytest.raises(ValueError, match="only implemented for GLOO backend"):
            dist.monitored_barrier()
    else:
        dist.monitored_barrier()
    sml = cast(Any, group)
    sml.monitored_barrier(timedelta(seconds=60))
    assert sml.supports_reconfigure and not sml.supports_window
    set_timeout(timedelta(seconds=1), group)
    if world.rank == 0:
        with pytest.raises(OperationTimeoutError, match="rank 1"):
            dist.all_reduce(tensor)
        c10d._get_default_store().set("done", "")
    else:
        c10d._get_default_store().wait(["done"])


def check_both(group: dist.ProcessGroup, world: World, names: tuple[str, str]) -> None:
    """CPU tensors take the backend that the string names for them; each device has its own."""
    before = aggregation.stats().get("shm")
    tensor = torch.full((4,), 1.0 + world.rank)
    dist.all_reduce(tensor, group=group)
    assert tensor.eq(3).all()
    gathered = [torch.empty(4), torch.empty(4)]
    dist.all_gather(gathered, tensor, group=group, async_op=True).wait()
    assert gathered[1].eq(3).all()
    got = torch.empty(4)
    peer = 1 - world.rank
    works: list[Any] = [dist.isend(tensor, peer, group=group), dist.irecv(got, peer, group=group)]
    for work in works:
        work.wait()
    dist.barrier(group)
    objects: list[object] = [None, None]
    dist.all_gather_object(objects, world.rank, group=group)
    assert objects == [0, 1] and got.eq(3).all()
    after = aggregation.stats()["shm"]
    jobs = after.jobs - (before.jobs if before else 0)
    assert (jobs > 3) if names[0] == "sml" else (jobs == 0)
    for device, name in zip((CPU, CUDA), names, strict=True):
        backend = group._get_backend(device)
        assert backend.name() == name if name == "sml" else type(backend) is dist.ProcessGroupGloo


@pytest.mark.processes(2)
def test_several_backends_in_one_group(world: World) -> None:
    store = world.connect(60)
    dist.init_process_group("cuda:gloo,cpu:sml", store=store, rank=world.rank, world_size=2)
    assert dist.group.WORLD is not None
    assert set(dist.group.WORLD._device_types) == {CPU, CUDA}
    check_both(dist.group.WORLD, world, ("sml", "gloo"))
    with FakeTensorMode():
        dist.all_reduce(torch.ones(2, device="cuda:0"))  # reaches the operator of a plain group
    for text, names in (
        ("cpu:gloo,cuda:sml", ("gloo", "sml")),
        ("cuda:gloo,cpu:sml", ("sml", "gloo")),
        ("cpu:sml,cuda:sml", ("sml", "sml")),
    ):
        group = dist.new_group(backend=text)
        check_both(group, world, names)
        set_timeout(timedelta(seconds=50), group)
        dist.destroy_process_group(group)
    one = dist.new_group(backend="cpu:sml")
    assert one._device_types == [CPU]
    if HAS_BACKENDS:
        dist.all_reduce(torch.ones(2, device="meta"), group=one)  # does nothing, as over Gloo
    else:
        with pytest.raises(ArgumentError, match="no backend for a tensor on meta, only for cpu"):
            dist.all_reduce(torch.ones(2, device="meta"), group=one)
    assert set(dist.new_group(backend="sml")._device_types) == {CPU, CUDA}
    for other in ("gloo", "nccl", "fake"):
        with pytest.raises(UnsupportedError, match=f"name sml last: 'cuda:{other},cpu:sml'"):
            dist.new_group(backend=f"cpu:sml,cuda:{other}")
    if not dist.is_nccl_available():
        with pytest.raises(RuntimeError, match="NCCL"):  # torch makes those before sml
            dist.new_group(backend="cuda:nccl,cpu:sml")
    dist.barrier()


@pytest.mark.processes(2)
def test_bad_roots_reach_the_other_backend_too(world: World) -> None:
    """What is delegated keeps the other backend's own checks."""
    dist.init_process_group(
        "cpu:gloo,cuda:sml", store=world.connect(60), rank=world.rank, world_size=2
    )
    with pytest.raises((ValueError, RuntimeError), match="root"):
        dist.broadcast(torch.ones(2), src=2)
    dist.barrier(device_ids=None)

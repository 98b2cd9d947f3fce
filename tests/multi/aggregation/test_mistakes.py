"""What users get wrong is refused before anything is sent, and the group goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrelay.aggregation  # noqa: F401 - registers the backend
from torchrelay._torch import has_python_backends
from torchrelay.errors import ArgumentError, PeerLostError, UnsupportedError
from torchrelay.world import World

SIZES = (3, 100_000)  # in one step, and in blocks


def refused(call: Callable[..., Any], *args: Any, match: str, **kwargs: Any) -> None:
    with pytest.raises(ArgumentError, match=match):
        call(*args, **kwargs)


def rooted(
    tensor: torch.Tensor, own: bool
) -> list[tuple[Callable[..., Any], str, tuple[Any, ...]]]:
    """Each collective with a root, the name of its keyword, and its other arguments."""
    blocks = [tensor.clone(), tensor.clone()] if own else None
    return [
        (dist.broadcast, "src", (tensor,)),
        (dist.reduce, "dst", (tensor,)),
        (dist.gather, "dst", (tensor, blocks)),
        (dist.scatter, "src", (tensor, blocks)),
    ]


@pytest.mark.processes(2)
def test_a_root_that_does_not_exist(world: World) -> None:
    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=2)
    group: Any = dist.group.WORLD
    for size in SIZES:
        tensor = torch.full((size,), 1.0 + world.rank)
        for root in (-1, 2, 1 << 30):
            # c10d itself refuses lists on ranks that are not the root.
            for call, name, arguments in rooted(tensor, own=False):
                for form in (name, f"group_{name}"):
                    for async_op in (False, True):
                        with pytest.raises(
                            ValueError, match=f"no rank {root} in a group of 2|[Gg]lobal rank"
                        ):
                            call(*arguments, **{form: root, "async_op": async_op})
            refused(group.broadcast, tensor, root, match="broadcast: there is no rank")
            refused(group.reduce, tensor, root, match="reduce: there is no rank")
            refused(group.gather, [], tensor, root, match="gather: there is no rank")
            refused(group.scatter, tensor, [], root, match="scatter: there is no rank")
            refused(group.send, [tensor], root, 0, match="send: there is no rank")
            refused(group.recv, [tensor], root, 0, match="recv: there is no rank")
        assert tensor.eq(1 + world.rank).all()
        dist.all_reduce(tensor)
        assert tensor.eq(3).all()


@pytest.mark.processes(3)
def test_roots_and_peers_of_a_subgroup(world: World) -> None:
    """Ranks of the world and of the group are told apart, and checked, in either form."""
    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=3)
    group = dist.new_group([1, 2], backend="sml")
    if world.rank == 0:
        return
    for form, root in (("src", 2), ("group_src", 1)):
        tensor = torch.full((3,), float(world.rank))
        dist.broadcast(tensor, group=group, **{form: root})  # type: ignore[arg-type]
        assert tensor.eq(2).all(), form
    for root in (-1, 0, 3):
        with pytest.raises(ValueError, match="not part of group"):
            dist.broadcast(tensor, src=root, group=group)
    for root in (-1, 2, 3):
        refused(
            dist.broadcast, tensor, group_src=root, group=group, match="no rank .* in a group of 2"
        )
        refused(dist.send, tensor, group_dst=root, group=group, match="no rank .* in a group of 2")
    dist.barrier(group)


@pytest.mark.processes(2)
def test_sizes_dtypes_devices_and_subclasses(world: World) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=2)
    group: Any = dist.group.WORLD
    tensor = torch.ones(4)
    refused(group._allgather_base, torch.empty(7), tensor, match="7 elements")
    refused(group._reduce_scatter_base, torch.empty(3), tensor, match="4 elements")
    refused(group.allgather, [tensor], tensor, match="1 outputs for a group of 2")
    refused(group.alltoall, [tensor], [tensor, tensor], match="1 outputs")
    refused(group.alltoall, [], [], match="0 outputs")
    refused(group._allgather_base, torch.empty(8, dtype=torch.int32), tensor, match="one dtype")
    refused(group.send, [tensor], 1 - world.rank, -1, match="tag")
    refused(group.recv_anysource, [tensor], -1, match="tag")
    for call in (dist.all_reduce, lambda meta: dist.broadcast(meta, 0)):
        if has_python_backends():
            call(torch.ones(4, device="meta"))  # does nothing, as over Gloo
        else:
            refused(call, torch.ones(4, device="meta"), match="no backend for a tensor on meta")
    with pytest.raises(UnsupportedError, match="float8"):
        dist.all_reduce(torch.ones(4).to(torch.float8_e5m2))
    distributed = distribute_tensor(tensor, init_device_mesh("cpu", (2,)), [Replicate()])
    with pytest.raises((NotImplementedError, RuntimeError), match=r"allreduce_|DTensor"):
        dist.all_reduce(distributed)
    with pytest.raises(UnsupportedError, match="DTensor"):
        dist.all_gather([distributed, distributed], tensor)
    dist.all_reduce(tensor)
    assert tensor.eq(2).all()


@pytest.mark.processes(2)
def test_a_group_after_its_end(world: World) -> None:
    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=2)
    group = dist.new_group(backend="sml")
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="not initialized"):
        dist.all_reduce(tensor, group=group)
    for call in (
        lambda: group.allreduce(tensor),
        lambda: group.allreduce([tensor], torch.distributed.AllreduceOptions()).wait(),
        group.barrier,
        lambda: group.send([tensor], 1 - world.rank, 0).wait(),
        lambda: group.recv([tensor], 1 - world.rank, 0).wait(),
    ):
        with pytest.raises(PeerLostError, match="destroyed"):
            call()
    group.shutdown()
    dist.all_reduce(tensor)

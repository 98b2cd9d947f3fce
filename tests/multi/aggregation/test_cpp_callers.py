"""What torch's C++ code calls of a group, of its operators and of a Work: each reaches ``sml``."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchrelay.aggregation  # noqa: F401 - registers the backend
from torchrelay.errors import MismatchError
from torchrelay.world import World

c10d: Any = dist.distributed_c10d
CPU = torch.device("cpu")


class Cpp:
    """The methods of ``group`` as C++ calls them: virtual ones reach Python's, the others an
    operator of c10d.

    Args:
        names: of methods that are called by others.
    """

    def __init__(self, group: Any, names: dict[str, str] | None = None) -> None:
        self._group, self._names = group, names or {}

    def __getattr__(self, name: str) -> Any:
        method = getattr(dist.ProcessGroup, self._names.get(name, name))
        return lambda *arguments: method(self._group, *arguments)


def options(kind: str, **values: Any) -> Any:
    made = getattr(c10d, kind)()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def ones(rank: int, count: int = 2) -> torch.Tensor:
    return torch.full((count,), 1.0 + rank)


Made = tuple[Any, Callable[[], Any]]  # a Work, or several; and what was computed


def group_methods(cpp: Any, me: int) -> dict[str, Callable[[], Made]]:
    """Every method of c10d::ProcessGroup that moves data."""
    t, peer = ones(me), 1 - me
    two, pair, four = [ones(9), ones(9)], [ones(me), ones(me)], torch.zeros(4)
    gathered = [torch.zeros(2), torch.zeros(2)]
    root = me == 0
    calls: dict[str, Callable[[], Made]] = {
        "allreduce": lambda: (cpp.allreduce([t], options("AllreduceOptions")), lambda: t),
        "allreduce_coalesced": lambda: (
            cpp.allreduce_coalesced([t], options("AllreduceCoalescedOptions")),
            lambda: t,
        ),
        "reduce": lambda: (cpp.reduce([t], options("ReduceOptions", rootRank=1)), lambda: t * me),
        "broadcast": lambda: (
            cpp.broadcast([t], options("BroadcastOptions", rootRank=1)),
            lambda: t,
        ),
        "allgather": lambda: (
            cpp.allgather([gathered], [t], options("AllgatherOptions")),
            lambda: torch.cat(gathered),
        ),
        "_allgather_base": lambda: (
            cpp._allgather_base(four, t, options("AllgatherOptions")),
            lambda: four,
        ),
        "allgather_coalesced": lambda: (
            cpp.allgather_coalesced([[g] for g in gathered], [t], options("AllgatherOptions")),
            lambda: torch.cat(gathered),
        ),
        "allgather_into_tensor_coalesced": lambda: (
            cpp.allgather_into_tensor_coalesced([four], [t], options("AllgatherOptions")),
            lambda: four,
        ),
        "gather": lambda: (
            cpp.gather([gathered] if root else [], [t], options("GatherOptions", rootRank=0)),
            lambda: torch.cat(gathered),
        ),
        "scatter": lambda: (
            cpp.scatter([t], [two] if root else [], options("ScatterOptions", rootRank=0)),
            lambda: t,
        ),
        "reduce_scatter": lambda: (
            cpp.reduce_scatter([t], [pair], options("ReduceScatterOptions")),
            lambda: t,
        ),
        "_reduce_scatter_base": lambda: (
            cpp._reduce_scatter_base(t, ones(me, 4), options("ReduceScatterOptions")),
            lambda: t,
        ),
        "reduce_scatter_tensor_coalesced": lambda: (
            cpp.reduce_scatter_tensor_coalesced(
                [t], [ones(me, 4)], options("ReduceScatterOptions")
            ),
            lambda: t,
        ),
        "alltoall": lambda: (
            cpp.alltoall(gathered, pair, options("AllToAllOptions")),
            lambda: torch.cat(gathered),
        ),
        "alltoall_base": lambda: (
            cpp.alltoall_base(four, ones(me, 4), [2, 2], [2, 2], options("AllToAllOptions")),
            lambda: four,
        ),
        "barrier": lambda: (cpp.barrier(options("BarrierOptions")), lambda: torch.ones(1)),
        "monitored_barrier": lambda: (
            cpp.monitored_barrier(timedelta(seconds=60), False),
            lambda: torch.ones(1),
        ),
        "send and recv": lambda: (
            [cpp.send([ones(me)], peer, 3), cpp.recv([t], peer, 3)],
            lambda: t,
        ),
        "send and recv_anysource": lambda: (
            [cpp.send([ones(me)], peer, 3), cpp.recv_anysource([t], 3)],
            lambda: t,
        ),
    }
    return calls


# Since torch 2.13.
NEW_NAMES = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}


@pytest.mark.parametrize("hosts", ["aa", "ab"])
@pytest.mark.processes(2, together=True)
def test_methods_of_a_group(world: World, hosts: str) -> None:
    os.environ["TORCHRELAY_HOST_ID"] = hosts[world.rank]
    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=2)
    gloo = dist.new_group(backend="gloo")
    groups = [Cpp(dist.group.WORLD), Cpp(gloo)]
    if hasattr(dist.ProcessGroup, "all_gather_single"):
        groups.append(Cpp(dist.group.WORLD, NEW_NAMES))
    for name in group_methods(groups[0], world.rank):
        got = []
        for cpp in groups:
            if name == "allgather_coalesced" and cpp is groups[1]:  # Gloo takes it in another form
                got.append(torch.cat([ones(0), ones(1)]))
                continue
            work, result = group_methods(cpp, world.rank)[name]()
            wait(work)
            got.append(result())
        assert all(torch.equal(each, got[1]) for each in got), (name, got)
    for cpp in groups:
        assert (cpp.rank(), cpp.size()) == (world.rank, 2)
        cpp.abort()


def wait(work: Any) -> None:
    for each in work if isinstance(work, list) else [work]:
        if each is not None:
            each.wait()


def functional(name: str, me: int) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """Every collective of c10d's functional operators, whose Work C++ keeps and waits for."""
    ops = torch.ops._c10d_functional
    autograd = torch.ops._c10d_functional_autograd
    peer = 1 - me
    calls: dict[str, Callable[[], list[torch.Tensor]]] = {
        "all_reduce": lambda: [ops.all_reduce(ones(me), "sum", name)],
        "all_reduce_": lambda: [ops.all_reduce_(ones(me), "sum", name)],
        "all_reduce_coalesced": lambda: ops.all_reduce_coalesced([ones(me)] * 2, "sum", name),
        "all_reduce_coalesced_": lambda: ops.all_reduce_coalesced_(
            [ones(me), ones(me)], "sum", name
        ),
        "all_gather_into_tensor": lambda: [ops.all_gather_into_tensor(ones(me), 2, name)],
        "all_gather_into_tensor_out": lambda: [
            ops.all_gather_into_tensor_out(ones(me), 2, name, out=torch.zeros(4))
        ],
        "all_gather_into_tensor_coalesced": lambda: ops.all_gather_into_tensor_coalesced(
            [ones(me), ones(me, 3)], 2, name
        ),
        "reduce_scatter_tensor": lambda: [ops.reduce_scatter_tensor(ones(me, 4), "sum", 2, name)],
        "reduce_scatter_tensor_coalesced": lambda: ops.reduce_scatter_tensor_coalesced(
            [ones(me, 4)] * 2, "sum", 2, name
        ),
        "all_to_all_single": lambda: [ops.all_to_all_single(ones(me, 4), [2, 2], [2, 2], name)],
        "broadcast": lambda: [ops.broadcast(ones(me), 1, name)],
        "broadcast_": lambda: [ops.broadcast_(ones(me), 1, name)],
        "autograd all_gather": lambda: [autograd.all_gather_into_tensor(ones(me), 2, name)],
        "autograd reduce_scatter": lambda: [
            autograd.reduce_scatter_tensor(ones(me, 4), "sum", 2, name)
        ],
        "autograd all_to_all": lambda: [
            autograd.all_to_all_single(ones(me, 4), [2, 2], [2, 2], name)
        ],
    }
    if hasattr(ops, "reduce_scatter_tensor_out"):
        calls["reduce_scatter_tensor_out"] = lambda: [
            ops.reduce_scatter_tensor_out(ones(me, 4), "sum", 2, name, out=torch.zeros(2))
        ]
    if hasattr(ops, "batch_p2p_ops"):  # since torch 2.13
        calls["isend and irecv"] = lambda: [
            ops.isend(ones(me), peer, 0, name),
            ops.irecv(torch.zeros(2), peer, 0, name),
        ]
        calls["batch_p2p_ops"] = lambda: ops.batch_p2p_ops(
            ["isend", "irecv"], [peer, peer], [0, 0], [ones(me), torch.zeros(2)], name
        )
    return calls


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.processes(2, together=True)
def test_functional_operators(world: World, inference: bool) -> None:
    """Also on inference tensors, which have other dispatch keys."""
    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=2)
    gloo = dist.new_group(backend="gloo")
    waited = torch.ops._c10d_functional.wait_tensor
    with torch.inference_mode(inference):
        ours = functional(dist.group.WORLD.group_name, world.rank)  # type: ignore[union-attr]
        theirs = functional(gloo.group_name, world.rank)
        for name, call in ours.items():
            pending = call()  # C++ alone keeps the Work's Python object
            got = [waited(tensor) for tensor in pending]
            # Gloo has no coalesced messages.
            other = ours if name == "batch_p2p_ops" else theirs
            want = [waited(tensor) for tensor in other[name]()]
            assert len(got) == len(want) and all(map(torch.equal, got, want)), (name, got, want)


@pytest.mark.processes(2, together=True)
def test_errors_reach_callers(world: World) -> None:
    """An error of a call that came from C++ is raised where C++ waits, with its type."""
    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=2)
    group: Any = dist.group.WORLD
    size = 2 + world.rank
    with pytest.raises(MismatchError, match="different calls"):
        Cpp(group).reduce([ones(0, size)], options("ReduceOptions", rootRank=0)).wait()
    out = torch.zeros(2 * size)
    pending = torch.ops._c10d_functional.all_gather_into_tensor_out(
        ones(0, size), 2, group.group_name, out=out
    )
    with pytest.raises((MismatchError, RuntimeError), match="do not agree on sizes"):
        torch.ops._c10d_functional.wait_tensor(pending)
    assert not out.any()


def gradients(group: Any, rank: int, hook: str | None, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8, dtype=dtype) for _ in range(4)]
    model = DistributedDataParallel(
        torch.nn.Sequential(*layers), process_group=group, bucket_cap_mb=1e-4
    )
    if hook is not None:
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, hook))
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(4, 8, dtype=dtype) * (rank + 1)).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("hook", [None, "ALLREDUCE", "FP16_COMPRESS"])
@pytest.mark.processes(2, together=True)
def test_builtin_hooks(world: World, hook: str | None) -> None:
    """The reducer and its hooks in C++ give what they give over Gloo."""
    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=2)
    gloo = dist.new_group(backend="gloo")
    for dtype in (torch.float32, torch.float16):
        ours = gradients(dist.group.WORLD, world.rank, hook, dtype)
        theirs = gradients(gloo, world.rank, hook, dtype)
        assert len(ours) == 8 and all(map(torch.equal, ours, theirs)), (hook, dtype)
    work = dist.all_reduce(ones(world.rank).half(), async_op=True)
    future = work.get_future()
    assert future.then(lambda done: done.value()[0].tolist()).wait() == [3.0, 3.0]


@pytest.mark.processes(2, together=True)
def test_an_all_gather_of_a_part_of_its_result(world: World) -> None:
    """As Inductor makes of several all-gathers that it merges."""
    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=2)
    ops, group = torch.ops._c10d_functional, dist.group.WORLD
    for count in (3, 100_000):
        out = torch.zeros(2 * count)
        mine = out[world.rank * count :][:count]
        mine.copy_(ones(world.rank, count))
        ops.all_gather_into_tensor_out(mine, 2, group.group_name, out=out)  # type: ignore[union-attr]
        ops.wait_tensor(out)
        assert torch.equal(out, torch.cat([ones(0, count), ones(1, count)]))


def symmetric_operators() -> list[Any]:
    names = {
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith("symm_mem::")
    }
    packets = (getattr(torch.ops.symm_mem, name.partition("::")[2].split(".")[0]) for name in names)
    return [getattr(packet, packet.overloads()[0]) for packet in packets]


def argument(kind: str, name: str, group: str) -> Any:
    made = {
        "Tensor": torch.ones(4, 4),
        "List[Tensor]": [torch.ones(4, 4)],
        "str": group if "group" in name else "sum",
        "int": 0,
        "bool": False,
    }
    return made.get(kind, [] if kind.startswith("List") else None)


@pytest.mark.processes(2, together=True)
def test_symmetric_memory_is_refused(world: World) -> None:
    """Its C++ asks a group for rank, size and store, and for NCCL's communicator, once it has
    memory of a GPU: each of its operators refuses tensors of the CPU before.
    """
    from torch.distributed import _symmetric_memory

    symm: Any = _symmetric_memory
    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=2)
    group: Any = dist.group.WORLD
    tensor = torch.ones(4)
    for call in (
        lambda: symm.empty(4, device="cpu"),
        lambda: symm.rendezvous(tensor, group.group_name),
    ):
        with pytest.raises(RuntimeError, match="not support"):
            call()
    operators = symmetric_operators()
    assert len(operators) > 10, operators
    for operator in operators:
        arguments = [
            argument(str(each.type), each.name, group.group_name)
            for each in operator._schema.arguments
            if not each.kwarg_only
        ]
        with pytest.raises(RuntimeError):  # NotImplementedError is one
            operator(*arguments)
    dist.all_reduce(tensor)
    assert tensor.eq(2).all()

"""Ranks that make different calls: an error on every rank, nothing of theirs changed, and the group
goes on.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from multi.aggregation.collectives import groups, make, same
from torchrelay import _communicators
from torchrelay.errors import MismatchError
from torchrelay.world import World

c10d: Any = dist.distributed_c10d
PREMUL_SUM: Any = dist._make_nccl_premul_sum(3.0)
SIZES = (5, 9001)  # in one step or a record, and in blocks


@dataclass(frozen=True)
class Arguments:
    """What all ranks of a call must have in common."""

    size: int
    dtype: torch.dtype = torch.float32
    op: Any = dist.ReduceOp.SUM
    root: int = 0
    count: int = 2  # of the tensors of a coalesced call


@dataclass
class Call:
    """The tensors of one rank's call, what it does, and those that it should change."""

    tensors: list[torch.Tensor]
    run: Callable[[bool], Any]
    results: list[tuple[torch.Tensor, torch.Tensor]]


def reduced(op: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The reduction of small whole numbers, exact in any order."""
    if op is PREMUL_SUM:
        return torch.stack(tensors).sum(0).mul(3).to(tensors[0].dtype)
    if tensors[0].dtype is torch.bool:
        return torch.stack(tensors).any(0)
    stacked = torch.stack(tensors)
    name = {"SUM": "sum", "MAX": "amax", "AVG": "mean", "BOR": "amax"}[op.name]
    total: torch.Tensor = getattr(stacked, name)(0)
    return total.to(tensors[0].dtype)


def columns(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, in a tensor that is not contiguous."""
    return torch.stack([tensor, tensor], 1)[:, 0]


def all_reduce(me: int, n: int, a: Arguments, view: Any = torch.clone) -> Call:
    mine = view(make(me, a.size, a.dtype))
    want = reduced(a.op, [make(r, a.size, a.dtype) for r in range(n)])
    return Call([mine], lambda later: dist.all_reduce(mine, a.op, async_op=later), [(mine, want)])


def all_reduce_of_columns(me: int, n: int, a: Arguments) -> Call:
    return all_reduce(me, n, a, columns)


def all_reduce_coalesced(me: int, n: int, a: Arguments) -> Call:
    """Only the last of the tensors has another size."""
    sizes = [7] * (a.count - 1) + [a.size]
    mine = [make(me, size, a.dtype) for size in sizes]
    want = [reduced(a.op, [make(r, size, a.dtype) for r in range(n)]) for size in sizes]
    options = c10d.AllreduceCoalescedOptions()
    options.reduceOp = a.op

    def run(later: bool) -> Any:
        options.asyncOp = later
        work = dist.group.WORLD.allreduce_coalesced(mine, options)  # type: ignore[union-attr]
        return work if later else work.wait()

    return Call(mine, run, list(zip(mine, want, strict=True)))


def all_reduce_sparse(me: int, n: int, a: Arguments) -> Call:
    mine = [make(me, 7, a.dtype).to_sparse() for _ in range(a.count - 1)]
    mine.append(make(me, a.size, a.dtype).to_sparse())
    options = c10d.AllreduceCoalescedOptions()
    run = lambda _: dist.group.WORLD.allreduce_coalesced(mine, options)  # type: ignore[union-attr] # noqa: E731
    sizes = [7] * (a.count - 1) + [a.size]
    want = [reduced(a.op, [make(r, size, a.dtype) for r in range(n)]) for size in sizes]
    return Call(mine, run, list(zip(mine, want, strict=True)))


def reduce(me: int, n: int, a: Arguments, view: Any = torch.clone) -> Call:
    mine = view(make(me, a.size, a.dtype))
    inputs = [make(r, a.size, a.dtype) for r in range(n)]
    want = reduced(a.op, inputs) if me == a.root else inputs[me]
    return Call(
        [mine], lambda later: dist.reduce(mine, a.root, a.op, async_op=later), [(mine, want)]
    )


def reduce_of_columns(me: int, n: int, a: Arguments) -> Call:
    return reduce(me, n, a, columns)


def blocks(rank: int, n: int, a: Arguments) -> list[torch.Tensor]:
    return [make(rank + 10 * r, a.size, a.dtype) for r in range(n)]


def reduce_scatter(me: int, n: int, a: Arguments) -> Call:
    """In place: the output is a block of the input."""
    mine = blocks(me, n, a)
    want = reduced(a.op, [blocks(r, n, a)[me] for r in range(n)])
    run = lambda later: dist.reduce_scatter(mine[me], mine, a.op, async_op=later)  # noqa: E731
    return Call(mine, run, [(mine[me], want)])


def reduce_scatter_coalesced(me: int, n: int, a: Arguments) -> Call:
    arguments = [replace(a, size=7)] * (a.count - 1) + [a]
    outputs = [torch.zeros(each.size, dtype=a.dtype) for each in arguments]
    inputs = [torch.cat(blocks(me, n, each)) for each in arguments]
    want = [reduced(a.op, [blocks(r, n, each)[me] for r in range(n)]) for each in arguments]

    def run(later: bool) -> Any:
        with dist._coalescing_manager(async_ops=later) as works:
            for output, given in zip(outputs, inputs, strict=True):
                dist.reduce_scatter_tensor(output, given, a.op)
        return works

    return Call([*outputs, *inputs], run, list(zip(outputs, want, strict=True)))


def broadcast(me: int, n: int, a: Arguments) -> Call:
    mine = make(me, a.size, a.dtype)
    want = make(a.root, a.size, a.dtype)
    return Call([mine], lambda later: dist.broadcast(mine, a.root, async_op=later), [(mine, want)])


def all_gather(me: int, n: int, a: Arguments) -> Call:
    """In place: the input is a block of the output."""
    mine = [torch.zeros(a.size, dtype=a.dtype) for _ in range(n)]
    want = [make(r, a.size, a.dtype) for r in range(n)]
    mine[me].copy_(want[me])
    run = lambda later: dist.all_gather(mine, mine[me], async_op=later)  # noqa: E731
    return Call(mine, run, list(zip(mine, want, strict=True)))


def all_gather_coalesced(me: int, n: int, a: Arguments) -> Call:
    sizes = [7] * (a.count - 1) + [a.size]
    outputs = [torch.zeros(n * size, dtype=a.dtype) for size in sizes]
    inputs = [make(me, size, a.dtype) for size in sizes]
    want = [torch.cat([make(r, size, a.dtype) for r in range(n)]) for size in sizes]

    def run(later: bool) -> Any:
        with dist._coalescing_manager(async_ops=later) as works:
            for output, given in zip(outputs, inputs, strict=True):
                dist.all_gather_into_tensor(output, given)
        return works

    return Call([*outputs, *inputs], run, list(zip(outputs, want, strict=True)))


def gather(me: int, n: int, a: Arguments) -> Call:
    mine = make(me, a.size, a.dtype)
    into = [torch.zeros(a.size, dtype=a.dtype) for _ in range(n)] if me == a.root else []
    want = [make(r, a.size, a.dtype) for r in range(n)] if into else []
    run = lambda later: dist.gather(mine, into or None, a.root, async_op=later)  # noqa: E731
    return Call([mine, *into], run, list(zip(into, want, strict=True)))


def scatter(me: int, n: int, a: Arguments) -> Call:
    mine = torch.zeros(a.size, dtype=a.dtype)
    given = blocks(me, n, a) if me == a.root else []
    want = blocks(a.root, n, a)[me]
    run = lambda later: dist.scatter(mine, given or None, a.root, async_op=later)  # noqa: E731
    return Call([mine, *given], run, [(mine, want)])


def all_to_all(me: int, n: int, a: Arguments) -> Call:
    outputs = [torch.zeros(a.size, dtype=a.dtype) for _ in range(n)]
    inputs = blocks(me, n, a)
    want = [blocks(r, n, a)[me] for r in range(n)]
    run = lambda later: dist.all_to_all(outputs, inputs, async_op=later)  # noqa: E731
    return Call([*outputs, *inputs], run, list(zip(outputs, want, strict=True)))


def all_to_all_single(me: int, n: int, a: Arguments) -> Call:
    output, given = torch.zeros(n * a.size, dtype=a.dtype), torch.cat(blocks(me, n, a))
    want = torch.cat([blocks(r, n, a)[me] for r in range(n)])
    run = lambda later: dist.all_to_all_single(output, given, async_op=later)  # noqa: E731
    return Call([output, given], run, [(output, want)])


def barrier(me: int, n: int, a: Arguments) -> Call:
    return Call([], lambda later: dist.barrier(async_op=later), [])


REDUCTIONS = (
    all_reduce,
    all_reduce_of_columns,
    all_reduce_coalesced,
    reduce,
    reduce_of_columns,
    reduce_scatter,
    reduce_scatter_coalesced,
)
COALESCED = (all_reduce_coalesced, reduce_scatter_coalesced, all_gather_coalesced)
ROOTED = (reduce, reduce_of_columns, broadcast, gather, scatter)
COLLECTIVES = (
    *REDUCTIONS,
    broadcast,
    all_gather,
    all_gather_coalesced,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
)
# torch passes real views of their complex tensors, whatever backend there is.
MADE_REAL = (
    all_reduce,
    all_reduce_of_columns,
    broadcast,
    all_gather,
    scatter,
    all_to_all,
    all_to_all_single,
)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG, PREMUL_SUM)


def disagreements(collective: Any, size: int) -> Iterator[tuple[Arguments, Any, Arguments]]:
    """What all ranks but the last do, and what the last does."""
    a = Arguments(size)
    reduces = collective in REDUCTIONS
    for dtype, op in itertools.product(
        (torch.float32, torch.bool, torch.complex64), OPS if reduces else OPS[:1]
    ):
        if dtype is not torch.float32 and op is not dist.ReduceOp.SUM:
            continue
        a = replace(a, dtype=dtype, op=op)
        yield a, collective, replace(a, size=size + 1)
    a = Arguments(size)
    yield a, collective, replace(a, dtype=torch.float64)
    if reduces:
        yield replace(a, op=PREMUL_SUM), collective, replace(a, op=dist.ReduceOp.MAX)
    # What has the same bytes, and is computed in the same way.
    if collective not in MADE_REAL:
        yield replace(a, dtype=torch.complex64), collective, Arguments(2 * size)
    flags = replace(a, dtype=torch.bool, op=dist.ReduceOp.BOR if reduces else a.op)
    yield flags, collective, replace(flags, dtype=torch.uint8)
    if reduces:
        yield a, collective, replace(a, op=PREMUL_SUM)
        yield flags, collective, replace(flags, op=dist.ReduceOp.MAX)
    if collective in ROOTED:
        yield replace(a, op=PREMUL_SUM), collective, replace(a, op=PREMUL_SUM, root=1)
    if collective in COALESCED:
        yield a, collective, replace(a, count=3)
        yield replace(a, count=3), collective, a
    for other in (barrier, broadcast, all_reduce, all_gather):
        if other is not collective:
            op = PREMUL_SUM if reduces and other is not all_reduce else a.op
            yield replace(a, op=op), other, replace(a, op=dist.ReduceOp.MAX)


def check(
    world: World, collective: Any, mine: Arguments, other: Any, theirs: Arguments, later: bool
) -> None:
    is_odd = world.rank == world.size - 1
    what = (collective.__name__, mine, other.__name__, theirs, later)
    call = (other if is_odd else collective)(world.rank, world.size, theirs if is_odd else mine)
    before = [tensor.clone() for tensor in call.tensors]
    error = None
    try:
        work = call.run(later)
        if later:
            work.wait()
    except MismatchError as raised:
        error = raised
    assert error is not None, what
    assert re.search("different calls|do not agree|differ in shape", str(error)), (what, error)
    for tensor, copy in zip(call.tensors, before, strict=True):
        assert same(tensor.to_dense(), copy.to_dense()), what
    retry = collective(world.rank, world.size, mine)
    if not is_odd:  # the same tensors
        retry = call
    work = retry.run(later)
    if later:
        work.wait()
    for tensor, want in retry.results:
        assert torch.equal(tensor.to_dense(), want), (what, tensor, want)


@pytest.mark.parametrize("hosts", ["aa", "ab"])
@pytest.mark.processes(2, together=True)
def test_on_two_ranks(world: World, hosts: str) -> None:
    every_collective(world, hosts)


@pytest.mark.processes(3)
def test_on_two_uneven_hosts(world: World) -> None:
    every_collective(world, "aba")


def every_collective(world: World, hosts: str) -> None:
    os.environ["TORCHRELAY_HOST_ID"] = hosts[world.rank]
    _communicators._CHUNK_BYTES = 4096
    with groups(world):
        for collective in COLLECTIVES:
            for size in SIZES:
                for index, case in enumerate(disagreements(collective, size)):
                    check(world, collective, *case, later=index % 2 == 1)
        a = Arguments(9)
        for theirs in (replace(a, size=10), replace(a, count=3), replace(a, dtype=torch.float64)):
            check(world, all_reduce_sparse, a, all_reduce_sparse, theirs, later=False)


@pytest.mark.parametrize("hosts", ["aa", "ab"])
@pytest.mark.processes(2, together=True)
def test_messages(world: World, hosts: str) -> None:
    """A message that does not fit leaves the receiver's tensor, and the next one arrives."""
    os.environ["TORCHRELAY_HOST_ID"] = hosts[world.rank]
    with groups(world):
        for size, sent in itertools.product(SIZES, (torch.float32, torch.float64)):
            tensor = make(7, size, torch.float32)
            if world.rank == 0:
                wrong = make(0, size + (sent is torch.float32), sent)
                dist.send(wrong, 1)
                dist.send(make(0, size, torch.float32), 1)
                continue
            before = tensor.clone()
            with pytest.raises(MismatchError):
                dist.recv(tensor, 0)
            assert same(tensor, before)
            dist.recv(tensor, 0)
            assert same(tensor, make(0, size, torch.float32))

"""Bcast, Gather, Allgather, Scatter, Alltoall and Alltoallv: copy the tensors of ranks, or parts.

Gather and Scatter are each other's derivatives. Those of Bcast and Allgather sum the cotangents of
all ranks: Reduce and Reduce_scatter. What only root's tensor decides has none for those of others.
Alltoall gathers along one axis and scatters along another; with equal axes, parts move between
ranks. Its derivative exchanges the axes. Alltoallv sends a part of any length to each rank, and its
derivative sends the cotangents of the parts back.

Replicate marks a tensor, equal on all ranks, as used differently by each from here on. It
communicates nothing forward. Under the convention "replicated" it is the conjugate of Allreduce:
its derivative sums the cotangents of the ranks. Under "sum" it is the identity.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.compiler import is_compiling

from torchrelay.errors import ArgumentError
from torchrelay.mpi._dtypes import CODES, DTYPES, Op
from torchrelay.mpi._headers import MAX_NUMBERS, Fields
from torchrelay.mpi._memory import (
    Blocks,
    Layout,
    axis_of,
    check_counts,
    fresh,
    fresh_like,
    layout,
    parts,
    with_length,
)
from torchrelay.mpi._record import (
    Adjoint,
    AlongAxis,
    Call,
    Plan,
    Started,
    check_parts,
    conjugate,
    is_differentiated,
    nothing_of,
    unchanged,
)

if TYPE_CHECKING:
    from torchrelay.mpi._comm import Comm

__all__ = [
    "Allgather",
    "Alltoall",
    "Bcast",
    "Replicate",
    "allgather",
    "alltoall",
    "alltoallv",
    "gather",
    "is_uniform",
    "own_use",
    "scatter",
]

MAX_DIMS = MAX_NUMBERS - 3


class Replicate(Call):
    __slots__ = ()
    name = "Replicate"

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        return Started([], x.clone)

    def adjoint(self, grad: Tensor) -> Adjoint:
        if self.comm.convention == "sum":
            return Adjoint(None, grad)
        return Adjoint(conjugate("Allreduce")(self.comm.reverse, Op.SUM), grad)


def own_use(comm: Comm, grad: Tensor, complete: Callable[[Tensor], Tensor] = unchanged) -> Adjoint:
    """Differentiate a function with equal results on all ranks, whose cotangent is ``grad``."""
    return Adjoint(Replicate(comm.reverse) if is_differentiated() else None, grad, complete)


@dataclass(slots=True, eq=False)
class Bcast(Call):
    name = "Bcast"
    root: int

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        if self.overwrites:
            result = x
        else:
            result = x.clone() if self.comm.rank == self.root else fresh_like(x)
        requests = self.comm.transport.broadcast(result, self.root, arrived)
        return Started(requests, lambda: result)

    def adjoint(self, grad: Tensor) -> Adjoint:
        if self.comm.convention == "replicated":
            return own_use(
                self.comm, grad, unchanged if self.comm.rank == self.root else nothing_of
            )
        return Adjoint(conjugate("Reduce")(self.comm.reverse, Op.SUM, self.root), grad)

    def arguments(self) -> str:
        return f"root={self.root}"


@dataclass(slots=True, eq=False)
class Allgather(AlongAxis):
    name = "Allgather"
    axis: int
    op: Op | None = None  # what each rank reduces the result by, for messages
    lengths: Sequence[int] = field(default=(), init=False)  # of all ranks, once they are known

    def numbers(self, x: Tensor) -> Sequence[int]:
        return (x.shape[self.axis],)

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        self.lengths = [length for (length,) in numbers]
        layout = parts(tuple(x.shape), tuple(self.lengths), self.axis)
        received = Blocks.empty(x.dtype, layout, x.device)
        requests = self.comm.transport.allgather(x, received, arrived)
        return Started(requests, received.joined, x)

    def adjoint(self, grad: Tensor) -> Adjoint:
        rank, size = self.comm.rank, self.comm.size
        lengths = [grad.shape[self.axis] // size] * size if self.uniform else self.lengths
        if self.comm.convention == "replicated":
            start, length = sum(lengths[:rank]), lengths[rank]
            return own_use(self.comm, grad, lambda whole: whole.narrow(self.axis, start, length))
        scatter, arguments = conjugate("ReduceScatter"), (Op.SUM, self.axis, lengths[rank])
        return Adjoint(scatter(self.comm.reverse, *arguments, uniform=self.uniform), grad)

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        return with_length(shape, self.axis, shape[self.axis] * self.comm.size)

    def arguments(self) -> str:
        return f"axis={self.axis}" if self.op is None else f"axis={self.axis}, for {self.op.value}"


@dataclass(slots=True, eq=False)
class Gather(AlongAxis):
    name = "Gather"
    axis: int
    length: int
    root: int

    def numbers(self, x: Tensor) -> Sequence[int]:
        return (x.shape[self.axis],)

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        layout = parts(tuple(x.shape), tuple([length for (length,) in numbers]), self.axis)
        is_root = self.comm.rank == self.root
        mine = layout if is_root else parts((0,), (0,) * self.comm.size, 0)
        received = Blocks.empty(x.dtype, mine, x.device)
        requests = self.comm.transport.gather(x, received, self.root, layout.total, arrived)
        if is_root:
            return Started(requests, received.joined, x)
        nothing = x.new_empty(with_length(x.shape, self.axis, 0))
        return Started(requests, lambda: nothing, (x, received))

    def adjoint(self, grad: Tensor) -> Adjoint:
        if self.uniform and self.comm.rank != self.root:  # give the shape of root's cotangent
            shape = with_length(grad.shape, self.axis, self.length * self.comm.size)
            grad = grad.sum().expand(shape)  # zero, since it is empty
        arguments = (self.comm.reverse, self.axis, self.length, self.root)
        return Adjoint(Scatter(*arguments, uniform=self.uniform), grad)

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        is_root = self.comm.rank == self.root
        return with_length(shape, self.axis, self.length * self.comm.size if is_root else 0)

    def arguments(self) -> str:
        return f"axis={self.axis}, root={self.root}"


@dataclass(slots=True, eq=False)
class Scatter(AlongAxis):
    name = "Scatter"
    axis: int
    length: int
    root: int
    input_shape: Sequence[int] = field(default=(), init=False)

    def numbers(self, x: Tensor) -> Sequence[int]:
        """Return the length of this rank's part, and dtype and shape, which count on root."""
        self.input_shape = tuple(x.shape)
        if x.ndim > MAX_DIMS:
            raise ArgumentError(f"{self.describe()}: {x.ndim} axes are more than {MAX_DIMS}")
        rest = [0] * (MAX_DIMS - x.ndim)
        return (self.length, CODES[x.dtype], x.ndim, *x.shape, *rest)

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        _, code, ndim, *shape = numbers[self.root]
        whole, lengths = tuple(shape[:ndim]), [length for length, *_ in numbers]
        axis = self._check(whole, lengths)
        blocks = Blocks.cut(x, lengths, axis) if self.comm.rank == self.root else None
        layout = parts(whole, tuple(lengths), axis)
        mine = layout.shapes[self.comm.rank]
        received = fresh(mine, DTYPES[code], x.device)
        requests = self.comm.transport.scatter(blocks, received, self.root, layout.total, arrived)
        return Started(requests, lambda: received, blocks)

    def _check(self, whole: tuple[int, ...], lengths: list[int]) -> int:
        """Return the axis, counted from the front, or raise on all ranks alike."""
        ndim = len(whole)
        if not -ndim <= self.axis < ndim:
            raise ArgumentError(f"{self.describe()}: root's tensor has {ndim} axes")
        axis = self.axis % ndim
        check_parts(self, lengths, whole[axis], axis)
        return axis

    def adjoint(self, grad: Tensor) -> Adjoint:
        axis, is_root = self.axis % grad.ndim, self.comm.rank == self.root
        length, uniform, shape = grad.shape[axis], self.uniform, self.input_shape
        call = Gather(self.comm.reverse, axis, length, self.root, uniform=uniform)
        if uniform:
            shape = with_length(grad.shape, axis, length * self.comm.size)
        # An empty tensor's sum is zero, and depends on it: differentiated again, all ranks reach
        # the Gather.
        return Adjoint(
            call, grad, lambda gathered: gathered if is_root else gathered.sum().expand(shape)
        )

    def batched(self, size: int) -> Scatter:
        return replace(self, axis=self.axis + (self.axis >= 0))

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        return with_length(shape, self.axis, self.length)

    def fields(self, x: Tensor) -> Fields:
        return AlongAxis.fields(self, x) if self.uniform else (self.name, self.arguments())

    def arguments(self) -> str:
        return f"axis={self.axis}, root={self.root}"


@dataclass(slots=True, eq=False)
class Alltoall(AlongAxis):
    name = "Alltoall"
    axis: int  # along which it gathers
    scatteraxis: int
    numelem: int
    length: int  # of the input along axis: what the derivative asks for

    def numbers(self, x: Tensor) -> Sequence[int]:
        return (self.numelem, x.shape[self.axis])

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        wanted, held = zip(*numbers, strict=True)
        g, s = self.axis, self.scatteraxis
        there = sum(held) if g == s else x.shape[s]
        check_parts(self, wanted, there, s)
        sending, parts, total = _cuts(tuple(x.shape), g, s, wanted, held, self.comm.rank)
        blocks = Blocks.cut(x, sending, s)
        received = Blocks.empty(x.dtype, parts, x.device)
        requests = self.comm.transport.alltoall(blocks, received, total, arrived)
        return Started(requests, received.joined, blocks)

    def adjoint(self, grad: Tensor) -> Adjoint:
        g, s, uniform = self.scatteraxis, self.axis, self.uniform
        call = Alltoall(self.comm.reverse, g, s, self.length, grad.shape[g], uniform=uniform)
        return Adjoint(call, grad)

    def batched(self, size: int) -> Alltoall:
        return replace(self, axis=self.axis + 1, scatteraxis=self.scatteraxis + 1)

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        gathered = with_length(shape, self.axis, shape[self.axis] * self.comm.size)
        return with_length(gathered, self.scatteraxis, self.numelem)

    def arguments(self) -> str:
        return f"gatheraxis={self.axis}, scatteraxis={self.scatteraxis}"


@functools.lru_cache(maxsize=128)
def _cuts(
    shape: tuple[int, ...],
    gatheraxis: int,
    scatteraxis: int,
    wanted: tuple[int, ...],
    held: tuple[int, ...],
    rank: int,
) -> tuple[list[int], Layout, int]:
    """Return what ``rank`` sends, as lengths, what it receives, and how many elements all hold."""
    if gatheraxis == scatteraxis:
        old, new, peers = _borders(held), _borders(wanted), range(len(wanted))
        sending = [_overlap(old[rank : rank + 2], new[peer : peer + 2]) for peer in peers]
        lengths = [_overlap(old[peer : peer + 2], new[rank : rank + 2]) for peer in peers]
    else:
        sending, lengths = list(wanted), [wanted[rank]] * len(wanted)
    shapes = []
    for length, own in zip(held, lengths, strict=True):
        theirs = with_length(shape, gatheraxis, length)
        shapes.append(tuple(with_length(theirs, scatteraxis, own)))
    total = math.prod(with_length(shape, gatheraxis, sum(held)))
    return sending, layout(tuple(shapes), gatheraxis), total


def _borders(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def _overlap(a: list[int], b: list[int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


@dataclass(slots=True, eq=False)
class Alltoallv(AlongAxis):
    name = "Alltoallv"
    sent: Sequence[int]
    axis: int
    received: Sequence[int] = field(default=(), init=False)  # how much comes from each rank

    def numbers(self, x: Tensor) -> Sequence[int]:
        return (x.numel(),)

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        transport, size = self.comm.transport, self.comm.size
        counts = Blocks.cut(torch.tensor(self.sent), [1] * size, 0)
        coming = Blocks.empty(torch.int64, counts.layout)
        requests = transport.alltoall(counts, coming, size, arrived)
        self.received = Started(requests, coming.joined, counts).finish(self).tolist()
        blocks = Blocks.cut(x, self.sent, self.axis)
        layout = parts(tuple(x.shape), tuple(self.received), self.axis)
        received = Blocks.empty(x.dtype, layout, x.device)
        total = sum([count for (count,) in numbers])
        return Started(
            transport.alltoall(blocks, received, total, arrived), received.joined, blocks
        )

    def adjoint(self, grad: Tensor) -> Adjoint:
        return Adjoint(Alltoallv(self.comm.reverse, self.received, self.axis), grad)


def is_uniform(comm: Comm, x: Tensor, axis: int, length: int) -> bool:
    """Return whether a compiled graph holds a call that gets ``length`` along ``axis`` of ``x``.

    In the graph, all ranks are assumed to pass tensors of one shape and to get equal parts.
    """
    return is_compiling() and length * comm.size == x.shape[axis]


def allgather(comm: Comm, x: Tensor, axis: int, uniform: bool = False) -> Plan:
    """Concatenate all ranks' ``x`` along ``axis`` on every rank."""
    axis = axis_of(axis, x)
    return Allgather(comm, axis, uniform=uniform or is_compiling()), x, unchanged


def gather(comm: Comm, x: Tensor, axis: int, root: int, uniform: bool = False) -> Plan:
    """Concatenate all ranks' ``x`` along ``axis`` on root; others get an empty tensor."""
    axis = axis_of(axis, x)
    call = Gather(
        comm, axis, x.shape[axis], comm.check_rank(root), uniform=uniform or is_compiling()
    )
    return call, x, unchanged


def scatter(
    comm: Comm, x: Tensor, axis: int, length: int, root: int, uniform: bool = False
) -> Plan:
    """Return a part of root's ``x`` along ``axis``, of the length that this rank asks for.

    Other ranks' tensors are not read. If it is ``uniform``, they have the shape of root's.
    """
    comm.check_rank(root)
    if uniform or is_compiling():
        axis = axis_of(axis, x)
        uniform = uniform or is_uniform(comm, x, axis, length)
    return Scatter(comm, axis, length, root, uniform=uniform), x, unchanged


def alltoall(
    comm: Comm, x: Tensor, gatheraxis: int, scatteraxis: int, numelem: int, uniform: bool = False
) -> Plan:
    """Gather along ``gatheraxis``, and scatter along ``scatteraxis``: ``numelem`` to this rank."""
    g, s = axis_of(gatheraxis, x), axis_of(scatteraxis, x)
    uniform = uniform or (g != s and is_uniform(comm, x, s, numelem))
    return Alltoall(comm, g, s, numelem, x.shape[g], uniform=uniform), x, unchanged


def alltoallv(comm: Comm, x: Tensor, sendcounts: Sequence[int], axis: int) -> Plan:
    """Send ``sendcounts[r]`` along ``axis`` to rank r, and join what comes in the ranks' order."""
    axis = axis_of(axis, x)
    sent = check_counts(sendcounts, comm.size, x.shape[axis])
    return Alltoallv(comm, sent, axis), x, unchanged

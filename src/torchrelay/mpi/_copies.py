"""Bcast, Gather, Allgather and Scatter: copy the tensors of ranks, or parts of them.

Gather and Scatter are each other's derivatives. Those of Bcast and Allgather sum the cotangents of
all ranks: Reduce and Reduce_scatter. What only root's tensor decides has none for those of others.

Replicate marks a tensor, equal on all ranks, as used differently by each from here on. It
communicates nothing forward. Under the convention "replicated" it is the conjugate of Allreduce:
its derivative sums the cotangents of the ranks. Under "sum" it is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from torchrelay.errors import ArgumentError
from torchrelay.mpi._dtypes import CODES, DTYPES, Op
from torchrelay.mpi._headers import MAX_NUMBERS, Fields
from torchrelay.mpi._memory import (
    Blocks,
    any_length,
    axis_of,
    check_counts,
    fresh,
    fresh_like,
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
    "Bcast",
    "Gather",
    "Replicate",
    "allgather",
    "gather",
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
    known: Sequence[int] | None = None
    found: Sequence[int] = field(default=(), init=False)  # the same, once it is exchanged

    def numbers(self, x: Tensor) -> Sequence[int]:
        return (x.shape[self.axis],)

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        self.found = [length for (length,) in numbers]
        layout = parts(tuple(x.shape), tuple(self.found), self.axis)
        received = Blocks.empty(x.dtype, layout, x.device)
        requests = self.comm.transport.allgather(x, received, arrived)
        return Started(requests, received.joined, x)

    def adjoint(self, grad: Tensor) -> Adjoint:
        rank, reverse, lengths = self.comm.rank, self.comm.reverse, self.known or self.found
        if self.comm.convention == "replicated":
            start, length = sum(lengths[:rank]), lengths[rank]
            return own_use(self.comm, grad, lambda whole: whole.narrow(self.axis, start, length))
        scatter = conjugate("ReduceScatter")
        return Adjoint(scatter(reverse, Op.SUM, self.axis, lengths[rank], self.known), grad)

    def in_graph(self, x: Tensor) -> Allgather:
        known = self.known or [x.shape[self.axis]] * self.comm.size
        return Allgather(self.comm, self.axis, known)

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        assert self.known is not None
        return with_length(shape, self.axis, sum(self.known))


@dataclass(slots=True, eq=False)
class Gather(AlongAxis):
    name = "Gather"
    axis: int
    length: int
    root: int
    known: Sequence[int] | None = None

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
        if self.known and self.comm.rank != self.root:  # give the shape of root's cotangent
            shape = with_length(grad.shape, self.axis, sum(self.known))
            grad = grad.sum().expand(shape)  # zero, since it is empty
        call = Scatter(self.comm.reverse, self.axis, self.length, self.root, self.known)
        return Adjoint(call, grad)

    def in_graph(self, x: Tensor) -> Gather:
        known = self.known or [self.length] * self.comm.size
        return Gather(self.comm, self.axis, self.length, self.root, known)

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        assert self.known is not None
        return with_length(shape, self.axis, sum(self.known) if self.comm.rank == self.root else 0)

    def arguments(self) -> str:
        return f"axis={self.axis}, root={self.root}"


@dataclass(slots=True, eq=False)
class Scatter(Call):
    name = "Scatter"
    axis: int
    length: int
    root: int
    known: Sequence[int] | None = None
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
        axis = self.axis % grad.ndim
        call = Gather(self.comm.reverse, axis, grad.shape[axis], self.root, self.known)
        is_root = self.comm.rank == self.root
        shape = with_length(grad.shape, axis, sum(self.known)) if self.known else self.input_shape
        # An empty tensor's sum is zero, and depends on it: differentiated again, all ranks reach
        # the Gather.
        return Adjoint(
            call, grad, lambda gathered: gathered if is_root else gathered.sum().expand(shape)
        )

    def batched(self) -> Scatter:
        return replace(self, axis=self.axis + (self.axis >= 0))

    def in_graph(self, x: Tensor) -> Scatter | None:
        if self.known:
            return self
        axis, size = axis_of(self.axis, x), self.comm.size
        if self.length * size != x.shape[axis]:
            return None
        return Scatter(self.comm, axis, self.length, self.root, [self.length] * size)

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        return with_length(shape, self.axis, self.length)

    def fields(self, x: Tensor) -> Fields:
        if not self.known:
            return (self.name, self.arguments())
        return (self.name, self.arguments(), x.dtype, any_length(x, self.axis, self.known))

    def arguments(self) -> str:
        return f"axis={self.axis}, root={self.root}"


def allgather(comm: Comm, x: Tensor, axis: int, counts: Sequence[int] | None = None) -> Plan:
    """Concatenate all ranks' ``x`` along ``axis`` on every rank; ``counts`` are their lengths."""
    axis = axis_of(axis, x)
    return Allgather(comm, axis, _lengths(comm, x, axis, counts)), x, unchanged


def gather(
    comm: Comm, x: Tensor, axis: int, root: int, counts: Sequence[int] | None = None
) -> Plan:
    """Concatenate all ranks' ``x`` along ``axis`` on root; others get an empty tensor."""
    axis = axis_of(axis, x)
    known = _lengths(comm, x, axis, counts)
    return Gather(comm, axis, x.shape[axis], comm.check_rank(root), known), x, unchanged


def scatter(comm: Comm, x: Tensor, axis: int, root: int, lengths: int | list[int]) -> Plan:
    """Return a part of root's ``x`` along ``axis``, of the length that this rank asks for.

    Other ranks' tensors are not read. If the ``lengths`` of all ranks are given, they have the
    shape of root's.
    """
    comm.check_rank(root)
    if not isinstance(lengths, list):
        return Scatter(comm, axis, lengths, root), x, unchanged
    axis = axis_of(axis, x)
    known = check_counts(lengths, comm.size, x.shape[axis])
    return Scatter(comm, axis, known[comm.rank], root, known), x, unchanged


def _lengths(
    comm: Comm, x: Tensor, axis: int, counts: Sequence[int] | None
) -> Sequence[int] | None:
    """Check the lengths that the ranks send along ``axis``."""
    if (
        counts is not None
        and check_counts(counts, comm.size, sum(counts))[comm.rank] != (x.shape[axis])
    ):
        raise ArgumentError(
            f"rank {comm.rank} has {x.shape[axis]} along axis {axis}, and {list(counts)} says "
            f"{counts[comm.rank]}"
        )
    return counts

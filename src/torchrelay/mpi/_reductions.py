"""Allreduce, Reduce, Reduce_scatter, Scan and Exscan: reduce the tensors of ranks elementwise.

The derivative of a sum is a communication: Allreduce, Bcast, Allgather, or a scan in the reverse
order of ranks. MAX, MIN and PROD are not linear: if a derivative is wanted, they gather, and reduce
locally. The derivative of MAX and MIN is then split equally between the ranks that hold the
extremum, and that of PROD is right at zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchrelay.mpi._copies import Allgather, Alltoall, Bcast, is_uniform, own_use
from torchrelay.mpi._dtypes import (
    ARITHMETIC,
    LOGICAL,
    NATIVE,
    Op,
    check_op,
    check_reduction,
    check_tensor,
    is_differentiable,
)
from torchrelay.mpi._headers import Fields, exchange_values, payload_bytes
from torchrelay.mpi._inplace import overwrite
from torchrelay.mpi._memory import (
    Blocks,
    axis_of,
    fresh,
    fresh_like,
    packed,
    placed,
    with_length,
)
from torchrelay.mpi._record import (
    Adjoint,
    AlongAxis,
    Call,
    Plan,
    Started,
    check_parts,
    is_differentiated,
    nothing_of,
    record,
    run,
    unchanged,
)
from torchrelay.mpi._settings import settings

if TYPE_CHECKING:
    from torchrelay.mpi._comm import Comm

__all__ = [
    "Allreduce",
    "Exscan",
    "Located",
    "Scan",
    "allreduce",
    "allreduce_located",
    "reduce",
    "reduce_",
    "reduce_scatter",
    "scan",
]


@dataclass(slots=True, eq=False)
class Reduction(Call):
    """A call that reduces."""

    op: Op

    def __post_init__(self) -> None:
        check_reduction(self.op)

    def differentiable(self, x: Tensor) -> bool:
        return is_differentiable(x.dtype) and self.op in ARITHMETIC

    def arguments(self) -> str:
        return self.op.value


def linear(call: Reduction, x: Tensor, gathered: Callable[[], Plan]) -> Plan:
    """Return how to reduce ``x`` by ``call``, or as ``gathered`` if its derivative needs more.

    Logical operations are computed on bool.

    Raises:
        ArgumentError: ``x`` is no tensor, or the operation needs an order, which complex numbers
            lack.
    """
    check_tensor(x)
    if call.op in LOGICAL and x.dtype is not torch.bool:
        return call, x != 0, lambda y: y.to(x.dtype)
    if call.op is Op.SUM or not (is_differentiated() and call.differentiable(x)):
        return call, x, unchanged
    check_op(x.dtype, call.op)
    return gathered()


def _gathered(comm: Comm, x: Tensor, op: Op, complete: Callable[[Tensor], Tensor]) -> Plan:
    """Return how to compute a result from the tensors of all ranks."""
    return Allgather(comm, 0, op, uniform=True), x.unsqueeze(0), complete


def reduce_locally(parts: Tensor, op: Op) -> Tensor:
    """Reduce ``parts`` along their first axis with MAX, MIN or PROD, differentiably."""
    if op is Op.PROD:
        return parts.prod(0)
    return parts.amax(0) if op is Op.MAX else parts.amin(0)


# Allreduce


@dataclass(slots=True, eq=False)
class Allreduce(Reduction):
    name = "Allreduce"

    def forward(self, x: Tensor) -> Tensor:
        """Exchange small tensors with the headers, and reduce them here."""
        native = NATIVE.get((x.dtype, self.op))
        size = self.comm.size
        if native is None or size == 1 or x.numel() * x.itemsize > payload_bytes(size):
            return Call.forward(self, x)
        source = packed(x)  # the header travels through this host
        result = torch.empty_like(source)
        exchange_values(self, source, result, *native)
        return result if source is x else placed(result, x)

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        result = fresh_like(x)
        requests = self.comm.transport.allreduce(x, result, self.op, arrived)
        return Started(requests, lambda: result, x)

    def adjoint(self, grad: Tensor) -> Adjoint:
        if self.comm.convention == "replicated":
            return own_use(self.comm, grad)
        return Adjoint(Allreduce(self.comm.reverse, Op.SUM), grad)


class Located(NamedTuple):
    """Result of MAXLOC and MINLOC.

    Attributes:
        values: each element's extremum.
        ranks: the lowest rank that holds it.
    """

    values: Tensor
    ranks: Tensor


def allreduce(comm: Comm, x: Tensor, op: Op) -> Plan:
    """Reduce all ranks' ``x``, of one shape and dtype, elementwise on every rank."""
    # Under its convention: all ranks reduce to the same.
    return linear(
        Allreduce(comm, op), x, lambda: _gathered(comm, x, op, partial(reduce_locally, op=op))
    )


def allreduce_located(comm: Comm, x: Tensor, op: Op) -> Located:
    """Reduce with MAXLOC or MINLOC."""
    values = run(*allreduce(comm, x, Op.MAX if op is Op.MAXLOC else Op.MIN))
    here = torch.where(x.detach() == values.detach(), comm.rank, comm.size)
    return Located(values, record(Allreduce(comm, Op.MIN), here))


# Reduce


@dataclass(slots=True, eq=False)
class Reduce(Reduction):
    name = "Reduce"
    root: int

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        is_root = self.comm.rank == self.root
        result = x if self.overwrites else fresh_like(x)
        requests = self.comm.transport.reduce(x, result, self.op, self.root, arrived)
        return Started(requests, lambda: result if is_root else result.zero_(), x)

    def adjoint(self, grad: Tensor) -> Adjoint:
        return Adjoint(Bcast(self.comm.reverse.replace(convention="sum"), self.root), grad)

    def arguments(self) -> str:
        return f"{self.op.value}, root={self.root}"


def reduce(comm: Comm, x: Tensor, op: Op, root: int) -> Plan:
    """Reduce all ranks' ``x`` on root into new memory, with zeros on the others."""
    call, is_root = Reduce(comm, op, comm.check_rank(root)), comm.rank == root

    def complete(parts: Tensor) -> Tensor:
        # Differentiated again, all ranks must communicate alike.
        y = reduce_locally(parts, op)
        return y if is_root else nothing_of(y)

    return linear(call, x, lambda: _gathered(comm.replace("sum"), x, op, complete))


def reduce_(comm: Comm, x: Tensor, op: Op, root: int) -> Tensor:
    """Call :func:`reduce` into ``x`` itself."""
    call = Reduce(comm, op, comm.check_rank(root))
    if op is Op.SUM:
        return overwrite(call, x)
    return overwrite(call, x, lambda t: run(*reduce(comm, t.clone(), op, root)))


# Reduce_scatter


@dataclass(slots=True, eq=False)
class ReduceScatter(Reduction, AlongAxis):
    name = "Reduce_scatter"
    axis: int
    length: int

    def numbers(self, x: Tensor) -> Sequence[int]:
        return (self.length,)

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        lengths = [length for (length,) in numbers]
        check_parts(self, lengths, x.shape[self.axis], self.axis)
        if x.numel() > settings.max_count:
            total, before = fresh_like(x), sum(lengths[: self.comm.rank])
            requests = self.comm.transport.allreduce(x, total, self.op, arrived)
            return Started(
                requests, lambda: total.narrow(self.axis, before, self.length).clone(), x
            )
        blocks = Blocks.cut(x, lengths, self.axis)
        result = fresh(with_length(x.shape, self.axis, self.length), x.dtype, x.device)
        requests = self.comm.transport.reduce_scatter(blocks, result, self.op, arrived)
        return Started(requests, lambda: result, blocks)

    def adjoint(self, grad: Tensor) -> Adjoint:
        reverse = self.comm.reverse.replace(convention="sum")
        return Adjoint(Allgather(reverse, self.axis, uniform=self.uniform), grad)

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        return with_length(shape, self.axis, self.length)

    def fields(self, x: Tensor) -> Fields:
        return (self.name, self.arguments(), x.dtype, x.shape)

    def arguments(self) -> str:
        return f"{self.op.value}, axis={self.axis}"


def reduce_scatter(
    comm: Comm, x: Tensor, op: Op, axis: int, length: int, uniform: bool = False
) -> Plan:
    """Return a part along ``axis`` of the reduction of all ranks' ``x``, of one shape and dtype.

    It has the ``length`` that this rank asks for; if it is ``uniform``, as all others do.
    """
    axis = axis_of(axis, x)
    uniform = uniform or is_uniform(comm, x, axis, length)
    return linear(
        ReduceScatter(comm, op, axis, length, uniform=uniform),
        x,
        lambda: (
            Alltoall(comm, 0, axis + 1, length, 1, uniform=uniform),
            x.unsqueeze(0),
            partial(reduce_locally, op=op),
        ),
    )


# Scan and Exscan


@dataclass(slots=True, eq=False)
class Scan(Reduction):
    name = "Scan"
    exclusive: ClassVar[bool] = False
    descending: int = False  # from the last rank to the first: the derivative

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        result = fresh_like(x)
        requests = self.comm.transport.scan(
            x, result, self.op, self.exclusive, bool(self.descending), arrived
        )
        first = self.comm.size - 1 if self.descending else 0
        is_undefined = self.exclusive and self.comm.rank == first
        return Started(requests, lambda: result.zero_() if is_undefined else result, x)

    def adjoint(self, grad: Tensor) -> Adjoint:
        return Adjoint(type(self)(self.comm.reverse, Op.SUM, not self.descending), grad)

    def arguments(self) -> str:
        return f"{self.op.value}, from the last rank" if self.descending else self.op.value


class Exscan(Scan):
    __slots__ = ()
    name = "Exscan"
    exclusive = True


def scan(kind: type[Scan], comm: Comm, x: Tensor, op: Op) -> Plan:
    """Reduce the ``x`` of ranks 0 to this one, elementwise; without this one's if exclusive."""
    before = comm.rank + (not kind.exclusive)

    def complete(parts: Tensor) -> Tensor:
        return reduce_locally(parts[:before], op) if before else parts[:0].sum(0)

    return linear(kind(comm, op), x, lambda: _gathered(comm.replace("sum"), x, op, complete))

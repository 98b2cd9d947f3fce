"""Reduce_scatter: reduce the tensors of all ranks and cut the result along an axis.

The derivative of a sum copies the cotangent of every part to all ranks: Allgather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from torchrelay.errors import ArgumentError
from torchrelay.mpi._allreduce import DIFFERENTIABLE, is_gathered, reduce_locally
from torchrelay.mpi._alltoall import alltoall
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._dtypes import Op, check_reduction, is_differentiable
from torchrelay.mpi._headers import Fields
from torchrelay.mpi._layout import Blocks, any_length, axis_of, with_length
from torchrelay.mpi._memory import fresh, fresh_like
from torchrelay.mpi._record import Adjoint, AlongAxis, Started, conjugate, record
from torchrelay.mpi._settings import settings

__all__ = ["reduce_scatter"]


@dataclass(slots=True, eq=False)
class ReduceScatter(AlongAxis):
    name = "Reduce_scatter"
    op: Op
    axis: int
    length: int
    known: Sequence[int] | None = None

    def __post_init__(self) -> None:
        check_reduction(self.op)

    def numbers(self, x: Tensor) -> Sequence[int]:
        return (self.length,)

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        lengths = [length for (length,) in numbers]
        if min(lengths) < 0 or sum(lengths) != x.shape[self.axis]:
            raise ArgumentError(
                f"{self.describe()}: the ranks ask for {lengths}, together {sum(lengths)}, but the "
                f"tensors have {x.shape[self.axis]} along axis {self.axis}"
            )
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
        gather = conjugate("Allgather")
        return Adjoint(
            gather(self.comm.reverse.replace(convention="sum"), self.axis, self.known), grad
        )

    def differentiable(self, x: Tensor) -> bool:
        return is_differentiable(x.dtype) and self.op in DIFFERENTIABLE

    def in_graph(self, x: Tensor) -> ReduceScatter | None:
        size = self.comm.size
        if self.known:
            return self
        if self.length * size != x.shape[self.axis]:
            return None
        return ReduceScatter(self.comm, self.op, self.axis, self.length, [self.length] * size)

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        return with_length(shape, self.axis, self.length)

    def fields(self, x: Tensor) -> Fields:
        shape = any_length(x, self.axis, self.known) if self.known else x.shape
        return (self.function, self.arguments(), x.dtype, shape)

    def arguments(self) -> str:
        return f"{self.op.value}, axis={self.axis}"


def reduce_scatter(comm: Comm, x: Tensor, op: Op, axis: int, numelem: int) -> Tensor:
    """Return this rank's ``numelem`` along ``axis`` of the reduction of all ranks' ``x``.

    Shapes and dtypes are equal. If a derivative is wanted, MAX, MIN and PROD reduce locally after
    an Alltoall.
    """
    axis = axis_of(axis, x.ndim)
    call = ReduceScatter(comm, op, axis, numelem)
    if not is_gathered(call, x):
        return record(call, x)
    parts = alltoall(comm, x.unsqueeze(0), 0, axis + 1, numelem)
    return reduce_locally(parts, op)

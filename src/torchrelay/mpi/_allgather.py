"""Allgather: concatenate the tensors of all ranks on every rank.

The derivative sums the cotangents of all ranks for each rank's part: Reduce_scatter.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchrelay.mpi._comm import Comm
from torchrelay.mpi._dtypes import Op
from torchrelay.mpi._headers import Fields
from torchrelay.mpi._layout import Blocks, any_length, axis_of, parts, with_length
from torchrelay.mpi._record import Adjoint, Call, Started, conjugate, record
from torchrelay.mpi._replicate import own_use

__all__ = ["allgather"]


class Allgather(Call):
    __slots__ = ("axis", "known", "lengths")
    name = "Allgather"
    parameters = ("axis", "known")

    def __init__(self, comm: Comm, axis: int, known: Sequence[int] | None = None) -> None:
        self.comm = comm
        self.axis = axis
        self.known = known  # the ranks' lengths along the axis, if they need no exchange
        self.lengths: Sequence[int] = known or ()  # the same, once they are known

    def numbers(self, x: Tensor) -> Sequence[int]:
        return (x.shape[self.axis],)

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        self.lengths = [length for (length,) in numbers]
        layout = parts(tuple(x.shape), tuple(self.lengths), self.axis)
        received = Blocks.empty(x.dtype, layout, x.device)
        requests = self.comm.transport.allgather(x, received, arrived)
        return Started(requests, received.joined, x)

    def adjoint(self, grad: Tensor) -> Adjoint:
        rank, reverse = self.comm.rank, self.comm.reverse
        if self.comm.convention == "replicated":
            start, length = sum(self.lengths[:rank]), self.lengths[rank]
            return own_use(self.comm, grad, lambda whole: whole.narrow(self.axis, start, length))
        scatter = conjugate("ReduceScatter")
        return Adjoint(scatter(reverse, Op.SUM, self.axis, self.lengths[rank], self.known), grad)

    def batched(self) -> Allgather:
        return Allgather(self.comm, self.axis + 1, self.known)

    def in_graph(self, x: Tensor) -> Allgather:
        return (
            self
            if self.known
            else Allgather(self.comm, self.axis, [x.shape[self.axis]] * self.comm.size)
        )

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        assert self.known is not None
        return with_length(shape, self.axis, sum(self.known))

    def fields(self, x: Tensor) -> Fields:
        return (self.function, self.arguments(), x.dtype, any_length(x, self.axis, self.known))

    def arguments(self) -> str:
        return f"axis={self.axis}"


def allgather(comm: Comm, x: Tensor, axis: int) -> Tensor:
    """Concatenate all ranks' ``x`` along ``axis`` on every rank. Lengths along it may differ."""
    return record(Allgather(comm, axis_of(axis, x.ndim)), x)

"""Allgather: concatenate the tensors of all ranks on every rank.

The derivative sums the cotangents of all ranks for each rank's part: Reduce_scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from torchrelay.mpi._comm import Comm
from torchrelay.mpi._dtypes import Op
from torchrelay.mpi._layout import Blocks, axis_of, parts, with_length
from torchrelay.mpi._record import Adjoint, AlongAxis, Started, conjugate, record
from torchrelay.mpi._replicate import own_use

__all__ = ["allgather"]


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


def allgather(comm: Comm, x: Tensor, axis: int) -> Tensor:
    """Concatenate all ranks' ``x`` along ``axis`` on every rank. Lengths along it may differ."""
    return record(Allgather(comm, axis_of(axis, x.ndim)), x)

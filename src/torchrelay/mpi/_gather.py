"""Gather: concatenate the tensors of all ranks on root.

The derivative scatters root's cotangent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from torchrelay.mpi._comm import Comm
from torchrelay.mpi._layout import Blocks, axis_of, parts, with_length
from torchrelay.mpi._record import Adjoint, AlongAxis, Started, conjugate, record

__all__ = ["gather"]


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
        scatter = conjugate("Scatter")
        return Adjoint(
            scatter(self.comm.reverse, self.axis, self.length, self.root, self.known), grad
        )

    def in_graph(self, x: Tensor) -> Gather:
        known = self.known or [self.length] * self.comm.size
        return Gather(self.comm, self.axis, self.length, self.root, known)

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        assert self.known is not None
        return with_length(shape, self.axis, sum(self.known) if self.comm.rank == self.root else 0)

    def arguments(self) -> str:
        return f"axis={self.axis}, root={self.root}"


def gather(comm: Comm, x: Tensor, axis: int, root: int) -> Tensor:
    """Concatenate all ranks' ``x`` along ``axis`` on root; others get an empty tensor."""
    axis = axis_of(axis, x.ndim)
    return record(Gather(comm, axis, x.shape[axis], comm.check_rank(root)), x)

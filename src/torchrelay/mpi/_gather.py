"""Gather: concatenate the tensors of all ranks on root.

The derivative scatters root's cotangent.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchrelay.mpi._comm import Comm
from torchrelay.mpi._headers import Fields
from torchrelay.mpi._layout import Blocks, any_length, axis_of, parts, with_length
from torchrelay.mpi._record import Adjoint, Call, Started, conjugate, record

__all__ = ["gather"]


class Gather(Call):
    __slots__ = ("axis", "known", "length", "root")
    name = "Gather"
    parameters = ("axis", "length", "root", "known")

    def __init__(
        self, comm: Comm, axis: int, length: int, root: int, known: Sequence[int] | None = None
    ) -> None:
        self.comm = comm
        self.axis = axis
        self.length = length
        self.root = root
        self.known = known  # the ranks' lengths along the axis, if they need no exchange

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

    def batched(self) -> Gather:
        return Gather(self.comm, self.axis + 1, self.length, self.root, self.known)

    def in_graph(self, x: Tensor) -> Gather:
        if self.known:
            return self
        return Gather(self.comm, self.axis, self.length, self.root, [self.length] * self.comm.size)

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        assert self.known is not None
        return with_length(shape, self.axis, sum(self.known) if self.comm.rank == self.root else 0)

    def fields(self, x: Tensor) -> Fields:
        return (self.function, self.arguments(), x.dtype, any_length(x, self.axis, self.known))

    def arguments(self) -> str:
        return f"axis={self.axis}, root={self.root}"


def gather(comm: Comm, x: Tensor, axis: int, root: int) -> Tensor:
    """Concatenate all ranks' ``x`` along ``axis`` on root; others get an empty tensor."""
    axis = axis_of(axis, x.ndim)
    return record(Gather(comm, axis, x.shape[axis], comm.check_rank(root)), x)

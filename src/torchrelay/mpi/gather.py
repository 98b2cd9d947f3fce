"""Gather: root gets all ranks' tensors, one after the other along an axis.

The derivative scatters root's cotangent the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from torchrelay.mpi._exchange import axis_of, gather_blocks, layout, packed, placed
from torchrelay.mpi._meeting import agree, described, exchange_headers, known_headers
from torchrelay.mpi._record import Adjoint, Call, Started, record

if TYPE_CHECKING:
    from torchrelay.mpi.communicator import Communicator

__all__ = ["gather"]


class Gather(Call):
    __slots__ = ("axis", "known", "length", "root")
    name = "Gather"

    def __init__(
        self, comm: Communicator, axis: int, length: int, root: int, known: Sequence[int] | None = None
    ) -> None:
        self.comm = comm
        self.axis = axis
        self.length = length
        self.root = root
        self.known = known  # the ranks' lengths along the axis, if none need be told

    def start(self, x: Tensor) -> Started:
        headers = known_headers(x, self.axis, self.known) if self.known else exchange_headers(self, x)
        agree(self, headers, self.axis)
        parts = layout(tuple([h.shape for h in headers]), self.axis)
        moving = gather_blocks(self, packed(x), parts, self.root, self.known is None)
        if self.comm.rank != self.root:
            return Started(moving.requests, lambda: x.new_empty(headers[0].block(self.axis, 0)), moving)
        return Started(moving.requests, lambda: placed(moving.received.joined(), x), moving)

    def adjoint(self, grad: Tensor) -> Adjoint:
        from torchrelay.mpi.scatter import Scatter  # noqa: PLC0415 - each is the other's derivative

        if self.known and self.comm.rank != self.root:  # tell the shape of root's cotangent
            shape = list(grad.shape)
            shape[self.axis] = sum(self.known)
            grad = grad.sum().expand(shape)  # zero, since it is empty
        return Adjoint(Scatter(self.comm.reverse, self.axis, self.length, self.root, self.known), grad)

    def batched(self) -> Gather:
        return Gather(self.comm, self.axis + 1, self.length, self.root, self.known)

    def signature(self, x: Tensor) -> str:
        return f"{self.terms()} of {described(x, self.axis, self.known)}"

    def arguments(self) -> str:
        return f"axis={self.axis}, root={self.root}"


def gather(comm: Communicator, x: Tensor, axis: int, root: int) -> Tensor:
    """All ranks' ``x`` along ``axis`` on root; on the others an empty tensor. Lengths along ``axis`` may differ."""
    axis = axis_of(axis, x.ndim)
    return record(Gather(comm, axis, x.shape[axis], comm.check_rank(root)), x)

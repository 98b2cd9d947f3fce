"""Gather: root gets all ranks' tensors, one after the other along an axis.

The derivative scatters root's cotangent the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from torchrelay.mpi._exchange import agree, axis_of, exchange_headers, gather_blocks, join, packed, placed
from torchrelay.mpi._record import Call, record

if TYPE_CHECKING:
    from torchrelay.mpi.communicator import Communicator

__all__ = ["gather"]


class Gather(Call):
    __slots__ = ("axis", "length", "root")
    name = "Gather"

    def __init__(self, comm: Communicator, axis: int, length: int, root: int) -> None:
        self.comm = comm
        self.axis = axis
        self.length = length
        self.root = root

    def forward(self, x: Tensor) -> Tensor:
        headers = exchange_headers(self, x)
        agree(self, headers, self.axis)
        gathered = gather_blocks(self, packed(x), [h.shape for h in headers], self.root)
        if gathered is None:
            return x.new_empty(headers[0].block(self.axis, 0))
        return placed(join(gathered[0], self.axis, gathered[1]), x)

    def backward(self, grad: Tensor, *saved: Tensor) -> Tensor:
        from torchrelay.mpi.scatter import scatter  # noqa: PLC0415 - each is the other's derivative

        return scatter(self.comm.reverse, grad, self.axis, self.length, self.root)

    def batched(self) -> Gather:
        return Gather(self.comm, self.axis + 1, self.length, self.root)

    def signature(self, x: Tensor) -> str:
        return f"{self.describe()} of {x.dtype} with {x.ndim} axes"

    def arguments(self) -> str:
        return f"axis={self.axis}, root={self.root}"


def gather(comm: Communicator, x: Tensor, axis: int, root: int) -> Tensor:
    """All ranks' ``x`` along ``axis`` on root; on the others an empty tensor. Lengths along ``axis`` may differ."""
    axis = axis_of(axis, x.ndim)
    return record(Gather(comm, axis, x.shape[axis], comm.check_rank(root)), x)

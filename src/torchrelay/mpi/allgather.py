"""Allgather: every rank gets all ranks' tensors, one after the other along an axis.

The derivative sums, for each rank's part, the cotangents of all ranks: Reduce_scatter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from torchrelay.mpi._dtypes import Op
from torchrelay.mpi._exchange import agree, allgather_blocks, axis_of, exchange_headers, join, packed, placed
from torchrelay.mpi._record import Call, record

if TYPE_CHECKING:
    from torchrelay.mpi.communicator import Communicator

__all__ = ["allgather"]


class Allgather(Call):
    __slots__ = ("axis", "lengths")
    name = "Allgather"

    def __init__(self, comm: Communicator, axis: int) -> None:
        self.comm = comm
        self.axis = axis
        self.lengths: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        headers = exchange_headers(self, x)
        agree(self, headers, self.axis)
        self.lengths = [h.shape[self.axis] for h in headers]
        blocks, flat = allgather_blocks(self, packed(x), [h.shape for h in headers])
        return placed(join(blocks, self.axis, flat), x)

    def backward(self, grad: Tensor, *saved: Tensor) -> Tensor:
        rank = self.comm.rank
        if self.comm.convention == "replicated":
            return grad.narrow(self.axis, sum(self.lengths[:rank]), self.lengths[rank])
        from torchrelay.mpi.reduce_scatter import reduce_scatter  # noqa: PLC0415 - each is the other's derivative

        return reduce_scatter(self.comm.reverse, grad, Op.SUM, self.axis, self.lengths[rank])

    def batched(self) -> Allgather:
        return Allgather(self.comm, self.axis + 1)

    def signature(self, x: Tensor) -> str:
        return f"{self.describe()} of {x.dtype} with {x.ndim} axes"

    def arguments(self) -> str:
        return f"axis={self.axis}"


def allgather(comm: Communicator, x: Tensor, axis: int) -> Tensor:
    """All ranks' ``x`` along ``axis``, on every rank. Lengths along ``axis`` may differ."""
    return record(Allgather(comm, axis_of(axis, x.ndim)), x)

"""Bcast: every rank gets root's tensor.

The derivative sums all ranks' cotangents on root; the others' tensors have had no influence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchrelay.mpi._dtypes import Op, buffer
from torchrelay.mpi._exchange import packed, pieces, placed
from torchrelay.mpi._inplace import overwrite
from torchrelay.mpi._record import Call, record
from torchrelay.mpi._wait import finish

if TYPE_CHECKING:
    from torchrelay.mpi.communicator import Communicator

__all__ = ["bcast", "bcast_"]


class Bcast(Call):
    __slots__ = ("root",)
    name = "Bcast"

    def __init__(self, comm: Communicator, root: int) -> None:
        self.comm = comm
        self.root = root

    def forward(self, x: Tensor) -> Tensor:
        source = packed(x)
        result = source.clone() if self.comm.rank == self.root else torch.empty_like(source)
        self.run(result)
        return placed(result, x)

    def run(self, memory: Tensor) -> None:
        for (piece,) in pieces(memory):
            finish(self.comm.mpi.Ibcast(buffer(piece), self.root), self)

    def backward(self, grad: Tensor, *saved: Tensor) -> Tensor:
        if self.comm.convention == "replicated":
            return grad if self.comm.rank == self.root else torch.zeros_like(grad)
        from torchrelay.mpi.reduce import reduce  # noqa: PLC0415 - each is the other's derivative

        return reduce(self.comm.reverse, grad, Op.SUM, self.root)

    def arguments(self) -> str:
        return f"root={self.root}"


class BcastInPlace(Bcast):
    __slots__ = ()
    name = "Bcast_"
    overwrites = True

    def forward(self, x: Tensor) -> Tensor:
        self.run(x)
        return x


def bcast(comm: Communicator, x: Tensor, root: int) -> Tensor:
    """Root's ``x`` on every rank, in new memory; all ranks give tensors of one shape and dtype."""
    return record(Bcast(comm, comm.check_rank(root)), x)


def bcast_(comm: Communicator, x: Tensor, root: int) -> Tensor:
    """As :func:`bcast`, into ``x`` itself."""
    comm.check_rank(root)
    return overwrite(BcastInPlace(comm, root), Bcast(comm, root), x)

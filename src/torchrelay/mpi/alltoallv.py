"""Alltoallv: every rank sends as much as it likes of its tensor's first axis to each.

The derivative sends the parts' cotangents back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from torchrelay.errors import ArgumentError
from torchrelay.mpi._exchange import alltoall_blocks, axis_of, packed, placed
from torchrelay.mpi._library import MPI
from torchrelay.mpi._record import Adjoint, Call, Started, record
from torchrelay.mpi._wait import finish

if TYPE_CHECKING:
    from torchrelay.mpi.communicator import Communicator

__all__ = ["alltoallv"]


class Alltoallv(Call):
    __slots__ = ("axis", "received", "sent")
    name = "Alltoallv"

    def __init__(self, comm: Communicator, sent: Sequence[int], axis: int) -> None:
        self.comm = comm
        self.sent = list(sent)
        self.axis = axis
        self.received: list[int] = []

    def start(self, x: Tensor) -> Started:
        size = self.comm.size
        counts = np.empty((size, size), np.int64)
        mine = np.array(self.sent, np.int64)
        finish(self.comm.mpi.Iallgather((mine, size, MPI.INT64_T), (counts, size, MPI.INT64_T)), self)
        self.received = counts[:, self.comm.rank].tolist()
        shapes = [(*x.shape[: self.axis], n, *x.shape[self.axis + 1 :]) for n in self.received]
        inner = math.prod(n for axis, n in enumerate(x.shape) if axis != self.axis)
        blocks = packed(x).split_with_sizes(self.sent, self.axis)
        moving = alltoall_blocks(self, blocks, x.dtype, shapes, int(counts.sum()) * inner)
        return Started(moving.requests, lambda: placed(moving.joined(self.axis), x), moving)

    def adjoint(self, grad: Tensor) -> Adjoint:
        return Adjoint(Alltoallv(self.comm.reverse, self.received, self.axis), grad)

    def batched(self) -> Alltoallv:
        return Alltoallv(self.comm, self.sent, self.axis + 1)

    def signature(self, x: Tensor) -> str:
        return f"{self.describe()} of {x.dtype} with {x.ndim} axes"

    def arguments(self) -> str:
        return f"axis={self.axis}"


def alltoallv(comm: Communicator, x: Tensor, sendcounts: Sequence[int], axis: int) -> Tensor:
    """``sendcounts[r]`` along ``axis`` go to rank r; what comes is joined in the order of ranks."""
    axis = axis_of(axis, x.ndim)
    if len(sendcounts) != comm.size or min(sendcounts) < 0 or sum(sendcounts) != x.shape[axis]:
        raise ArgumentError(
            f"Alltoallv: {list(sendcounts)} must be {comm.size} numbers, together the {x.shape[axis]} along axis {axis}"
        )
    return record(Alltoallv(comm, sendcounts, axis), x)

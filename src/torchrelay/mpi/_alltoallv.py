"""Alltoallv: send a part of any length to each rank.

The derivative sends the cotangents of the parts back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from torchrelay.errors import ArgumentError, MismatchError
from torchrelay.mpi import _operations
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._headers import Fields
from torchrelay.mpi._layout import Blocks, any_length, axis_of, parts
from torchrelay.mpi._library import MPI
from torchrelay.mpi._record import Adjoint, Call, Started, record
from torchrelay.mpi._settings import settings
from torchrelay.mpi._wait import Testable, failed, finish

__all__ = ["alltoallv"]


class Counts:
    """A started exchange of what each rank sends to each.

    ``Test`` raises if it is not what this rank expects.
    """

    __slots__ = ("call", "expected", "received", "request", "sent")

    def __init__(self, call: Alltoallv, expected: Sequence[int] | None = None) -> None:
        self.call = call
        self.expected = expected
        self.sent = np.array(call.sent, np.int64)
        self.received = np.zeros(len(call.sent), np.int64)
        self.request = call.comm.mpi.Ialltoall(
            (self.sent, 1, MPI.INT64_T), (self.received, 1, MPI.INT64_T)
        )

    def Test(self) -> bool:
        if not self.request.Test():
            return False
        if self.expected is not None:
            for rank, (wanted, given) in enumerate(zip(self.expected, self.received, strict=True)):
                if wanted != given:
                    comm = self.call.comm
                    raise failed(
                        MismatchError(
                            f"rank {comm.rank}: {self.call.describe()} in two steps on "
                            f"{comm.name} expects {wanted} from rank {rank}, which sends {given}"
                        )
                    )
        return True


class Alltoallv(Call):
    __slots__ = ("axis", "known", "received", "sent")
    name = "Alltoallv"

    def __init__(
        self, comm: Comm, sent: Sequence[int], axis: int, known: Sequence[int] | None = None
    ) -> None:
        self.comm = comm
        self.sent = list(sent)
        self.axis = axis
        self.known = known  # how much comes from each rank, if that needs no exchange
        self.received: list[int] = []

    def numbers(self, x: Tensor) -> Sequence[int]:
        return (x.numel(),)

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        total = sum([count for (count,) in numbers])
        if self.known:
            self.received, total = list(self.known), max(sum(self.sent), sum(self.known))
            total *= math.prod(x.shape[: self.axis]) * math.prod(x.shape[self.axis + 1 :])
            if total > settings.max_count:
                raise ArgumentError(
                    f"{self.describe()} in two steps carries at most {settings.max_count} elements"
                )
        counts = Counts(self, self.known)
        if not self.known:
            finish(counts, self, counts)
            self.received = counts.received.tolist()
        blocks = Blocks.cut(x, self.sent, self.axis)
        layout = parts(tuple(x.shape), tuple(self.received), self.axis)
        moving = _operations.alltoall(self.comm, blocks, layout, total, arrived)
        requests: list[Testable] = [counts] if self.known else []
        requests += moving.requests
        return Started(requests, moving.received.joined, (moving, counts))

    def adjoint(self, grad: Tensor) -> Adjoint:
        return Adjoint(
            Alltoallv(
                self.comm.reverse, self.received, self.axis, self.sent if self.known else None
            ),
            grad,
        )

    def batched(self) -> Alltoallv:
        return Alltoallv(self.comm, self.sent, self.axis + 1, self.known)

    def in_graph(self, x: Tensor) -> None:
        """What comes depends on the others' counts."""

    def fields(self, x: Tensor) -> Fields:
        return (self.function, self.arguments(), x.dtype, any_length(x, self.axis))

    def arguments(self) -> str:
        return f"axis={self.axis}"


def alltoallv(comm: Comm, x: Tensor, sendcounts: Sequence[int], axis: int) -> Tensor:
    """``sendcounts[r]`` along ``axis`` go to rank r; what comes is joined in the order of ranks."""
    axis = axis_of(axis, x.ndim)
    if len(sendcounts) != comm.size or min(sendcounts) < 0 or sum(sendcounts) != x.shape[axis]:
        raise ArgumentError(
            f"Alltoallv: {list(sendcounts)} must be {comm.size} numbers, together the "
            f"{x.shape[axis]} along axis {axis}"
        )
    return record(Alltoallv(comm, sendcounts, axis), x)

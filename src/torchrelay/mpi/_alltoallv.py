"""Alltoallv: send a part of any length to each rank.

The derivative sends the cotangents of the parts back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchrelay.errors import ArgumentError, MismatchError
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._headers import Fields
from torchrelay.mpi._layout import Blocks, any_length, axis_of, parts
from torchrelay.mpi._record import Adjoint, AlongAxis, Started, record
from torchrelay.mpi._settings import settings
from torchrelay.mpi._transport import Testable
from torchrelay.mpi._wait import failed, finish

__all__ = ["alltoallv"]


class Counts:
    """A started exchange of what each rank sends to each.

    ``Test`` raises if it is not what this rank expects.
    """

    __slots__ = ("call", "expected", "received", "requests", "sent")

    def __init__(self, call: Alltoallv, arrived: bool, expected: Sequence[int] | None) -> None:
        self.call = call
        self.expected = expected
        size = len(call.sent)
        self.sent = Blocks.cut(torch.tensor(call.sent), [1] * size, 0)
        self.received = Blocks.empty(torch.int64, self.sent.layout)
        transport = call.comm.transport
        self.requests = list(transport.alltoall(self.sent, self.received, size, arrived))

    def Test(self) -> bool:
        if not all(request.Test() for request in self.requests):
            return False
        if self.expected is not None:
            for rank, (wanted, given) in enumerate(zip(self.expected, self.lengths(), strict=True)):
                if wanted != given:
                    comm = self.call.comm
                    raise failed(
                        MismatchError(
                            f"rank {comm.rank}: {self.call.describe()} in two steps on "
                            f"{comm.name} expects {wanted} from rank {rank}, which sends {given}"
                        )
                    )
        return True

    def lengths(self) -> list[int]:
        """Return how much comes from each rank, once it is known."""
        lengths: list[int] = self.received.memory.tolist()
        return lengths


@dataclass(slots=True, eq=False)
class Alltoallv(AlongAxis):
    name = "Alltoallv"
    sent: Sequence[int]
    axis: int
    known: Sequence[int] | None = None  # how much comes from each rank
    received: Sequence[int] = field(default=(), init=False)

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
        counts = Counts(self, arrived, self.known)
        if self.known:
            self.comm.transport.begin_after(counts)
        else:
            finish(counts, self, counts)
            self.received = counts.lengths()
        blocks = Blocks.cut(x, self.sent, self.axis)
        layout = parts(tuple(x.shape), tuple(self.received), self.axis)
        received = Blocks.empty(x.dtype, layout, x.device)
        requests: list[Testable] = [counts] if self.known else []
        requests += self.comm.transport.alltoall(blocks, received, total, arrived)
        return Started(requests, received.joined, (blocks, counts))

    def adjoint(self, grad: Tensor) -> Adjoint:
        return Adjoint(
            Alltoallv(
                self.comm.reverse, self.received, self.axis, self.sent if self.known else None
            ),
            grad,
        )

    def in_graph(self, x: Tensor) -> None:
        """What comes depends on the others' counts."""

    def fields(self, x: Tensor) -> Fields:
        return (self.function, self.arguments(), x.dtype, any_length(x, self.axis))


def alltoallv(comm: Comm, x: Tensor, sendcounts: Sequence[int], axis: int) -> Tensor:
    """``sendcounts[r]`` along ``axis`` go to rank r; what comes is joined in the order of ranks."""
    axis = axis_of(axis, x.ndim)
    if len(sendcounts) != comm.size or min(sendcounts) < 0 or sum(sendcounts) != x.shape[axis]:
        raise ArgumentError(
            f"Alltoallv: {list(sendcounts)} must be {comm.size} numbers, together the "
            f"{x.shape[axis]} along axis {axis}"
        )
    return record(Alltoallv(comm, list(sendcounts), axis), x)

"""Alltoallv: send a part of any length to each rank.

The derivative sends the cotangents of the parts back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from torchrelay.errors import ArgumentError, MismatchError
from torchrelay.mpi._check import Counts, exchange_counts
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._exchange import alltoall_blocks
from torchrelay.mpi._layout import Blocks, axis_of, parts
from torchrelay.mpi._meeting import MAX_DIMS, agree, exchange_headers
from torchrelay.mpi._memory import packed, placed
from torchrelay.mpi._record import Adjoint, Call, Started, record
from torchrelay.mpi._settings import settings

__all__ = ["alltoallv"]


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

    def start(self, x: Tensor) -> Started:
        if self.known:
            self.received, most = list(self.known), max(sum(self.sent), sum(self.known))
            if most * self._inner(x) > settings.max_count:
                raise ArgumentError(
                    f"{self.describe()} in two steps carries at most {settings.max_count} elements"
                )
            started = self._start(x, 0)
            width = self._inner(x) * x.itemsize
            told = Counts(self, [n * width for n in self.sent], [n * width for n in self.received])
            return Started([told, *started.requests], started.result, started)
        if self.comm.size > MAX_DIMS:
            headers = exchange_headers(self, x)
            agree(self, headers, self.axis)
            self.received = exchange_counts(self, self.sent)  # which do not fit into the headers
            return self._start(x, sum([math.prod(h.shape) for h in headers]))
        headers = exchange_headers(self, x, self._inner(x), tuple(self.sent))
        if len({(h.dtype, h.number) for h in headers}) > 1:
            given = "; ".join(f"rank {r}: {h.number} of {h.dtype}" for r, h in enumerate(headers))
            raise MismatchError(
                f"{self.describe()} on {self.comm.name}: the ranks' tensors differ in dtype, or in "
                f"elements along the other axes ({given})"
            )
        self.received = [h.shape[self.comm.rank] for h in headers]
        return self._start(x, sum([sum(h.shape) for h in headers]) * self._inner(x))

    def _inner(self, x: Tensor) -> int:
        return math.prod(x.shape[: self.axis]) * math.prod(x.shape[self.axis + 1 :])

    def _start(self, x: Tensor, total: int) -> Started:
        blocks = Blocks.cut(packed(x), self.sent, self.axis)
        layout = parts(tuple(x.shape), tuple(self.received), self.axis)
        moving = alltoall_blocks(self, blocks, layout, total, not self.known)
        return Started(moving.requests, lambda: placed(moving.received.joined(), x), moving)

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

    def signature(self, x: Tensor) -> str:
        return f"{self.terms()} of {x.dtype} with {x.ndim} axes"

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

"""Alltoall and Alltoallv: every rank sends a part of its tensor to every rank.

Alltoall gathers along one axis and scatters along another; with equal axes, parts move between
ranks. Its derivative exchanges the axes. Alltoallv sends a part of any length to each rank, and its
derivative sends the cotangents of the parts back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchrelay.errors import ArgumentError, MismatchError
from torchrelay.mpi._memory import (
    Blocks,
    Layout,
    any_length,
    axis_of,
    check_counts,
    layout,
    parts,
    with_length,
)
from torchrelay.mpi._record import Adjoint, AlongAxis, Call, Plan, Started, check_parts, unchanged
from torchrelay.mpi._settings import settings
from torchrelay.mpi._wait import failed, finish

if TYPE_CHECKING:
    from torchrelay.mpi._comm import Comm
    from torchrelay.mpi._headers import Fields
    from torchrelay.mpi._transport import Testable

__all__ = ["Alltoall", "Alltoallv", "alltoall", "alltoallv"]


@dataclass(slots=True, eq=False)
class Alltoall(Call):
    name = "Alltoall"
    gatheraxis: int
    scatteraxis: int
    numelem: int
    length: int  # of the input along gatheraxis: what the derivative asks for
    uniform: int = False

    def numbers(self, x: Tensor) -> Sequence[int]:
        return (self.numelem, x.shape[self.gatheraxis])

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        wanted, held = zip(*numbers, strict=True)
        g, s = self.gatheraxis, self.scatteraxis
        there = sum(held) if g == s else x.shape[s]
        check_parts(self, wanted, there, s)
        sending, parts, total = _cuts(tuple(x.shape), g, s, wanted, held, self.comm.rank)
        blocks = Blocks.cut(x, sending, s)
        received = Blocks.empty(x.dtype, parts, x.device)
        requests = self.comm.transport.alltoall(blocks, received, total, arrived)
        return Started(requests, received.joined, blocks)

    def adjoint(self, grad: Tensor) -> Adjoint:
        g, s = self.scatteraxis, self.gatheraxis
        call = Alltoall(self.comm.reverse, g, s, self.length, grad.shape[g], self.uniform)
        return Adjoint(call, grad)

    def batched(self) -> Alltoall:
        return replace(self, gatheraxis=self.gatheraxis + 1, scatteraxis=self.scatteraxis + 1)

    def in_graph(self, x: Tensor) -> Alltoall | None:
        g, s = self.gatheraxis, self.scatteraxis
        if self.uniform:
            return self
        if g == s or self.numelem * self.comm.size != x.shape[s]:
            return None
        return Alltoall(self.comm, g, s, self.numelem, self.length, True)

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        gathered = with_length(shape, self.gatheraxis, shape[self.gatheraxis] * self.comm.size)
        return with_length(gathered, self.scatteraxis, self.numelem)

    def fields(self, x: Tensor) -> Fields:
        shape = x.shape if self.uniform else any_length(x, self.gatheraxis)
        return (self.name, self.arguments(), x.dtype, shape)

    def arguments(self) -> str:
        return f"gatheraxis={self.gatheraxis}, scatteraxis={self.scatteraxis}"


@functools.lru_cache(maxsize=128)
def _cuts(
    shape: tuple[int, ...],
    gatheraxis: int,
    scatteraxis: int,
    wanted: tuple[int, ...],
    held: tuple[int, ...],
    rank: int,
) -> tuple[list[int], Layout, int]:
    """Return what ``rank`` sends, as lengths, what it receives, and how many elements all hold."""
    if gatheraxis == scatteraxis:
        old, new, peers = _borders(held), _borders(wanted), range(len(wanted))
        sending = [_overlap(old[rank : rank + 2], new[peer : peer + 2]) for peer in peers]
        lengths = [_overlap(old[peer : peer + 2], new[rank : rank + 2]) for peer in peers]
    else:
        sending, lengths = list(wanted), [wanted[rank]] * len(wanted)
    shapes = []
    for length, own in zip(held, lengths, strict=True):
        theirs = with_length(shape, gatheraxis, length)
        shapes.append(tuple(with_length(theirs, scatteraxis, own)))
    total = math.prod(with_length(shape, gatheraxis, sum(held)))
    return sending, layout(tuple(shapes), gatheraxis), total


def _borders(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def _overlap(a: list[int], b: list[int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


class Counts:
    """A started exchange of what each rank sends to each.

    ``Test`` raises if it is not what the call expects.
    """

    __slots__ = ("call", "received", "requests", "sent")

    def __init__(self, call: Alltoallv, arrived: bool) -> None:
        self.call = call
        size = len(call.sent)
        self.sent = Blocks.cut(torch.tensor(call.sent), [1] * size, 0)
        self.received = Blocks.empty(torch.int64, self.sent.layout)
        transport = call.comm.transport
        self.requests = list(transport.alltoall(self.sent, self.received, size, arrived))

    def Test(self) -> bool:
        if not all(request.Test() for request in self.requests):
            return False
        comm, sent = self.call.comm, self.lengths()
        for rank, (wanted, given) in enumerate(zip(self.call.known or sent, sent, strict=True)):
            if wanted != given:
                raise failed(
                    MismatchError(
                        f"rank {comm.rank}: {self.call.describe()} in two steps on {comm.name} "
                        f"expects {wanted} from rank {rank}, which sends {given}"
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
        counts = Counts(self, arrived)
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
        back = self.sent if self.known else None
        return Adjoint(Alltoallv(self.comm.reverse, self.received, self.axis, back), grad)

    def in_graph(self, x: Tensor) -> None:
        """What comes depends on the others' counts."""

    def fields(self, x: Tensor) -> Fields:
        return (self.name, self.arguments(), x.dtype, any_length(x, self.axis))


def alltoall(
    comm: Comm, x: Tensor, gatheraxis: int, scatteraxis: int, numelem: int, uniform: bool = False
) -> Plan:
    """Gather along ``gatheraxis`` and scatter along ``scatteraxis``.

    This rank gets ``numelem`` along ``scatteraxis``; if it is ``uniform``, as all others do.
    """
    g, s = axis_of(gatheraxis, x), axis_of(scatteraxis, x)
    return Alltoall(comm, g, s, numelem, x.shape[g], uniform), x, unchanged


def alltoallv(
    comm: Comm,
    x: Tensor,
    sendcounts: Sequence[int],
    axis: int,
    recvcounts: Sequence[int] | None = None,
) -> Plan:
    """Send ``sendcounts[r]`` along ``axis`` to rank r; what comes is joined in the order of ranks.

    ``recvcounts`` are the lengths that come, if they are known.
    """
    axis = axis_of(axis, x)
    sent = check_counts(sendcounts, comm.size, x.shape[axis])
    if recvcounts is not None:
        check_counts(recvcounts, comm.size, sum(recvcounts))
    return Alltoallv(comm, sent, axis, recvcounts), x, unchanged

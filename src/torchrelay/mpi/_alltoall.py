"""Alltoall: gather along one axis and scatter along another.

With equal axes, parts move between ranks. The derivative exchanges the axes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import Tensor

from torchrelay.errors import ArgumentError
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._headers import Fields
from torchrelay.mpi._layout import Blocks, Layout, any_length, axis_of, layout, with_length
from torchrelay.mpi._record import Adjoint, Call, Started, record

__all__ = ["alltoall"]


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
        if min(wanted) < 0 or sum(wanted) != there:
            raise ArgumentError(
                f"{self.describe()}: the ranks ask for {list(wanted)}, together {sum(wanted)}, but "
                f"there are {there} along axis {s}"
            )
        sending, parts, total = _plan(tuple(x.shape), g, s, wanted, held, self.comm.rank)
        blocks = Blocks.cut(x, sending, s)
        received = Blocks.empty(x.dtype, parts, x.device)
        requests = self.comm.transport.alltoall(blocks, received, total, arrived)
        return Started(requests, received.joined, blocks)

    def adjoint(self, grad: Tensor) -> Adjoint:
        gatheraxis, scatteraxis = self.scatteraxis, self.gatheraxis
        length = grad.shape[gatheraxis]
        call = Alltoall(
            self.comm.reverse, gatheraxis, scatteraxis, self.length, length, self.uniform
        )
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
        return (self.function, self.arguments(), x.dtype, shape)

    def arguments(self) -> str:
        return f"gatheraxis={self.gatheraxis}, scatteraxis={self.scatteraxis}"


@functools.lru_cache(maxsize=128)
def _plan(
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


def alltoall(comm: Comm, x: Tensor, gatheraxis: int, scatteraxis: int, numelem: int) -> Tensor:
    """Gather along ``gatheraxis`` and scatter along ``scatteraxis``.

    This rank gets ``numelem`` along ``scatteraxis``.
    """
    gatheraxis, scatteraxis = axis_of(gatheraxis, x.ndim), axis_of(scatteraxis, x.ndim)
    return record(Alltoall(comm, gatheraxis, scatteraxis, numelem, x.shape[gatheraxis]), x)

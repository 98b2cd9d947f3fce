"""Alltoall: gather along one axis and scatter along another.

With equal axes, parts move between ranks. The derivative exchanges the axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from torchrelay.errors import ArgumentError
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._exchange import alltoall_blocks
from torchrelay.mpi._layout import Blocks, axis_of, layout, with_length
from torchrelay.mpi._meeting import Header, agree, exchange_headers
from torchrelay.mpi._memory import packed, placed
from torchrelay.mpi._record import Adjoint, Call, Started, record

__all__ = ["alltoall"]


class Alltoall(Call):
    __slots__ = ("gatheraxis", "length", "numelem", "scatteraxis", "uniform")
    name = "Alltoall"
    parameters = ("gatheraxis", "scatteraxis", "numelem", "length", "uniform")

    def __init__(
        self,
        comm: Comm,
        gatheraxis: int,
        scatteraxis: int,
        numelem: int,
        length: int,
        uniform: int = False,
    ) -> None:
        self.comm = comm
        self.gatheraxis = gatheraxis
        self.scatteraxis = scatteraxis
        self.numelem = numelem
        self.uniform = uniform
        self.length = length  # of the input along gatheraxis: what the derivative asks for

    def start(self, x: Tensor) -> Started:
        if self.uniform:
            headers = [Header(self.numelem, x.dtype, tuple(x.shape))] * self.comm.size
        else:
            headers = exchange_headers(self, x, self.numelem)
        agree(self, headers, self.gatheraxis)
        sending, receiving = self._plan(headers)
        blocks = Blocks.cut(packed(x), sending, self.scatteraxis)
        shapes = [
            h.block(self.scatteraxis, length) for h, length in zip(headers, receiving, strict=True)
        ]
        total = sum([math.prod(h.shape) for h in headers])
        parts = layout(tuple(shapes), self.gatheraxis)
        moving = alltoall_blocks(self, blocks, parts, total, not self.uniform)
        return Started(moving.requests, lambda: placed(moving.received.joined(), x), moving)

    def _plan(self, headers: list[Header]) -> tuple[list[int], list[int]]:
        """How much along ``scatteraxis`` goes to each rank, and how much comes from each."""
        wanted = [h.number for h in headers]
        held = [h.shape[self.scatteraxis] for h in headers]
        rank, equal = self.comm.rank, self.gatheraxis == self.scatteraxis
        there = sum(held) if equal else held[rank]
        if min(wanted) < 0 or sum(wanted) != there:
            raise ArgumentError(
                f"{self.describe()}: the ranks ask for {wanted}, together {sum(wanted)}, but there "
                f"are {there} along axis {self.scatteraxis}"
            )
        if not equal:
            return wanted, [self.numelem] * len(headers)
        old, new = _borders(held), _borders(wanted)
        return (
            [_overlap(old[rank : rank + 2], new[peer : peer + 2]) for peer in range(len(headers))],
            [_overlap(old[peer : peer + 2], new[rank : rank + 2]) for peer in range(len(headers))],
        )

    def adjoint(self, grad: Tensor) -> Adjoint:
        gatheraxis, scatteraxis = self.scatteraxis, self.gatheraxis
        length = grad.shape[gatheraxis]
        call = Alltoall(
            self.comm.reverse, gatheraxis, scatteraxis, self.length, length, self.uniform
        )
        return Adjoint(call, grad)

    def batched(self) -> Alltoall:
        return Alltoall(
            self.comm,
            self.gatheraxis + 1,
            self.scatteraxis + 1,
            self.numelem,
            self.length,
            self.uniform,
        )

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

    def signature(self, x: Tensor) -> str:
        shape = tuple(x.shape) if self.uniform else f"with {x.ndim} axes"
        return f"{self.terms()} of {x.dtype} {shape}"

    def arguments(self) -> str:
        return f"gatheraxis={self.gatheraxis}, scatteraxis={self.scatteraxis}"


def _borders(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def _overlap(a: list[int], b: list[int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def alltoall(comm: Comm, x: Tensor, gatheraxis: int, scatteraxis: int, numelem: int) -> Tensor:
    """Gather along ``gatheraxis`` and scatter along ``scatteraxis``.

    This rank gets ``numelem`` along ``scatteraxis``.
    """
    gatheraxis, scatteraxis = axis_of(gatheraxis, x.ndim), axis_of(scatteraxis, x.ndim)
    return record(Alltoall(comm, gatheraxis, scatteraxis, numelem, x.shape[gatheraxis]), x)

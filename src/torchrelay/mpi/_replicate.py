"""Replicate: mark a tensor, equal on all ranks, as used differently by each from here on.

It communicates nothing forward. Under the convention "replicated" it is the conjugate of Allreduce:
its derivative sums the cotangents of the ranks. Under "sum" it is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from torchrelay.mpi._comm import Comm
from torchrelay.mpi._dtypes import Op
from torchrelay.mpi._record import (
    Adjoint,
    Call,
    Started,
    conjugate,
    is_differentiated,
    record,
    unchanged,
)

__all__ = ["own_use", "replicate"]


class Replicate(Call):
    __slots__ = ()
    name = "Replicate"

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        return Started([], x.clone)

    def adjoint(self, grad: Tensor) -> Adjoint:
        if self.comm.convention == "sum":
            return Adjoint(None, grad)
        return Adjoint(conjugate("Allreduce")(self.comm.reverse, Op.SUM), grad)


def own_use(comm: Comm, grad: Tensor, complete: Callable[[Tensor], Tensor] = unchanged) -> Adjoint:
    """Differentiate a function with equal results on all ranks, whose cotangent is ``grad``."""
    return Adjoint(Replicate(comm.reverse) if is_differentiated() else None, grad, complete)


def replicate(comm: Comm, x: Tensor) -> Tensor:
    """Return a copy of ``x``, which is equal on all ranks."""
    return record(Replicate(comm), x)

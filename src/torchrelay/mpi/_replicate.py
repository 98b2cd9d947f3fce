"""Replicate: marks a tensor that all ranks hold alike and go on to use each in its own way.

It communicates nothing forward. Under the convention "replicated" it is Allreduce's conjugate: its derivative
sums the ranks' cotangents, so that each rank has that of the whole. Under "sum" it is the identity.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from torchrelay.mpi._comm import Comm
from torchrelay.mpi._dtypes import Op
from torchrelay.mpi._record import Adjoint, Call, Started, conjugate, is_differentiated, record, unchanged

__all__ = ["own_use", "replicate"]


class Replicate(Call):
    __slots__ = ()
    name = "Replicate"

    def start(self, x: Tensor) -> Started:
        return Started([], x.clone)

    def adjoint(self, grad: Tensor) -> Adjoint:
        if self.comm.convention == "sum":
            return Adjoint(None, grad)
        return Adjoint(conjugate("Allreduce")(self.comm.reverse, Op.SUM), grad)


def own_use(comm: Comm, grad: Tensor, complete: Callable[[Tensor], Tensor] = unchanged) -> Adjoint:
    """The derivative of what gives all ranks the same: ``grad``, from here on used by each rank in its own way."""
    return Adjoint(Replicate(comm.reverse) if is_differentiated() else None, grad, complete)


def replicate(comm: Comm, x: Tensor) -> Tensor:
    """A copy of ``x``, which all ranks hold alike."""
    return record(Replicate(comm), x)

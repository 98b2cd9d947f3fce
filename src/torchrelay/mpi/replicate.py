"""Replicate: marks a tensor that all ranks hold alike and go on to use each in its own way.

It communicates nothing forward. Under the convention "replicated" it is Allreduce's conjugate: its derivative
sums the ranks' cotangents, so that each rank has that of the whole. Under "sum" it is the identity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from torchrelay.mpi._dtypes import Op
from torchrelay.mpi._record import Adjoint, Call, Started, record
from torchrelay.mpi.allreduce import Allreduce

if TYPE_CHECKING:
    from torchrelay.mpi.communicator import Communicator

__all__ = ["replicate"]


class Replicate(Call):
    __slots__ = ()
    name = "Replicate"

    def start(self, x: Tensor) -> Started:
        return Started([], x.clone)

    def adjoint(self, grad: Tensor) -> Adjoint:
        if self.comm.convention == "sum":
            return Adjoint(None, grad)
        return Adjoint(Allreduce(self.comm.reverse, Op.SUM), grad)


def replicate(comm: Communicator, x: Tensor) -> Tensor:
    """A copy of ``x``, which all ranks hold alike."""
    return record(Replicate(comm), x)

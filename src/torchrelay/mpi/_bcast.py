"""Bcast: copy root's tensor to every rank.

The derivative sums the cotangents of all ranks on root. The tensors of other ranks have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from torchrelay.mpi._comm import Comm
from torchrelay.mpi._dtypes import Op
from torchrelay.mpi._inplace import overwrite
from torchrelay.mpi._memory import fresh_like
from torchrelay.mpi._record import (
    Adjoint,
    Call,
    Started,
    conjugate,
    nothing_of,
    record,
    unchanged,
)
from torchrelay.mpi._replicate import own_use

__all__ = ["bcast", "bcast_"]


@dataclass(slots=True, eq=False)
class Bcast(Call):
    name = "Bcast"
    root: int

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        is_root = self.comm.rank == self.root
        result = x.clone() if is_root else fresh_like(x)
        requests = self.comm.transport.broadcast(result, self.root, arrived)
        return Started(requests, lambda: result)

    def adjoint(self, grad: Tensor) -> Adjoint:
        if self.comm.convention == "replicated":
            return own_use(
                self.comm, grad, unchanged if self.comm.rank == self.root else nothing_of
            )
        return Adjoint(conjugate("Reduce")(self.comm.reverse, Op.SUM, self.root), grad)

    def arguments(self) -> str:
        return f"root={self.root}"


class BcastInPlace(Bcast):
    __slots__ = ()
    name = "Bcast_"
    overwrites = True

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        return Started(self.comm.transport.broadcast(x, self.root, arrived), lambda: x)


def bcast(comm: Comm, x: Tensor, root: int) -> Tensor:
    """Return root's ``x`` on every rank, in new memory. Shapes and dtypes are equal."""
    return record(Bcast(comm, comm.check_rank(root)), x)


def bcast_(comm: Comm, x: Tensor, root: int) -> Tensor:
    """Call :func:`bcast` into ``x`` itself."""
    comm.check_rank(root)
    return overwrite(BcastInPlace(comm, root), Bcast(comm, root), x)

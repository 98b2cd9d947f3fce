"""Reduce: reduce the tensors of all ranks on root, with zeros elsewhere.

The derivative of a sum copies root's cotangent to every rank: Bcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrelay.mpi._allreduce import DIFFERENTIABLE, allreduce, is_gathered
from torchrelay.mpi._bcast import Bcast
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._dtypes import LOGICAL, Op, check_reduction, is_differentiable
from torchrelay.mpi._inplace import overwrite
from torchrelay.mpi._memory import fresh_like
from torchrelay.mpi._record import Adjoint, Call, Started, nothing_of, record

__all__ = ["reduce", "reduce_"]


@dataclass(slots=True, eq=False)
class Reduce(Call):
    name = "Reduce"
    op: Op
    root: int

    def __post_init__(self) -> None:
        check_reduction(self.op)

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        is_root = self.comm.rank == self.root
        result = fresh_like(x) if is_root else torch.zeros_like(x)
        requests = self.comm.transport.reduce(x, result, self.op, self.root, arrived)
        return Started(requests, lambda: result, x)

    def adjoint(self, grad: Tensor) -> Adjoint:
        return Adjoint(Bcast(self.comm.reverse.replace(convention="sum"), self.root), grad)

    def differentiable(self, x: Tensor) -> bool:
        return is_differentiable(x.dtype) and self.op in DIFFERENTIABLE

    def arguments(self) -> str:
        return f"{self.op.value}, root={self.root}"


class ReduceInPlace(Reduce):
    __slots__ = ()
    name = "Reduce_"
    overwrites = True

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        is_root = self.comm.rank == self.root
        requests = self.comm.transport.reduce(x, x, self.op, self.root, arrived)
        return Started(requests, lambda: x if is_root else x.zero_())


def reduce(comm: Comm, x: Tensor, op: Op, root: int) -> Tensor:
    """Reduce all ranks' ``x`` on root into new memory, with zeros on the others."""
    comm.check_rank(root)
    if op in LOGICAL and x.dtype is not torch.bool:
        return record(Reduce(comm, op, root), x != 0).to(x.dtype)
    call = Reduce(comm, op, root)
    if is_gathered(call, x):
        y = allreduce(comm.replace(convention="sum"), x, op)
        return y if comm.rank == root else nothing_of(y)
    return record(call, x)


def reduce_(comm: Comm, x: Tensor, op: Op, root: int) -> Tensor:
    """Call :func:`reduce` into ``x`` itself."""
    comm.check_rank(root)
    if op is Op.SUM:
        return overwrite(ReduceInPlace(comm, op, root), Reduce(comm, op, root), x)
    return overwrite(None, lambda t: reduce(comm, t.clone(), op, root), x)

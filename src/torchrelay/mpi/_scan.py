"""Scan and Exscan: reduce the tensors of all ranks up to this one, or before it.

The derivative of a sum is a scan in the reverse order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchrelay.mpi._allgather import allgather
from torchrelay.mpi._allreduce import DIFFERENTIABLE, is_gathered, reduce_locally
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._dtypes import LOGICAL, Op, check_reduction, is_differentiable
from torchrelay.mpi._memory import fresh_like
from torchrelay.mpi._record import Adjoint, Call, Started, nothing_of, record

__all__ = ["exscan", "scan"]


@dataclass(slots=True, eq=False)
class Scan(Call):
    name = "Scan"
    exclusive: ClassVar[bool] = False
    op: Op
    descending: int = False  # from the last rank to the first: the derivative

    def __post_init__(self) -> None:
        check_reduction(self.op)

    def start(self, x: Tensor, numbers: Sequence[Sequence[int]], arrived: bool) -> Started:
        result = fresh_like(x)
        requests = self.comm.transport.scan(
            x, result, self.op, self.exclusive, bool(self.descending), arrived
        )
        first = self.comm.size - 1 if self.descending else 0
        is_undefined = self.exclusive and self.comm.rank == first
        return Started(requests, lambda: result.zero_() if is_undefined else result, x)

    def adjoint(self, grad: Tensor) -> Adjoint:
        return Adjoint(type(self)(self.comm.reverse, Op.SUM, not self.descending), grad)

    def differentiable(self, x: Tensor) -> bool:
        return is_differentiable(x.dtype) and self.op in DIFFERENTIABLE

    def arguments(self) -> str:
        return f"{self.op.value}, from the last rank" if self.descending else self.op.value


class Exscan(Scan):
    __slots__ = ()
    name = "Exscan"
    exclusive = True


def scan(comm: Comm, x: Tensor, op: Op) -> Tensor:
    """Reduce the ``x`` of ranks 0 to this one, elementwise."""
    return _scan(Scan, comm, x, op)


def exscan(comm: Comm, x: Tensor, op: Op) -> Tensor:
    """Reduce the ``x`` of all ranks before this one, elementwise; zeros on rank 0."""
    return _scan(Exscan, comm, x, op)


def _scan(kind: type[Scan], comm: Comm, x: Tensor, op: Op) -> Tensor:
    if op in LOGICAL and x.dtype is not torch.bool:
        return record(kind(comm, op), x != 0).to(x.dtype)
    call = kind(comm, op)
    if not is_gathered(call, x):
        return record(call, x)
    every = allgather(comm.replace(convention="sum"), x.unsqueeze(0), 0)
    before = every[: comm.rank + (not kind.exclusive)]
    if not len(before):
        return nothing_of(every[0])
    return reduce_locally(before, op)

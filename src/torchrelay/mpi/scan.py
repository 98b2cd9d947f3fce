"""Scan and Exscan: rank r gets the reduction of ranks 0 to r, or of those before r.

The derivative of a sum is a scan from the other end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchrelay.mpi._dtypes import LOGICAL, Op, buffer, is_differentiable, mpi_op
from torchrelay.mpi._exchange import fresh, packed, pieces, placed
from torchrelay.mpi._record import Adjoint, Started, Uniform, is_differentiated, nothing_of, record
from torchrelay.mpi.allgather import allgather
from torchrelay.mpi.allreduce import DIFFERENTIABLE, reduce_locally

if TYPE_CHECKING:
    from torchrelay.mpi.communicator import Communicator

__all__ = ["exscan", "scan"]


class Scan(Uniform):
    __slots__ = ("op",)
    name = "Scan"
    exclusive = False

    def __init__(self, comm: Communicator, op: Op) -> None:
        self.comm = comm
        self.op = op

    def start(self, x: Tensor) -> Started:
        source = packed(x)
        result = fresh(source.shape, source.dtype)
        op, mpi = mpi_op(x.dtype, self.op), self.comm.mpi
        start = mpi.Iexscan if self.exclusive else mpi.Iscan
        requests = [start(buffer(ours), buffer(total), op) for ours, total in pieces(source, result)]
        undefined = self.exclusive and self.comm.rank == 0
        return Started(requests, lambda: placed(result.zero_() if undefined else result, x), source)

    def adjoint(self, grad: Tensor) -> Adjoint:
        return Adjoint(type(self)(self.comm.reverse.from_the_end(), Op.SUM), grad)

    def differentiable(self, x: Tensor) -> bool:
        return is_differentiable(x.dtype) and self.op in DIFFERENTIABLE

    def arguments(self) -> str:
        return self.op.value


class Exscan(Scan):
    __slots__ = ()
    name = "Exscan"
    exclusive = True


def scan(comm: Communicator, x: Tensor, op: Op) -> Tensor:
    """The element-wise reduction of the ``x`` of ranks 0 to this one."""
    return _scan(Scan, comm, x, op)


def exscan(comm: Communicator, x: Tensor, op: Op) -> Tensor:
    """The element-wise reduction of the ``x`` of all ranks before this one; zeros on rank 0."""
    return _scan(Exscan, comm, x, op)


def _scan(kind: type[Scan], comm: Communicator, x: Tensor, op: Op) -> Tensor:
    if op in LOGICAL and x.dtype is not torch.bool:
        return record(kind(comm, op), x != 0).to(x.dtype)
    call = kind(comm, op)
    if op is Op.SUM or not (is_differentiated() and call.differentiable(x)):
        return record(call, x)
    every = allgather(comm.replace(convention="sum"), x.unsqueeze(0), 0)
    before = every[: comm.rank + (not kind.exclusive)]
    if not len(before):
        return nothing_of(every[0])
    return reduce_locally(before, op)

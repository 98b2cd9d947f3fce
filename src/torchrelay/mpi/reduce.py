"""Reduce: root gets the reduction of all ranks' tensors, the others zeros.

The derivative of a sum hands root's cotangent to every rank: Bcast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchrelay.mpi._dtypes import LOGICAL, Op, buffer, is_differentiable, mpi_op
from torchrelay.mpi._exchange import packed, pieces, placed
from torchrelay.mpi._inplace import overwrite
from torchrelay.mpi._library import MPI
from torchrelay.mpi._record import Adjoint, Call, Started, is_differentiated, nothing_of, record
from torchrelay.mpi.allreduce import DIFFERENTIABLE, allreduce
from torchrelay.mpi.bcast import Bcast

if TYPE_CHECKING:
    from torchrelay.mpi.communicator import Communicator

__all__ = ["reduce", "reduce_"]


class Reduce(Call):
    __slots__ = ("op", "root")
    name = "Reduce"

    def __init__(self, comm: Communicator, op: Op, root: int) -> None:
        self.comm = comm
        self.op = op
        self.root = root

    def start(self, x: Tensor) -> Started:
        source = packed(x)
        is_root = self.comm.rank == self.root
        result = torch.empty_like(source) if is_root else torch.zeros_like(source)
        op, start = mpi_op(x.dtype, self.op), self.comm.mpi.Ireduce
        requests = [
            start(buffer(ours), buffer(total) if is_root else None, op, self.root)
            for ours, total in pieces(source, result)
        ]
        return Started(requests, lambda: placed(result, x), source)

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

    def start(self, x: Tensor) -> Started:
        op, start = mpi_op(x.dtype, self.op), self.comm.mpi.Ireduce
        is_root = self.comm.rank == self.root
        requests = []
        for (ours,) in pieces(x):
            send, receive = (MPI.IN_PLACE, buffer(ours)) if is_root else (buffer(ours), None)
            requests.append(start(send, receive, op, self.root))
        return Started(requests, lambda: x if is_root else x.zero_())


def reduce(comm: Communicator, x: Tensor, op: Op, root: int) -> Tensor:
    """The element-wise reduction of all ranks' ``x`` on root, zeros on the others, in new memory."""
    comm.check_rank(root)
    if op in LOGICAL and x.dtype is not torch.bool:
        return record(Reduce(comm, op, root), x != 0).to(x.dtype)
    if op is not Op.SUM and is_differentiated() and Reduce(comm, op, root).differentiable(x):
        y = allreduce(comm.replace(convention="sum"), x, op)
        return y if comm.rank == root else nothing_of(y)
    return record(Reduce(comm, op, root), x)


def reduce_(comm: Communicator, x: Tensor, op: Op, root: int) -> Tensor:
    """As :func:`reduce`, into ``x`` itself."""
    comm.check_rank(root)
    if op is Op.SUM:
        return overwrite(ReduceInPlace(comm, op, root), Reduce(comm, op, root), x)
    return overwrite(None, lambda t: reduce(comm, t.clone(), op, root), x)

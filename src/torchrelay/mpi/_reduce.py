"""Reduce: reduce the tensors of all ranks on root, with zeros elsewhere.

The derivative of a sum copies root's cotangent to every rank: Bcast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrelay.mpi._allreduce import DIFFERENTIABLE, allreduce, is_gathered
from torchrelay.mpi._bcast import Bcast
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._dtypes import LOGICAL, Op, buffer, is_differentiable, mpi_op
from torchrelay.mpi._inplace import overwrite
from torchrelay.mpi._library import MPI
from torchrelay.mpi._meeting import is_large, meet
from torchrelay.mpi._memory import fresh, packed, pieces, placed
from torchrelay.mpi._record import Adjoint, Started, Uniform, nothing_of, record
from torchrelay.mpi._settings import settings

__all__ = ["reduce", "reduce_"]


class Reduce(Uniform):
    __slots__ = ("op", "root")
    name = "Reduce"
    parameters = ("op", "root")

    def __init__(self, comm: Comm, op: Op, root: int) -> None:
        self.comm = comm
        self.op = op
        self.root = root

    def forward(self, x: Tensor) -> Tensor:
        if not is_large(x) or x.numel() > settings.max_count:
            return super().forward(x)
        meet(self, self.signature(x))
        return self.reduce_large(x)

    def reduce_large(self, x: Tensor) -> Tensor:
        source = packed(x)
        is_root = self.comm.rank == self.root
        result = fresh(source.shape, source.dtype) if is_root else torch.zeros_like(source)
        into = buffer(result) if is_root else None
        self.comm.mpi.Reduce(buffer(source), into, mpi_op(x.dtype, self.op), self.root)
        return placed(result, x)

    def start(self, x: Tensor) -> Started:
        source = packed(x)
        is_root = self.comm.rank == self.root
        result = fresh(source.shape, source.dtype) if is_root else torch.zeros_like(source)
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

    def reduce_large(self, x: Tensor) -> Tensor:
        is_root = self.comm.rank == self.root
        send, into = (MPI.IN_PLACE, buffer(x)) if is_root else (buffer(x), None)
        self.comm.mpi.Reduce(send, into, mpi_op(x.dtype, self.op), self.root)
        return x if is_root else x.zero_()

    def start(self, x: Tensor) -> Started:
        op, start = mpi_op(x.dtype, self.op), self.comm.mpi.Ireduce
        is_root = self.comm.rank == self.root
        requests = []
        for (ours,) in pieces(x):
            send, receive = (MPI.IN_PLACE, buffer(ours)) if is_root else (buffer(ours), None)
            requests.append(start(send, receive, op, self.root))
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

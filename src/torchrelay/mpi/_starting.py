"""The methods that start non-blocking collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrelay.errors import ArgumentError
from torchrelay.mpi._allgather import Allgather
from torchrelay.mpi._allreduce import Allreduce, is_gathered, reduce_locally
from torchrelay.mpi._alltoall import Alltoall
from torchrelay.mpi._alltoallv import Alltoallv
from torchrelay.mpi._bcast import Bcast
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._dtypes import LOGICAL, Op
from torchrelay.mpi._gather import Gather
from torchrelay.mpi._layout import axis_of, equal_part
from torchrelay.mpi._nonblocking import CollectiveHandle, start
from torchrelay.mpi._record import Call
from torchrelay.mpi._reduce import Reduce
from torchrelay.mpi._reduce_scatter import ReduceScatter
from torchrelay.mpi._scan import Exscan, Scan
from torchrelay.mpi._scatter import Scatter

__all__ = ["NonBlocking"]


class NonBlocking(Comm):
    """The non-blocking collectives of a communicator.

    Do not change tensors before Wait. All ranks pass tensors of one shape, or the same counts.
    """

    def Iallreduce(self, tensor: Tensor, op: Op) -> CollectiveHandle:
        """Start :meth:`Allreduce`."""
        call = Allreduce(self, op)
        if not is_gathered(call, tensor):
            return _reduction(call, tensor, op)
        # Under its convention: all ranks reduce to the same.
        every = Allgather(self, 0, [1] * self.size)
        return start(every, tensor.unsqueeze(0), lambda parts: reduce_locally(parts, op))

    def Ibcast(self, tensor: Tensor, root: int) -> CollectiveHandle:
        """Start a broadcast of root's tensor into new memory."""
        return start(Bcast(self, self.check_rank(root)), tensor)

    def Ireduce(self, tensor: Tensor, op: Op, root: int) -> CollectiveHandle:
        """Start a reduction to root into new memory, with zeros elsewhere."""
        call, is_root = Reduce(self, op, self.check_rank(root)), self.rank == root
        if not is_gathered(call, tensor):
            return _reduction(call, tensor, op)
        # the others get an empty tensor, whose sum is zero and depends on it
        every = Gather(self, 0, 1, root, [1] * self.size)
        return start(
            every,
            tensor.unsqueeze(0),
            lambda parts: reduce_locally(parts, op) if is_root else parts.sum(0),
        )

    def Iscan(self, tensor: Tensor, op: Op) -> CollectiveHandle:
        """Start :meth:`Scan`."""
        return _scan(Scan(self, op), tensor)

    def Iexscan(self, tensor: Tensor, op: Op) -> CollectiveHandle:
        """Start :meth:`Exscan`."""
        return _scan(Exscan(self, op), tensor)

    def Igather(self, tensor: Tensor, gatheraxis: int, root: int) -> CollectiveHandle:
        """Start :meth:`Gather` of equal shapes."""
        return self.Igatherv(tensor, _lengths(self, tensor, gatheraxis), root, gatheraxis)

    def Igatherv(
        self, tensor: Tensor, counts: Sequence[int], root: int, axis: int = 0
    ) -> CollectiveHandle:
        """Start :meth:`Gatherv`; rank r sends ``counts[r]``."""
        axis, lengths = axis_of(axis, tensor.ndim), _own(self, tensor, counts, axis)
        return start(Gather(self, axis, tensor.shape[axis], self.check_rank(root), lengths), tensor)

    def Iallgather(self, tensor: Tensor, gatheraxis: int) -> CollectiveHandle:
        """Start :meth:`Allgather` of equal shapes."""
        return self.Iallgatherv(tensor, _lengths(self, tensor, gatheraxis), gatheraxis)

    def Iallgatherv(self, tensor: Tensor, counts: Sequence[int], axis: int = 0) -> CollectiveHandle:
        """Start :meth:`Allgatherv`; rank r sends ``counts[r]``."""
        axis, lengths = axis_of(axis, tensor.ndim), _own(self, tensor, counts, axis)
        return start(Allgather(self, axis, lengths), tensor)

    def Iscatter(self, tensor: Tensor, scatteraxis: int, root: int) -> CollectiveHandle:
        """Start :meth:`Scatter` in equal parts; all ranks pass a tensor of root's shape."""
        return self.Iscatterv(tensor, _parts(self, tensor, scatteraxis), root, scatteraxis)

    def Iscatterv(
        self, tensor: Tensor, counts: Sequence[int], root: int, axis: int = 0
    ) -> CollectiveHandle:
        """Start :meth:`Scatterv`; all ranks pass a tensor of root's shape."""
        axis = axis_of(axis, tensor.ndim)
        parts = _checked(self, counts, tensor.shape[axis])
        return start(Scatter(self, axis, parts[self.rank], self.check_rank(root), parts), tensor)

    def Ialltoall(self, tensor: Tensor, gatheraxis: int, scatteraxis: int) -> CollectiveHandle:
        """Start :meth:`Alltoall` in equal parts."""
        g, s = axis_of(gatheraxis, tensor.ndim), axis_of(scatteraxis, tensor.ndim)
        numelem = tensor.shape[s] if g == s else equal_part(tensor, s, self.size)
        return start(Alltoall(self, g, s, numelem, tensor.shape[g], True), tensor)

    def Ialltoallv(
        self, tensor: Tensor, sendcounts: Sequence[int], recvcounts: Sequence[int], axis: int = 0
    ) -> CollectiveHandle:
        """Start :meth:`Alltoallv`; rank r sends ``recvcounts[r]``."""
        axis = axis_of(axis, tensor.ndim)
        sent = _checked(self, sendcounts, tensor.shape[axis])
        received = _checked(self, recvcounts, sum(recvcounts))
        return start(Alltoallv(self, sent, axis, received), tensor)

    def Ireduce_scatter(self, tensor: Tensor, op: Op, scatteraxis: int = 0) -> CollectiveHandle:
        """Start :meth:`Reduce_scatter_block`."""
        return self.Ireduce_scatterv(tensor, op, _parts(self, tensor, scatteraxis), scatteraxis)

    def Ireduce_scatterv(
        self, tensor: Tensor, op: Op, counts: Sequence[int], axis: int = 0
    ) -> CollectiveHandle:
        """Start :meth:`Reduce_scatter`; rank r gets ``counts[r]``."""
        axis = axis_of(axis, tensor.ndim)
        parts = _checked(self, counts, tensor.shape[axis])
        call = ReduceScatter(self, op, axis, parts[self.rank], parts)
        if not is_gathered(call, tensor):
            return _reduction(call, tensor, op)
        lengths = [parts[self.rank]] * self.size

        def reduce(got: Tensor) -> Tensor:
            return reduce_locally(torch.stack(got.split_with_sizes(lengths, axis)), op)

        return start(Alltoallv(self, parts, axis, lengths), tensor, reduce)


def _scan(call: Scan, x: Tensor) -> CollectiveHandle:
    if not is_gathered(call, x):
        return _reduction(call, x, call.op)
    comm, before = call.comm, call.comm.rank + (not call.exclusive)
    return start(
        Allgather(comm.replace(convention="sum"), 0, [1] * comm.size),
        x.unsqueeze(0),
        lambda parts: reduce_locally(parts[:before], call.op) if before else parts[:0].sum(0),
    )


def _reduction(call: Call, x: Tensor, op: Op) -> CollectiveHandle:
    if op in LOGICAL and x.dtype is not torch.bool:
        return start(call, x != 0, lambda y: y.to(x.dtype))
    return start(call, x)


def _lengths(comm: Comm, x: Tensor, axis: int) -> list[int]:
    return [x.shape[axis_of(axis, x.ndim)]] * comm.size


def _parts(comm: Comm, x: Tensor, axis: int) -> list[int]:
    return [equal_part(x, axis, comm.size)] * comm.size


def _own(comm: Comm, x: Tensor, counts: Sequence[int], axis: int) -> list[int]:
    """Check the lengths that the ranks send along ``axis``."""
    length = x.shape[axis]
    if len(counts) != comm.size or min(counts) < 0 or counts[comm.rank] != length:
        raise ArgumentError(
            f"{list(counts)} must be {comm.size} numbers, that of rank {comm.rank} the {length} "
            f"along axis {axis}"
        )
    return list(counts)


def _checked(comm: Comm, counts: Sequence[int], total: int) -> list[int]:
    if len(counts) != comm.size or min(counts) < 0 or sum(counts) != total:
        raise ArgumentError(f"{list(counts)} must be {comm.size} numbers, together {total}")
    return list(counts)

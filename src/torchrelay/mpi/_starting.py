"""Functions that start non-blocking collectives."""

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

__all__ = [
    "iallgather",
    "iallreduce",
    "ialltoall",
    "ialltoallv",
    "ibcast",
    "igather",
    "ireduce",
    "ireduce_scatter",
    "iscan",
    "iscatter",
]


def iallreduce(comm: Comm, x: Tensor, op: Op) -> CollectiveHandle:
    """Start Allreduce."""
    call = Allreduce(comm, op)
    if not is_gathered(call, x):
        return _reduction(call, x, op)
    # Under its convention: all ranks reduce to the same.
    every = Allgather(comm, 0, [1] * comm.size)
    return start(every, x.unsqueeze(0), lambda parts: reduce_locally(parts, op))


def ireduce(comm: Comm, x: Tensor, op: Op, root: int) -> CollectiveHandle:
    """Start a reduction to ``root`` into new memory, with zeros elsewhere."""
    call, is_root = Reduce(comm, op, comm.check_rank(root)), comm.rank == root
    if not is_gathered(call, x):
        return _reduction(call, x, op)
    # the others get an empty tensor, whose sum is zero and depends on it
    every = Gather(comm, 0, 1, root, [1] * comm.size)
    return start(
        every, x.unsqueeze(0), lambda parts: reduce_locally(parts, op) if is_root else parts.sum(0)
    )


def ireduce_scatter(
    comm: Comm, x: Tensor, op: Op, counts: Sequence[int] | None, axis: int
) -> CollectiveHandle:
    """Start Reduce_scatter; rank r gets ``counts[r]`` along ``axis``, or an equal part."""
    axis = axis_of(axis, x.ndim)
    parts = _parts(comm, x, axis) if counts is None else _checked(comm, counts, x.shape[axis])
    call = ReduceScatter(comm, op, axis, parts[comm.rank], parts)
    if not is_gathered(call, x):
        return _reduction(call, x, op)
    lengths = [parts[comm.rank]] * comm.size
    every = Alltoallv(comm, parts, axis, lengths)
    return start(
        every, x, lambda got: reduce_locally(torch.stack(got.split_with_sizes(lengths, axis)), op)
    )


def iscan(comm: Comm, x: Tensor, op: Op, exclusive: bool) -> CollectiveHandle:
    """Start Scan or Exscan."""
    call = Exscan(comm, op) if exclusive else Scan(comm, op)
    if not is_gathered(call, x):
        return _reduction(call, x, op)
    before = comm.rank + (not exclusive)
    every = Allgather(_sums(comm), 0, [1] * comm.size)
    return start(
        every,
        x.unsqueeze(0),
        lambda parts: reduce_locally(parts[:before], op) if before else parts[:0].sum(0),
    )


def ibcast(comm: Comm, x: Tensor, root: int) -> CollectiveHandle:
    """Start a broadcast of root's tensor into new memory."""
    return start(Bcast(comm, comm.check_rank(root)), x)


def igather(
    comm: Comm, x: Tensor, counts: Sequence[int] | None, axis: int, root: int
) -> CollectiveHandle:
    """Start Gather; rank r sends ``counts[r]`` along ``axis``, or equal lengths."""
    axis = axis_of(axis, x.ndim)
    lengths = _lengths(comm, x, counts, axis)
    return start(Gather(comm, axis, x.shape[axis], comm.check_rank(root), lengths), x)


def iallgather(comm: Comm, x: Tensor, counts: Sequence[int] | None, axis: int) -> CollectiveHandle:
    """Start Allgather; rank r sends ``counts[r]`` along ``axis``, or equal lengths."""
    axis = axis_of(axis, x.ndim)
    return start(Allgather(comm, axis, _lengths(comm, x, counts, axis)), x)


def iscatter(
    comm: Comm, x: Tensor, counts: Sequence[int] | None, axis: int, root: int
) -> CollectiveHandle:
    """Start Scatter; rank r gets ``counts[r]`` along ``axis``, or an equal part."""
    axis = axis_of(axis, x.ndim)
    parts = _parts(comm, x, axis) if counts is None else _checked(comm, counts, x.shape[axis])
    return start(Scatter(comm, axis, parts[comm.rank], comm.check_rank(root), parts), x)


def ialltoall(comm: Comm, x: Tensor, gatheraxis: int, scatteraxis: int) -> CollectiveHandle:
    """Start Alltoall in equal parts."""
    g, s = axis_of(gatheraxis, x.ndim), axis_of(scatteraxis, x.ndim)
    numelem = x.shape[s] if g == s else _parts(comm, x, s)[0]
    return start(Alltoall(comm, g, s, numelem, x.shape[g], True), x)


def ialltoallv(
    comm: Comm, x: Tensor, sendcounts: Sequence[int], recvcounts: Sequence[int], axis: int
) -> CollectiveHandle:
    """Start Alltoallv; rank r sends ``recvcounts[r]`` along ``axis``."""
    axis = axis_of(axis, x.ndim)
    sent = _checked(comm, sendcounts, x.shape[axis])
    return start(Alltoallv(comm, sent, axis, _checked(comm, recvcounts, sum(recvcounts))), x)


def _reduction(call: Call, x: Tensor, op: Op) -> CollectiveHandle:
    if op in LOGICAL and x.dtype is not torch.bool:
        return start(call, x != 0, lambda y: y.to(x.dtype))
    return start(call, x)


def _sums(comm: Comm) -> Comm:
    return comm.replace(convention="sum")


def _parts(comm: Comm, x: Tensor, axis: int) -> list[int]:
    return [equal_part(x, axis, comm.size)] * comm.size


def _lengths(comm: Comm, x: Tensor, counts: Sequence[int] | None, axis: int) -> list[int]:
    length = x.shape[axis]
    if counts is None:
        return [length] * comm.size
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

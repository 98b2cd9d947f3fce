"""The operations of MPI that collectives consist of, over contiguous memory of this host.

Each returns the requests to wait for. If all ranks have ``arrived``, an operation blocks in MPI
instead, which is faster, and returns none. What one MPI call cannot count is moved in pieces; all
ranks decide so alike. Nothing here is recorded or compared. Counts are in elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchrelay.mpi._comm import Comm
from torchrelay.mpi._dtypes import Op, buffer, mpi_op
from torchrelay.mpi._layout import Blocks, Layout, parts
from torchrelay.mpi._library import MPI
from torchrelay.mpi._memory import pieces
from torchrelay.mpi._settings import settings

__all__ = [
    "Moving",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
]

PIECE_TAG = 7


class Moving(NamedTuple):
    """Blocks in transit."""

    requests: list[MPI.Request]
    received: Blocks
    kept: object  # memory that is being sent


def _run(mpi: MPI.Intracomm, name: str, arrived: bool, *arguments: object) -> list[MPI.Request]:
    """Call MPI's function ``name``, or its non-blocking form."""
    if arrived:
        getattr(mpi, name)(*arguments)
        return []
    return [getattr(mpi, f"I{name.lower()}")(*arguments)]


def allreduce(
    comm: Comm, source: Tensor, result: Tensor, op: Op, arrived: bool
) -> list[MPI.Request]:
    """Reduce all ranks' ``source`` into every rank's ``result``."""
    kind, requests = mpi_op(source.dtype, op), []
    for ours, total in pieces(source, result):
        requests += _run(comm.mpi, "Allreduce", arrived, buffer(ours), buffer(total), kind)
    return requests


def reduce(
    comm: Comm, source: Tensor, result: Tensor, op: Op, root: int, arrived: bool
) -> list[MPI.Request]:
    """Reduce all ranks' ``source`` into root's ``result``, which may be the same memory."""
    kind, requests = mpi_op(source.dtype, op), []
    for ours, total in pieces(source, result):
        sent, into = buffer(ours), None
        if comm.rank == root:
            sent, into = MPI.IN_PLACE if result is source else sent, buffer(total)  # type: ignore[assignment]
        requests += _run(comm.mpi, "Reduce", arrived, sent, into, kind, root)
    return requests


def broadcast(comm: Comm, memory: Tensor, root: int, arrived: bool) -> list[MPI.Request]:
    """Copy root's ``memory`` into that of every rank."""
    requests = []
    for (piece,) in pieces(memory):
        requests += _run(comm.mpi, "Bcast", arrived, buffer(piece), root)
    return requests


def scan(
    mpi: MPI.Intracomm, source: Tensor, result: Tensor, op: Op, exclusive: bool, arrived: bool
) -> list[MPI.Request]:
    """Reduce the ``source`` of all ranks up to this one, or before it, into ``result``."""
    kind, name, requests = mpi_op(source.dtype, op), "Exscan" if exclusive else "Scan", []
    for ours, total in pieces(source, result):
        requests += _run(mpi, name, arrived, buffer(ours), buffer(total), kind)
    return requests


def reduce_scatter(
    comm: Comm, blocks: Blocks, result: Tensor, op: Op, arrived: bool
) -> list[MPI.Request]:
    """Reduce all ranks' ``blocks``, at most ``max_count`` elements; block r goes to rank r."""
    arguments = (buffer(blocks.memory), buffer(result), blocks.layout.counts)
    kind = mpi_op(result.dtype, op)
    return _run(comm.mpi, "Reduce_scatter", arrived, *arguments, kind)


def allgather(comm: Comm, block: Tensor, layout: Layout, arrived: bool) -> Moving:
    """Copy every rank's block to every rank."""
    received = Blocks.empty(block.dtype, layout)
    if layout.total > settings.max_count:
        return _move_pieces(comm, [block] * comm.size, received)
    requests = _run(comm.mpi, "Allgatherv", arrived, buffer(block), received.vector())
    return Moving(requests, received, block)


def gather(comm: Comm, block: Tensor, layout: Layout, root: int, arrived: bool) -> Moving:
    """Copy every rank's block to ``root``; others get empty blocks."""
    is_root = comm.rank == root
    received = Blocks.empty(block.dtype, layout if is_root else parts((0,), (0,) * comm.size, 0))
    if layout.total > settings.max_count:
        nothing = block.new_empty(0)
        sending = [block if rank == root else nothing for rank in range(comm.size)]
        return _move_pieces(comm, sending, received)
    into = received.vector() if is_root else None
    return Moving(_run(comm.mpi, "Gatherv", arrived, buffer(block), into, root), received, block)


def scatter(
    comm: Comm,
    sending: Blocks | None,
    dtype: torch.dtype,
    layout: Layout,
    root: int,
    arrived: bool,
) -> Moving:
    """Receive this rank's block of those that ``root`` passes in ``layout``."""
    size, count = comm.size, layout.counts[comm.rank]
    if layout.total > settings.max_count:
        nothing = torch.empty(0, dtype=dtype)
        given = [nothing] * size if sending is None else sending.tensors()
        mine = parts((0,), tuple(count if rank == root else 0 for rank in range(size)), 0)
        return _move_pieces(comm, given, Blocks.empty(dtype, mine))
    received = Blocks.empty(dtype, parts((0,), (count,), 0))
    sent, into = None if sending is None else sending.vector(), buffer(received.memory)
    return Moving(_run(comm.mpi, "Scatterv", arrived, sent, into, root), received, sending)


def alltoall(comm: Comm, sending: Blocks, layout: Layout, total: int, arrived: bool) -> Moving:
    """Send block r to rank r and receive blocks with ``layout``.

    ``total`` is the number of elements on all ranks, which decides whether to send in pieces.
    """
    received = Blocks.empty(sending.memory.dtype, layout)
    if total > settings.max_count:
        return _move_pieces(comm, sending.tensors(), received)
    requests = _run(comm.mpi, "Alltoallv", arrived, sending.vector(), received.vector())
    return Moving(requests, received, sending)


def _move_pieces(comm: Comm, sending: Sequence[Tensor], received: Blocks) -> Moving:
    """Send ``sending[r]`` to rank r and receive block r from it, in pieces."""
    requests: list[MPI.Request] = []
    for blocks, start in ((received.tensors(), comm.mpi.Irecv), (sending, comm.mpi.Isend)):
        for rank, tensor in enumerate(blocks):
            if tensor.numel():
                requests += [start(buffer(part), rank, PIECE_TAG) for (part,) in pieces(tensor)]
    return Moving(requests, received, sending)

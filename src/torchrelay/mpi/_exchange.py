"""Movement of contiguous blocks between ranks, for the collectives with counts.

Nothing here is recorded. Counts are in elements. If a count does not fit one MPI call, blocks are
sent as point-to-point messages in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchrelay.mpi._dtypes import buffer
from torchrelay.mpi._layout import Blocks, Layout, parts
from torchrelay.mpi._library import MPI
from torchrelay.mpi._meeting import MEETING_BYTES
from torchrelay.mpi._memory import pieces
from torchrelay.mpi._settings import settings
from torchrelay.mpi._wait import Waiting

__all__ = ["allgather_blocks", "alltoall_blocks", "gather_blocks", "scatter_blocks"]

PIECE_TAG = 7


class Moving(NamedTuple):
    """Blocks in transit."""

    requests: list[MPI.Request]
    received: Blocks
    kept: object  # memory that is being sent


# If all ranks are ``there`` (they have just exchanged their lengths), these may block in MPI. All
# ranks take the same decision, from the sizes of all.


def allgather_blocks(call: Waiting, block: Tensor, layout: Layout, there: bool) -> Moving:
    """Copy every rank's block to every rank."""
    received, mpi = Blocks.empty(block.dtype, layout), call.comm.mpi
    if layout.total > settings.max_count:
        return _move_pieces(call, [block] * call.comm.size, received)
    if there and layout.total * block.itemsize >= MEETING_BYTES:
        mpi.Allgatherv(buffer(block), received.vector())
        return Moving([], received, block)
    return Moving([mpi.Iallgatherv(buffer(block), received.vector())], received, block)


def gather_blocks(call: Waiting, block: Tensor, layout: Layout, root: int, there: bool) -> Moving:
    """Copy every rank's block to ``root``; others get empty blocks."""
    comm, is_root = call.comm, call.comm.rank == root
    received = Blocks.empty(block.dtype, layout if is_root else parts((0,), (0,) * comm.size, 0))
    if layout.total > settings.max_count:
        nothing = block.new_empty(0)
        return _move_pieces(
            call, [block if r == root else nothing for r in range(comm.size)], received
        )
    into = received.vector() if is_root else None
    if there and layout.total * block.itemsize >= MEETING_BYTES:
        comm.mpi.Gatherv(buffer(block), into, root)
        return Moving([], received, block)
    return Moving([comm.mpi.Igatherv(buffer(block), into, root)], received, block)


def scatter_blocks(
    call: Waiting,
    sending: Blocks | None,
    dtype: torch.dtype,
    layout: Layout,
    root: int,
    there: bool,
) -> Moving:
    """Receive this rank's block of those that ``root`` passes in ``layout``."""
    comm, size = call.comm, call.comm.size
    if layout.total > settings.max_count:
        nothing = torch.empty(0, dtype=dtype)
        given = [nothing] * size if sending is None else sending.tensors()
        count = layout.counts[comm.rank]
        mine = parts((0,), tuple(count if r == root else 0 for r in range(size)), 0)
        return _move_pieces(call, given, Blocks.empty(dtype, mine))
    received = Blocks.empty(dtype, parts((0,), (layout.counts[comm.rank],), 0))
    sent, into = None if sending is None else sending.vector(), buffer(received.memory)
    if there and layout.total * dtype.itemsize >= MEETING_BYTES:
        comm.mpi.Scatterv(sent, into, root)
        return Moving([], received, sending)
    return Moving([comm.mpi.Iscatterv(sent, into, root)], received, sending)


def alltoall_blocks(
    call: Waiting, sending: Blocks, layout: Layout, total: int, there: bool
) -> Moving:
    """Send block r to rank r and receive blocks with ``layout``.

    ``total`` is the number of elements on all ranks, which decides whether to send in pieces.
    """
    received, mpi = Blocks.empty(sending.memory.dtype, layout), call.comm.mpi
    if total > settings.max_count:
        return _move_pieces(call, sending.tensors(), received)
    if there and total * sending.memory.itemsize >= MEETING_BYTES:
        mpi.Alltoallv(sending.vector(), received.vector())
        return Moving([], received, sending)
    return Moving([mpi.Ialltoallv(sending.vector(), received.vector())], received, sending)


def _move_pieces(call: Waiting, sending: Sequence[Tensor], received: Blocks) -> Moving:
    """Send ``sending[r]`` to rank r and receive block r from it, in pieces."""
    comm = call.comm
    requests: list[MPI.Request] = []
    for rank, tensor in enumerate(received.tensors()):
        if tensor.numel():
            requests += [
                comm.mpi.Irecv(buffer(part), rank, PIECE_TAG) for (part,) in pieces(tensor)
            ]
    for rank, tensor in enumerate(sending):
        if tensor.numel():
            requests += [
                comm.mpi.Isend(buffer(part), rank, PIECE_TAG) for (part,) in pieces(tensor)
            ]
    return Moving(requests, received, sending)

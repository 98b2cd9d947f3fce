"""Moving contiguous memory between ranks: what all collectives are made of.

Nothing here is recorded. Counts are in elements. Where a count does not fit one MPI call, blocks go as
point-to-point messages in pieces.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrelay.errors import ArgumentError
from torchrelay.mpi._dtypes import buffer
from torchrelay.mpi._library import MPI
from torchrelay.mpi._meeting import MEETING_BYTES
from torchrelay.mpi._settings import settings

if TYPE_CHECKING:
    from torchrelay.mpi._record import Call

__all__ = [
    "Blocks",
    "Layout",
    "allgather_blocks",
    "alltoall_blocks",
    "axis_of",
    "equal_part",
    "fresh",
    "gather_blocks",
    "is_small",
    "layout",
    "packed",
    "parts",
    "pieces",
    "placed",
    "scatter_blocks",
    "with_length",
]

PIECE_TAG = 7
HUGE_BYTES = 1 << 22  # from here on numpy asks for huge pages


def packed(x: Tensor) -> Tensor:
    """``x``, or a copy of it, as plain contiguous memory of this host.

    Raises:
        ArgumentError: it is sparse, or has no values.
    """
    if is_plain(x):
        return x
    if x.layout is not torch.strided or x.is_meta:
        raise ArgumentError(f"a tensor of layout {x.layout} on device {x.device} cannot be communicated")
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    if x.device.type != "cpu":
        x = x.cpu()
    return x.contiguous()


def is_plain(x: Tensor) -> bool:
    """Whether ``x`` is contiguous memory of this host as it stands."""
    return x.layout is torch.strided and x.is_cpu and x.is_contiguous() and not (x.is_neg() or x.is_conj())


def is_small(x: Tensor) -> bool:
    """Whether ``x`` is plain, goes in one MPI call, and wants no huge pages: for paths where each step counts."""
    return is_plain(x) and x.nbytes < HUGE_BYTES and x.numel() <= settings.max_count


def fresh(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """New memory. Large memory comes from numpy, which asks for huge pages: their first touch costs a quarter."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes < HUGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.empty(size_bytes, np.uint8)).view(dtype).view(*shape)


def placed(y: Tensor, x: Tensor) -> Tensor:
    """``y`` on the device of ``x``."""
    return y if x.device.type == "cpu" else y.to(x.device)


def pieces(*tensors: Tensor) -> Sequence[tuple[Tensor, ...]]:
    """Equal parts of flat, equally long tensors, each part small enough for one MPI call."""
    count, most = tensors[0].numel(), settings.max_count
    if count <= most:
        return (tensors,)
    flat = [tensor.view(-1) for tensor in tensors]
    return [tuple(tensor[start : start + most] for tensor in flat) for start in range(0, count, most)]


def axis_of(axis: int, ndim: int) -> int:
    """``axis`` counted from the front.

    Raises:
        ArgumentError: there is no such axis.
    """
    if not -ndim <= axis < ndim:
        raise ArgumentError(f"axis {axis} of a tensor that has {ndim} axes")
    return axis % ndim


def with_length(shape: Sequence[int], axis: int, length: int) -> list[int]:
    """``shape``, but ``length`` along ``axis``."""
    result = list(shape)
    result[axis] = length
    return result


def equal_part(x: Tensor, axis: int, size: int) -> int:
    """How much of ``x`` along ``axis`` each of ``size`` ranks gets.

    Raises:
        ArgumentError: it cannot be cut into equal parts.
    """
    length = x.shape[axis_of(axis, x.ndim)]
    if length % size:
        raise ArgumentError(f"{length} along axis {axis} cannot be cut into {size} equal parts")
    return length // size


class Layout(NamedTuple):
    """Where the parts of a tensor lie that is cut along an axis: one after the other."""

    shapes: tuple[tuple[int, ...], ...]
    axis: int
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    total: int
    whole: tuple[int, ...]  # the tensor's shape
    is_whole: bool  # whether that is how the tensor itself lies


@functools.lru_cache(maxsize=128)
def layout(shapes: tuple[tuple[int, ...], ...], axis: int) -> Layout:
    """Of parts that have ``shapes``. Remembered, as :func:`parts`: it takes longer than a small message."""
    first, counts = shapes[0], tuple(math.prod(shape) for shape in shapes)
    whole = (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])
    starts = (0, *accumulate(counts[:-1]))
    return Layout(shapes, axis, counts, starts, sum(counts), whole, math.prod(first[:axis]) == 1)


@functools.lru_cache(maxsize=128)
def parts(shape: tuple[int, ...], lengths: tuple[int, ...], axis: int) -> Layout:
    """Of parts that are like ``shape``, but have ``lengths`` along ``axis``."""
    return layout(tuple((*shape[:axis], length, *shape[axis + 1 :]) for length in lengths), axis)


class Blocks(NamedTuple):
    """Contiguous memory, of any shape, in which parts of a tensor lie."""

    memory: Tensor
    layout: Layout

    @classmethod
    def empty(cls, dtype: torch.dtype, layout: Layout) -> Blocks:
        """New memory for them."""
        return cls(fresh(layout.whole if layout.is_whole else (layout.total,), dtype), layout)

    @classmethod
    def cut(cls, x: Tensor, lengths: Sequence[int], axis: int) -> Blocks:
        """Contiguous ``x``, cut along ``axis``; no copy where the parts lie one after the other."""
        layout = parts(tuple(x.shape), tuple(lengths), axis)
        if layout.is_whole:
            return cls(x, layout)
        blocks = cls.empty(x.dtype, layout)
        for part, given in zip(blocks.tensors(), x.split_with_sizes(list(lengths), axis), strict=True):
            part.copy_(given)
        return blocks

    def tensors(self) -> list[Tensor]:
        flat = self.memory.view(-1).split_with_sizes(self.layout.counts)
        return [part.view(shape) for part, shape in zip(flat, self.layout.shapes, strict=True)]

    def joined(self) -> Tensor:
        """The tensor; no copy where none is needed."""
        return self.memory if self.layout.is_whole else torch.cat(self.tensors(), self.layout.axis)

    def vector(self) -> tuple[object, ...]:
        """As mpi4py takes the memory of a v-collective."""
        memory, _, kind = buffer(self.memory)
        return (memory, self.layout.counts, self.layout.starts, kind)


class Moving(NamedTuple):
    """Blocks under way."""

    requests: list[MPI.Request]
    received: Blocks
    kept: object  # memory that is being sent


# Of these, each that is told that all ranks are ``there`` (they have just told each other their lengths) may block
# in MPI, since nobody is waited for any more. All ranks come to the same decision, from the sizes of all.


def allgather_blocks(call: Call, block: Tensor, layout: Layout, there: bool) -> Moving:
    """Every rank's block, on every rank."""
    received, mpi = Blocks.empty(block.dtype, layout), call.comm.mpi
    if layout.total > settings.max_count:
        return _move_pieces(call, [block] * call.comm.size, received)
    if there and layout.total * block.itemsize >= MEETING_BYTES:
        mpi.Allgatherv(buffer(block), received.vector())
        return Moving([], received, block)
    return Moving([mpi.Iallgatherv(buffer(block), received.vector())], received, block)


def gather_blocks(call: Call, block: Tensor, layout: Layout, root: int, there: bool) -> Moving:
    """Every rank's block, on ``root``; empty blocks on the others."""
    comm, is_root = call.comm, call.comm.rank == root
    received = Blocks.empty(block.dtype, layout if is_root else parts((0,), (0,) * comm.size, 0))
    if layout.total > settings.max_count:
        nothing = block.new_empty(0)
        return _move_pieces(call, [block if r == root else nothing for r in range(comm.size)], received)
    into = received.vector() if is_root else None
    if there and layout.total * block.itemsize >= MEETING_BYTES:
        comm.mpi.Gatherv(buffer(block), into, root)
        return Moving([], received, block)
    return Moving([comm.mpi.Igatherv(buffer(block), into, root)], received, block)


def scatter_blocks(
    call: Call, sending: Blocks | None, dtype: torch.dtype, layout: Layout, root: int, there: bool
) -> Moving:
    """This rank's block, as the only one received, of those that ``root`` gives in ``layout``."""
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


def alltoall_blocks(call: Call, sending: Blocks, layout: Layout, total: int, there: bool) -> Moving:
    """Rank r gets the block r that is sent, and what comes from all has ``layout``.

    ``total`` is the number of elements on all ranks: they must agree on whether to send in pieces.
    """
    received, mpi = Blocks.empty(sending.memory.dtype, layout), call.comm.mpi
    if total > settings.max_count:
        return _move_pieces(call, sending.tensors(), received)
    if there and total * sending.memory.itemsize >= MEETING_BYTES:
        mpi.Alltoallv(sending.vector(), received.vector())
        return Moving([], received, sending)
    return Moving([mpi.Ialltoallv(sending.vector(), received.vector())], received, sending)


def _move_pieces(call: Call, sending: Sequence[Tensor], received: Blocks) -> Moving:
    """``sending[r]`` goes to rank r and block r comes from it, in pieces."""
    comm = call.comm
    requests: list[MPI.Request] = []
    for rank, tensor in enumerate(received.tensors()):
        if tensor.numel():
            requests += [comm.mpi.Irecv(buffer(part), rank, PIECE_TAG) for (part,) in pieces(tensor)]
    for rank, tensor in enumerate(sending):
        if tensor.numel():
            requests += [comm.mpi.Isend(buffer(part), rank, PIECE_TAG) for (part,) in pieces(tensor)]
    return Moving(requests, received, sending)

"""Moving contiguous memory between ranks: what all collectives are made of.

Nothing here is recorded. Counts are in elements. Where a count does not fit one MPI call, blocks go as
point-to-point messages in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrelay.errors import ArgumentError, MismatchError
from torchrelay.mpi._dtypes import CODES, DTYPES, buffer, datatype
from torchrelay.mpi._library import MPI
from torchrelay.mpi._settings import settings
from torchrelay.mpi._wait import finish

if TYPE_CHECKING:
    from torchrelay.mpi._record import Call

__all__ = [
    "Header",
    "agree",
    "allgather_blocks",
    "alltoall_blocks",
    "axis_of",
    "exchange_headers",
    "flat_of",
    "fresh",
    "gather_blocks",
    "join",
    "packed",
    "pieces",
    "placed",
    "scatter_blocks",
]

MAX_DIMS = 16
PIECE_TAG = 7
HUGE_BYTES = 1 << 22  # from here on numpy asks for huge pages


def packed(x: Tensor) -> Tensor:
    """``x``, or a copy of it, as plain contiguous memory of this host.

    Raises:
        ArgumentError: it is sparse, or has no values.
    """
    if x.layout is not torch.strided or x.is_meta:
        raise ArgumentError(f"a tensor of layout {x.layout} on device {x.device} cannot be communicated")
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    if x.device.type != "cpu":
        x = x.cpu()
    return x.contiguous()


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


class Header(NamedTuple):
    """What one rank tells the others before a collective whose blocks may differ in length."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def read(cls, row: list[int]) -> Header:
        return cls(row[0], DTYPES[row[1]], tuple(row[3 : 3 + row[2]]))

    def block(self, axis: int, length: int) -> tuple[int, ...]:
        """The shape with ``length`` along ``axis``."""
        return (*self.shape[:axis], length, *self.shape[axis + 1 :])


def exchange_headers(call: Call, x: Tensor, number: int = 0, uniform: bool = False) -> list[Header]:
    """Every rank's dtype and shape, and a number of its choice; nothing is exchanged if all are known to be equal."""
    if uniform:
        return [Header(number, x.dtype, tuple(x.shape))] * call.comm.size
    if x.ndim > MAX_DIMS:
        raise ArgumentError(f"{call.describe()}: {x.ndim} axes are more than {MAX_DIMS}")
    datatype(x.dtype)
    row = np.zeros(MAX_DIMS + 3, np.int64)
    row[: 3 + x.ndim] = (number, CODES[x.dtype], x.ndim, *x.shape)
    comm = call.comm
    rows = np.empty((comm.size, MAX_DIMS + 3), np.int64)
    finish(comm.mpi.Iallgather((row, MAX_DIMS + 3, MPI.INT64_T), (rows, MAX_DIMS + 3, MPI.INT64_T)), call)
    return [Header.read(each) for each in rows.tolist()]


def agree(call: Call, headers: Sequence[Header], *free_axes: int) -> None:
    """Raises :class:`MismatchError`, on all ranks, if dtypes or shapes differ, save along ``free_axes``."""

    def fixed(header: Header) -> tuple[object, ...]:
        shape = [size for axis, size in enumerate(header.shape) if axis not in free_axes]
        return (header.dtype, len(header.shape), *shape)

    if len({fixed(header) for header in headers}) > 1:
        given = "; ".join(f"rank {rank}: {h.dtype} {h.shape}" for rank, h in enumerate(headers))
        raise MismatchError(
            f"{call.describe()} on {call.comm.name}: the ranks' tensors do not fit together ({given})"
        )


def join(blocks: Sequence[Tensor], axis: int, flat: Tensor) -> Tensor:
    """The blocks, which lie one after the other in ``flat``, along ``axis``; no copy where none is needed."""
    shape = blocks[0].shape
    if all(size == 1 for size in shape[:axis]):
        return flat.view(
            *shape[:axis], -1 if flat.numel() else sum(b.shape[axis] for b in blocks), *shape[axis + 1 :]
        )
    return torch.cat(list(blocks), axis)


def _carve(dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> tuple[Tensor, list[Tensor]]:
    """New memory for tensors of ``shapes``, one after the other, and those tensors."""
    counts = [math.prod(shape) for shape in shapes]
    flat = fresh((sum(counts),), dtype)
    return flat, [
        part.view(*shape) for part, shape in zip(flat.split_with_sizes(counts), shapes, strict=True)
    ]


def flat_of(blocks: Sequence[Tensor]) -> Tensor:
    """The blocks one after the other; no copy where they already lie so."""
    first, offset = blocks[0], blocks[0].storage_offset()
    for block in blocks:
        if not block.is_contiguous() or block.storage_offset() != offset or not _same_storage(block, first):
            return _copied(blocks)
        offset += block.numel()
    return first.as_strided((offset - first.storage_offset(),), (1,))


def _copied(blocks: Sequence[Tensor]) -> Tensor:
    flat, parts = _carve(blocks[0].dtype, [block.shape for block in blocks])
    for part, block in zip(parts, blocks, strict=True):
        part.copy_(block)
    return flat


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _vector(flat: Tensor, blocks: Sequence[Tensor]) -> tuple[object, ...]:
    """``flat`` as mpi4py takes the memory of a v-collective."""
    counts = [block.numel() for block in blocks]
    memory, _, kind = buffer(flat)
    return (memory, counts, [0, *accumulate(counts[:-1])], kind)


class Moving(NamedTuple):
    """Blocks under way. ``blocks`` are what is received, one after the other in ``flat``."""

    requests: list[MPI.Request]
    blocks: list[Tensor]
    flat: Tensor
    kept: object  # memory that is being sent

    def joined(self, axis: int) -> Tensor:
        return join(self.blocks, axis, self.flat)


def allgather_blocks(call: Call, block: Tensor, shapes: Sequence[Sequence[int]]) -> Moving:
    """Every rank's block, on every rank."""
    flat, blocks = _carve(block.dtype, shapes)
    if flat.numel() > settings.max_count:
        return _move_pieces(call, [block] * len(blocks), blocks, flat)
    return Moving([call.comm.mpi.Iallgatherv(buffer(block), _vector(flat, blocks))], blocks, flat, block)


def gather_blocks(call: Call, block: Tensor, shapes: Sequence[Sequence[int]], root: int) -> Moving:
    """Every rank's block, on ``root``; empty blocks on the others."""
    comm, is_root = call.comm, call.comm.rank == root
    flat, blocks = _carve(block.dtype, shapes if is_root else [(0,)] * comm.size)
    if _volume(shapes) > settings.max_count:
        nothing = block.new_empty(0)
        return _move_pieces(call, [block if r == root else nothing for r in range(comm.size)], blocks, flat)
    request = comm.mpi.Igatherv(buffer(block), _vector(flat, blocks) if is_root else None, root)
    return Moving([request], blocks, flat, block)


def scatter_blocks(
    call: Call,
    blocks: Sequence[Tensor] | None,
    dtype: torch.dtype,
    shapes: Sequence[Sequence[int]],
    root: int,
) -> Moving:
    """This rank's block of those that ``root`` gives."""
    comm = call.comm
    result = fresh(shapes[comm.rank], dtype)
    if _volume(shapes) > settings.max_count:
        nothing = torch.empty(0, dtype=dtype)
        sending = blocks if blocks is not None else [nothing] * comm.size
        return _move_pieces(
            call, sending, [result if r == root else nothing for r in range(comm.size)], result
        )
    flat = None if blocks is None else flat_of(blocks)
    sent = None if blocks is None or flat is None else _vector(flat, blocks)
    return Moving([comm.mpi.Iscatterv(sent, buffer(result), root)], [result], result, flat)


def alltoall_blocks(
    call: Call, blocks: Sequence[Tensor], dtype: torch.dtype, shapes: Sequence[Sequence[int]], total: int
) -> Moving:
    """``blocks[r]`` goes to rank r, and what comes from it has ``shapes[r]``.

    ``total`` is the number of elements on all ranks: they must agree on whether to send in pieces.
    """
    result, received = _carve(dtype, shapes)
    if total > settings.max_count:
        return _move_pieces(call, blocks, received, result)
    flat = flat_of(blocks)
    request = call.comm.mpi.Ialltoallv(_vector(flat, blocks), _vector(result, received))
    return Moving([request], received, result, flat)


def _volume(shapes: Sequence[Sequence[int]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _move_pieces(call: Call, sending: Sequence[Tensor], receiving: Sequence[Tensor], flat: Tensor) -> Moving:
    """``sending[r]`` goes to rank r and ``receiving[r]`` comes from it, in pieces."""
    comm = call.comm
    sent = [block.contiguous() for block in sending]
    requests: list[MPI.Request] = []
    for rank, tensor in enumerate(receiving):
        if tensor.numel():
            requests += [comm.mpi.Irecv(buffer(part), rank, PIECE_TAG) for (part,) in pieces(tensor)]
    for rank, tensor in enumerate(sent):
        if tensor.numel():
            requests += [comm.mpi.Isend(buffer(part), rank, PIECE_TAG) for (part,) in pieces(tensor)]
    return Moving(requests, list(receiving), flat, sent)

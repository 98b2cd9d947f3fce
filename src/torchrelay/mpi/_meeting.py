"""Headers that ranks exchange before a collective: their call, dtype and shape.

Headers of all calls have the same length and travel apart from the data, so a mismatch is detected
before any data moves.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchrelay.errors import ArgumentError, MismatchError
from torchrelay.mpi import _check
from torchrelay.mpi._dtypes import CODES, DTYPES, datatype
from torchrelay.mpi._library import MPI
from torchrelay.mpi._wait import Comparable, Waiting, finish

__all__ = [
    "MAX_DIMS",
    "MEETING_BYTES",
    "Header",
    "agree",
    "described",
    "exchange_headers",
    "is_large",
    "known_headers",
    "meet",
]

MAX_DIMS = 16
MEETING_BYTES = 1 << 16  # from here on ranks exchange headers first, and MPI may then block
_ROW = struct.Struct(f"{4 + MAX_DIMS}q")


def is_large(x: Tensor) -> bool:
    """Return whether ranks exchange headers before they communicate ``x``."""
    return x.numel() * x.itemsize >= MEETING_BYTES


class Header(NamedTuple):
    """Description of one rank's block, whose length may differ between ranks."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def read(cls, row: Sequence[int]) -> Header:
        return cls(row[1], DTYPES[row[2]], tuple(row[4 : 4 + row[3]]))

    def block(self, axis: int, length: int) -> tuple[int, ...]:
        """Return the shape with ``length`` along ``axis``."""
        return (*self.shape[:axis], length, *self.shape[axis + 1 :])


def described(x: Tensor, axis: int, known: Sequence[int] | None) -> str:
    """Describe what must be equal on all ranks.

    ``known`` are the lengths of ``x`` along ``axis`` on all ranks, if they need no exchange.
    """
    if known is None:
        return f"{x.dtype} with {x.ndim} axes"
    shape: list[object] = list(x.shape)
    shape[axis] = list(known)
    return f"{x.dtype} {shape}"


@functools.lru_cache(maxsize=1024)
def _row(terms: str, header: Header) -> bytes:
    if len(header.shape) > MAX_DIMS:
        raise ArgumentError(f"{len(header.shape)} axes are more than {MAX_DIMS}")
    datatype(header.dtype)
    code = int.from_bytes(
        hashlib.blake2b(terms.encode(), digest_size=8).digest(), "little", signed=True
    )
    rest = [0] * (MAX_DIMS - len(header.shape))
    return _ROW.pack(
        code, header.number, CODES[header.dtype], len(header.shape), *header.shape, *rest
    )


def known_headers(x: Tensor, axis: int, lengths: Sequence[int]) -> list[Header]:
    """Return the headers of all ranks if the lengths along ``axis`` are known."""
    mine = Header(0, x.dtype, tuple(x.shape))
    return [mine._replace(number=length, shape=mine.block(axis, length)) for length in lengths]


def exchange_headers(
    call: Comparable, x: Tensor, number: int = 0, shape: tuple[int, ...] | None = None
) -> list[Header]:
    """Return the headers of all ranks. Blocks until all ranks have arrived.

    Raises:
        MismatchError: the ranks differ in function or arguments; on all ranks.
    """
    mine = Header(number, x.dtype, tuple(x.shape) if shape is None else shape)
    rows = _exchange(call, lambda: call.signature(x), _row(call.terms(), mine))
    if rows is None:
        return [mine] * call.comm.size
    return [Header.read(each) for each in _ROW.iter_unpack(rows)]


def meet(call: Waiting, terms: str) -> None:
    """Wait until all ranks have arrived with the same ``terms``.

    Raises:
        MismatchError: the terms differ; on all ranks.
    """
    if call.comm.size > 1:
        _exchange(call, lambda: terms, _row(terms, Header(0, torch.uint8, ())))


def _exchange(call: Waiting, text: Callable[[], str], row: bytes) -> bytearray | None:
    """Return the rows of all ranks, concatenated; None if all are equal."""
    comm, length = call.comm, len(row)
    comm.history.meet()
    rows = bytearray(comm.size * length)
    finish(comm.meeting.Iallgather((row, length, MPI.BYTE), (rows, length, MPI.BYTE)), call, rows)
    if rows == row * comm.size:
        return None
    if any(rows[start : start + 8] != row[:8] for start in range(0, len(rows), length)):
        _check.compare_texts(call, text())
    return rows


def agree(call: Comparable, headers: Sequence[Header], *free_axes: int) -> None:
    """Raise :class:`MismatchError` on all ranks if headers differ outside ``free_axes``."""
    if headers.count(headers[0]) == len(headers):
        return

    def fixed(header: Header) -> tuple[object, ...]:
        shape = [size for axis, size in enumerate(header.shape) if axis not in free_axes]
        return (header.dtype, len(header.shape), *shape)

    if len({fixed(header) for header in headers}) > 1:
        given = "; ".join(f"rank {rank}: {h.dtype} {h.shape}" for rank, h in enumerate(headers))
        raise MismatchError(
            f"{call.describe()} on {call.comm.name}: the ranks' tensors do not fit together "
            f"({given})"
        )

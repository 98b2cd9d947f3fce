"""Rows that the ranks of MPI exchange with each collective."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from torchrelay.errors import ArgumentError

__all__ = ["CallRows"]

_WORD_BYTES = 8


class CallRows:
    """A digest of the call, and a payload, in the memory of the row to send and of all rows."""

    def __init__(self, ranks: int, payload_bytes: int) -> None:
        self._sent = np.zeros(1 + -(-payload_bytes // _WORD_BYTES), np.uint64)
        self._received = np.zeros((ranks, len(self._sent)), np.uint64)

    @property
    def row_bytes(self) -> int:
        return self._sent.nbytes

    @property
    def sent(self) -> int:
        """The address of the row to send."""
        return self._sent.ctypes.data

    @property
    def received(self) -> int:
        """The address of the rows of all ranks, in their order."""
        return self._received.ctypes.data

    def write_bytes(self, digest: int, address: int, size_bytes: int) -> None:
        """Fill the row to send with a copy of the payload at an address."""
        self._check(size_bytes)
        self._sent[0] = digest
        ctypes.memmove(self.sent + _WORD_BYTES, address, size_bytes)

    def write_numbers(self, digest: int, numbers: Sequence[int]) -> None:
        """Fill the row to send with 64-bit integers as its payload."""
        self._check(_WORD_BYTES * len(numbers))
        self._sent[0] = digest
        self._sent[1 : 1 + len(numbers)] = np.array(numbers, np.int64).view(np.uint64)

    def _check(self, size_bytes: int) -> None:
        most = self.row_bytes - _WORD_BYTES
        if size_bytes > most:
            raise ArgumentError(f"a row holds {most} bytes, not {size_bytes}")

    def first_difference(self) -> int:
        """Return the first rank whose digest is not the one that was sent; -1 if there is none."""
        different = np.flatnonzero(self._received[:, 0] != self._sent[0])
        return int(different[0]) if len(different) else -1

    def digest(self, rank: int) -> int:
        """Return what a rank sent."""
        return int(self._received[rank, 0])

    def numbers(self, count: int) -> list[list[int]]:
        """Return the first integers of each rank's payload."""
        found: list[list[int]] = self._received[:, 1 : 1 + count].view(np.int64).tolist()
        return found

"""CRC32C, by the package google-crc32c if it is installed, else by NumPy; and copies of memory.

The register of a CRC is linear over GF(2). So many short lanes of a buffer are checksummed beside
each other, and combined by the map that a number of zero bytes applies to a register.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

try:
    import google_crc32c

    _has_package = google_crc32c.implementation == "c"
except ImportError:
    _has_package = False

__all__ = ["copy_memory", "crc32c", "crc32c_blocks", "crc32c_of_file", "crc32c_of_memory"]

_POLYNOMIAL = 0x82F63B78  # reflected
_LANE_WORDS = 64
_PIECE_BYTES = 1 << 20
_ONES = 0xFFFFFFFF

Words = NDArray[np.uint32]
Sizes = NDArray[np.uint64]


@functools.cache
def _zero_bytes(count: int) -> Words:
    """Return the map of registers over 1, 2, 4, ... zero bytes: a table for each of their bytes."""
    bits = np.left_shift(1, np.arange(32, dtype=np.uint32), dtype=np.uint32)
    if count == 1:
        for _ in range(8):
            bits = bits >> 1 ^ np.where(bits & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    else:
        half = _zero_bytes(count // 2)
        bits = _mapped(half, _mapped(half, bits))
    tables = np.zeros((4, 256), np.uint32)
    for bit in range(32):
        table, step = tables[bit // 8], 1 << bit % 8
        table[step : 2 * step] = table[:step] ^ bits[bit]
    return tables


def _mapped(tables: Words, registers: Words) -> Words:
    low, high = registers & 0xFFFF, registers >> 16
    one = tables[0][low & 0xFF] ^ tables[1][low >> 8]
    mapped: Words = one ^ tables[2][high & 0xFF] ^ tables[3][high >> 8]
    return mapped


def _extended(register: int, data: NDArray[np.uint8]) -> int:
    """Return the register after ``data``. Zeros before a register of zero change nothing, so lanes
    are filled up with these.
    """
    state = np.frombuffer(register.to_bytes(4, "little"), np.uint8)
    head = min(4, len(data))
    lane_bytes = 4 * _LANE_WORDS
    padded = np.zeros(-(-len(data) // lane_bytes) * lane_bytes, np.uint8)
    padded[len(padded) - len(data) :] = data
    padded[len(padded) - len(data) :][:head] ^= state[:head]
    lanes = padded.view("<u4").reshape(-1, _LANE_WORDS)
    first = (len(padded) - len(data)) // 4 if len(lanes) == 1 else 0
    registers = np.zeros(len(lanes), np.uint32)
    for word in range(first, _LANE_WORDS):
        registers = _mapped(_zero_bytes(4), registers ^ lanes[:, word])
    while len(registers) > 1:
        if len(registers) % 2:
            registers = np.concatenate([np.zeros(1, np.uint32), registers])
        registers = _mapped(_zero_bytes(lane_bytes), registers[::2]) ^ registers[1::2]
        lane_bytes *= 2
    return int(registers[0]) ^ register >> 8 * head


def _by_numpy(crc: int, data: NDArray[np.uint8]) -> int:
    register = crc ^ _ONES
    for start in range(0, len(data), _PIECE_BYTES):
        register = _extended(register, data[start : start + _PIECE_BYTES])
    return register ^ _ONES


def _by_package(crc: int, data: NDArray[np.uint8]) -> int:
    data = data.view()
    data.flags.writeable = False  # it takes no other
    return int(google_crc32c.extend(crc, data))


def crc32c(data: object, crc: int = 0) -> int:
    """Return the CRC32C of a buffer that follows bytes whose checksum is ``crc``."""
    found = np.frombuffer(memoryview(data).cast("B"), np.uint8)  # type: ignore[arg-type]
    return (_by_package if _has_package else _by_numpy)(crc, found)


def crc32c_blocks(data: object, block_bytes: int) -> bytes:
    """Return the CRC32C of each block, 4 bytes each in the machine's order."""
    view = memoryview(data).cast("B")  # type: ignore[arg-type]
    starts = range(0, len(view), block_bytes)
    return np.array([crc32c(view[one : one + block_bytes]) for one in starts], np.uint32).tobytes()


def crc32c_of_memory(addresses: Sizes, sizes: Sizes) -> bytes:
    """Return the CRC32C of ranges of memory, 4 bytes each in the machine's order."""
    ranges = _rows(addresses, sizes)
    found = [crc32c((ctypes.c_char * size).from_address(start)) for start, size in ranges]
    return np.array(found, np.uint32).tobytes()


def crc32c_of_file(
    fd: int, starts: Sizes, sizes: Sizes, into: Sizes | None = None
) -> tuple[bytes, int]:
    """Return the CRC32C of ranges of a file, 4 bytes each, and where the last one ends, or the file
    before it. Of ranges that ascend, parts are copied too: rows of starts, sizes and addresses.
    """
    checksums, end = np.zeros(len(starts), np.uint32), 0
    copies = deque(() if into is None else _rows(*into))
    for i, (start, size) in enumerate(_rows(starts, sizes)):
        end, crc = start, 0
        while end < start + size:
            data = os.pread(fd, min(start + size - end, _PIECE_BYTES), end)
            _store(data, end, copies)
            end, crc = end + len(data), crc32c(data, crc)
            checksums[i] = crc
            if not data:
                return checksums.tobytes(), end
    return checksums.tobytes(), end


def _store(data: bytes, start: int, copies: deque[tuple[int, ...]]) -> None:
    """Copy what ``copies`` have of bytes of a file from ``start``; forget those that are done."""
    end = start + len(data)
    while copies and copies[0][0] < end:
        first, size, address = copies[0]
        begin, stop = max(first, start), min(first + size, end)
        ctypes.memmove(address + begin - first, data[begin - start : stop - start], stop - begin)
        if first + size > end:
            return
        copies.popleft()


def copy_memory(targets: Sizes, sources: Sizes, sizes: Sizes) -> None:
    """Copy ranges of memory, which do not overlap, one after another."""
    for target, source, size in _rows(targets, sources, sizes):
        ctypes.memmove(target, source, size)


def _rows(*columns: Sizes) -> Iterable[tuple[int, ...]]:
    if len({*map(len, columns)}) > 1:
        raise ValueError("the arrays must have one length")
    return zip(*(column.tolist() for column in columns), strict=True)

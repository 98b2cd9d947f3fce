"""What Python lacks: some system calls, and memory by its address."""

from __future__ import annotations

import ctypes
import mmap
import os

__all__ = ["exchange", "memory_at", "populate", "start_writeback"]

_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SYNC_FILE_RANGE_WRITE = 2
_MADV_POPULATE_READ = 22


def exchange(one: str, other: str) -> None:
    """Exchange two names of one file system atomically.

    Raises:
        OSError: not possible; ``errno`` is EINVAL or ENOSYS if the file system cannot do it at all.
    """
    if _libc.renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE
    ):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), one, None, other)


def start_writeback(fd: int, offset: int, size_bytes: int) -> None:
    """Ask the kernel to start writing a range to the disk, so that fsync waits less."""
    _libc.sync_file_range(
        fd, ctypes.c_int64(offset), ctypes.c_int64(size_bytes), _SYNC_FILE_RANGE_WRITE
    )


def populate(mapped: mmap.mmap) -> None:
    """Read the pages of a mapped file and map them, so that using them neither faults nor fails.

    Raises:
        OSError: one cannot be read, or the kernel (before 5.14) does not know how.
    """
    mapped.madvise(_MADV_POPULATE_READ)


def memory_at(address: int, size_bytes: int) -> memoryview:
    """Return a writable view of memory of this process, which the caller keeps alive."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")

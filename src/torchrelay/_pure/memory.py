"""Shared memory, and the process in which something was made."""

from __future__ import annotations

import mmap
import os

from typing_extensions import Self

from torchrelay._platform import anonymous_file, need_core

__all__ = ["Origin", "SharedMemory"]


class Origin:
    """The process in which it was made."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from it."""
        return os.getpid() != self.pid


class SharedMemory(mmap.mmap):
    """A block of memory that another process maps from its descriptor, which is sent to it."""

    fd = -1
    read_only = False

    @classmethod
    def create(cls, size_bytes: int, label: str, populate: bool = False) -> Self:
        """Make a block of zeros. ``populate`` has no effect."""
        return cls._map(anonymous_file(label, size_bytes), False)

    @classmethod
    def from_fd(cls, fd: int, read_only: bool = False) -> Self:
        """Map the block behind a descriptor, which is duplicated."""
        return cls._map(os.dup(fd), read_only)

    @classmethod
    def _map(cls, fd: int, read_only: bool) -> Self:
        try:
            access = mmap.ACCESS_READ if read_only else mmap.ACCESS_WRITE
            memory = cls(fd, 0, access=access)
        except BaseException:
            os.close(fd)
            raise
        memory.fd, memory.read_only = fd, read_only
        return memory

    @staticmethod
    def attach(address: str, read_only: bool = False) -> SharedMemory:
        """Refuse: a block has no address."""
        need_core("attaching shared memory by its address")
        raise AssertionError

    @property
    def address(self) -> str:
        need_core("an address of shared memory")
        raise AssertionError

    @property
    def size_bytes(self) -> int:
        return len(self)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

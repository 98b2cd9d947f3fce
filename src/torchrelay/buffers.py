"""Tensors over memory that several processes share.

A :class:`Segment` is a block of host memory without a name in any file system, so nothing is left
behind when its users are killed. Its ``address`` is a short string that another process of the same
user and host passes to :meth:`Segment.attach` while the creator holds the segment. Its ``fd`` may
be sent over a Unix socket instead. Tensors over a segment keep it alive.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch

from torchrelay import _native
from torchrelay.errors import ArgumentError

__all__ = ["Segment"]


class Segment:
    """A block of shared host memory.

    Args:
        memory: the native block; use :meth:`create`, :meth:`attach` or :meth:`from_fd` instead.
    """

    def __init__(self, memory: _native.SharedMemory) -> None:
        self._memory = memory

    @classmethod
    def create(
        cls, size_bytes: int, label: str = "torchrelay", *, populate: bool = False
    ) -> Segment:
        """Create a zero-filled block of ``size_bytes``.

        Args:
            label: shown in ``/proc/<pid>/maps``.
            populate: allocate every page now instead of at first use.

        Raises:
            ArgumentError: ``size_bytes`` is less than 1.
            SegmentError: the kernel refuses, or memory runs out while populating.
        """
        if size_bytes < 1:
            raise ArgumentError(f"a segment needs at least 1 byte, not {size_bytes}")
        return cls(_native.SharedMemory.create(size_bytes, label, populate))

    @classmethod
    def attach(cls, address: str, *, read_only: bool = False) -> Segment:
        """Map the block that another process created.

        Raises:
            ArgumentError: ``address`` is malformed.
            SegmentError: its creator has exited, is another user's, or has closed it.
        """
        return cls(_native.SharedMemory.attach(address, read_only))

    @classmethod
    def from_fd(cls, fd: int, *, read_only: bool = False) -> Segment:
        """Map the block behind a descriptor, which is duplicated: the caller closes its own."""
        return cls(_native.SharedMemory.from_fd(fd, read_only))

    @property
    def address(self) -> str:
        """The argument for :meth:`attach`, valid while this object lives."""
        return self._memory.address

    @property
    def fd(self) -> int:
        """The descriptor, closed when the segment and all tensors over it are gone."""
        return self._memory.fd

    @property
    def memory(self) -> _native.SharedMemory:
        """The native block."""
        return self._memory

    @property
    def size_bytes(self) -> int:
        return self._memory.size_bytes

    def tensor(
        self, shape: Sequence[int], dtype: torch.dtype, offset_bytes: int = 0
    ) -> torch.Tensor:
        """Return a contiguous CPU tensor over the bytes from ``offset_bytes``.

        It keeps the segment alive. Writing to a tensor over a read-only segment crashes the
        process.

        Raises:
            ArgumentError: it does not fit, or ``offset_bytes`` is not a multiple of the item size.
        """
        check_place(shape, dtype, offset_bytes, self.size_bytes, "a segment")
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset_bytes)
        return flat.view(tuple(shape))


def check_place(
    shape: Sequence[int], dtype: torch.dtype, offset_bytes: int, size_bytes: int, what: str
) -> None:
    """Raise :class:`ArgumentError` unless ``what``, of so many bytes, has place for a tensor."""
    end_bytes = offset_bytes + math.prod(shape) * dtype.itemsize
    if offset_bytes < 0 or offset_bytes % dtype.itemsize or end_bytes > size_bytes:
        raise ArgumentError(
            f"a {dtype} tensor of shape {tuple(shape)} at offset {offset_bytes} does not fit "
            f"{what} of {size_bytes} bytes"
        )

"""The contracts between the parts of `switching`, and the vocabulary they share.

An *arena* is one block of device memory that several processes map. A model's tensors are stored in
*groups*: contiguous, 512-byte aligned runs of bytes that are copied, placed and evicted as one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["ALIGNMENT_BYTES", "AddressRange", "Copy", "DeviceMemory", "WorkerLink", "align"]

# What cudaMalloc guarantees, and what vectorised kernels may rely on.
ALIGNMENT_BYTES = 512


def align(size_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """Round `size_bytes` up to a multiple of `alignment_bytes`."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


class AddressRange(Protocol):
    """Addresses of this process behind which parts of a :class:`DeviceMemory` come and go.

    Whatever reads an address without memory behind it fails. The addresses stay reserved until this
    process ends, so nothing else ever has one of them. Offsets and sizes are multiples of the
    memory's granule.
    """

    @property
    def address(self) -> int:
        """The first address."""

    def map(self, start_bytes: int, offset_bytes: int, size_bytes: int) -> None:
        """Put the memory from `offset_bytes` behind the addresses from `start_bytes`, which have
        none.

        Raises:
            SegmentError: the kernel or the driver refuses.
        """

    def unmap(self, start_bytes: int, size_bytes: int) -> None:
        """Undo the :meth:`map` of the same addresses. Nothing may read them meanwhile."""


class DeviceMemory(Protocol):
    """A block of device memory that this process maps; other processes map it through
    :meth:`export`.

    The memory lives until every process has dropped its object and every exported descriptor is
    closed, whatever kills them. Tensors keep this process's mapping alive.
    """

    @property
    def size_bytes(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def read_only(self) -> bool:
        """Whether the memory is read-only in this process."""

    def tensor(self) -> torch.Tensor:
        """Return the whole block as a uint8 tensor of `size_bytes` elements, without copying."""

    @property
    def parts(self) -> int:
        """How many descriptors, of parts of equal size, another process needs."""

    def export(self, part: int = 0, *, read_only: bool = False) -> int:
        """Return a new descriptor for another process; the caller closes it.

        A descriptor exported with `read_only` cannot be mapped writable where the device enforces
        it. Of a read-only mapping, only such descriptors are exported.
        """

    @property
    def granule_bytes(self) -> int:
        """The unit of what an :class:`AddressRange` maps."""

    def reserve(self, size_bytes: int) -> AddressRange:
        """Return addresses that this process has not used before, with no memory behind them.

        Raises:
            SegmentError: there are none left.
        """


@dataclass(frozen=True)
class Copy:
    """Bytes to move from host memory to the arena."""

    source: torch.Tensor  # uint8, on the host, contiguous
    offset_bytes: int  # in the arena


class WorkerLink(Protocol):
    """Moves bytes from host memory into an arena, in the order of the calls."""

    def start(self, copies: list[Copy]) -> Callable[[], None]:
        """Start copying; return a function that blocks until the bytes are visible to every
        process.

        The sources must stay unchanged until then. The returned function raises what the copy
        failed with.
        """

    def register(self, source: torch.Tensor) -> None:
        """Prepare host memory for fast copies; calls for the same memory are counted.

        A copy from memory that is not registered works too, more slowly.
        """

    def unregister(self, source: torch.Tensor) -> None:
        """Undo one :meth:`register`; no copy from the memory may be in progress."""

    def close(self) -> None:
        """Wait for copies in progress and free the link's resources. Idempotent."""

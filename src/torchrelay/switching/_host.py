"""Device memory on the CPU: an anonymous, sealed block of shared host memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable

import torch

from torchrelay.buffers import Segment
from torchrelay.errors import SegmentError
from torchrelay.switching._contract import Copy

__all__ = ["HostLink", "HostMemory"]

_PROT_NONE = 0  # <sys/mman.h>; the module mmap does not support it


class HostMemory:
    """The CPU implementation of :class:`DeviceMemory`."""

    device = torch.device("cpu")

    def __init__(self, segment: Segment, *, read_only: bool) -> None:
        self._segment = segment
        self.read_only = read_only
        self.size_bytes = segment.size_bytes

    @classmethod
    def allocate(cls, size_bytes: int) -> HostMemory:
        """Allocate and populate, so that no copy pays for first touches.

        Raises:
            SegmentError: not enough memory is available now.
        """
        available = _available_bytes()
        if size_bytes > available:  # populating more would start the kernel's OOM killer
            raise SegmentError(
                f"a shared cache of {size_bytes >> 20} MiB does not fit the {available >> 20} MiB "
                "of memory available now; choose a smaller size"
            )
        return cls(Segment.create(size_bytes, "torchrelay-arena", populate=True), read_only=False)

    @classmethod
    def open(cls, descriptor: int, *, read_only: bool) -> HostMemory:
        """Map the block behind `descriptor`, which the caller keeps and closes."""
        return cls(Segment.from_fd(descriptor, read_only=read_only), read_only=read_only)

    def tensor(self) -> torch.Tensor:
        return self._segment.tensor((self.size_bytes,), torch.uint8)

    def export(self, *, read_only: bool = False) -> int:
        # A descriptor opened for reading cannot be mapped writable: the kernel enforces it.
        flags = (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC
        return os.open(f"/proc/self/fd/{self._segment.fd}", flags)

    def nowhere(self) -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        size, flags = ctypes.c_size_t(self.size_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = libc.mmap(None, size, _PROT_NONE, flags, -1, ctypes.c_long(0))
        if address == ctypes.c_void_p(-1).value:
            raise SegmentError(f"cannot reserve addresses: {os.strerror(ctypes.get_errno())}")
        return int(address)


class HostLink:
    """Copies into an arena in host memory, at most at `gbytes_per_s` (0: as fast as memory allows).

    The limit emulates a PCIe link: copies keep to the schedule of a link that is busy back to back.
    """

    def __init__(self, arena: torch.Tensor, *, gbytes_per_s: float = 0.0) -> None:
        self._arena = arena
        self._bytes_per_s = gbytes_per_s * 1e9
        self._free_at_s = 0.0

    def start(self, copies: list[Copy]) -> Callable[[], None]:
        """Return the copy, which runs in the thread that waits for it."""
        queued_s = time.perf_counter()
        return lambda: self._copy(copies, queued_s)

    def register(self, source: torch.Tensor) -> None:
        """Do nothing: host memory needs no preparation."""

    def unregister(self, source: torch.Tensor) -> None:
        """Do nothing."""

    def close(self) -> None:
        self._arena = torch.empty(0, dtype=torch.uint8)  # a tensor keeps the arena mapped

    def _copy(self, copies: list[Copy], queued_s: float) -> None:
        for copy in copies:
            self._arena.narrow(0, copy.offset_bytes, copy.source.numel()).copy_(copy.source)
        if self._bytes_per_s:
            size_bytes = sum(copy.source.numel() for copy in copies)
            # What a thread that wakes late loses, the next copy makes up: it was queued before.
            self._free_at_s = max(self._free_at_s, queued_s) + size_bytes / self._bytes_per_s
            time.sleep(max(0.0, self._free_at_s - time.perf_counter()))


def _available_bytes() -> int:
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 62

"""Device memory on the CPU: an anonymous, sealed block of shared host memory."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import time
import weakref
from collections.abc import Callable

import torch

from torchrelay.buffers import Segment
from torchrelay.errors import SegmentError
from torchrelay.switching.device._contract import Copy, align

__all__ = ["HostLink", "HostMemory"]

# <sys/mman.h>; the module mmap does not support these.
_PROT_NONE = 0
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_PAGE_BYTES = mmap.PAGESIZE


class HostMemory:
    """The CPU implementation of :class:`DeviceMemory`."""

    device = torch.device("cpu")
    parts = 1
    granule_bytes = _PAGE_BYTES

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

    def export(self, part: int = 0, *, read_only: bool = False) -> int:
        # A descriptor opened for reading cannot be mapped writable: the kernel enforces it.
        flags = (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC
        return os.open(f"/proc/self/fd/{self._segment.fd}", flags)

    def reserve(self, size_bytes: int) -> HostRange:
        return HostRange(self._segment, align(size_bytes, _PAGE_BYTES), read_only=self.read_only)


class HostRange:
    """The CPU implementation of :class:`AddressRange`.

    The entries of the page table are moved from this process's mapping of the whole segment, and
    back, because the page faults of a new mapping take as long as a copy. Kernels before 5.13
    refuse to, and the pages are mapped anew.
    """

    def __init__(self, segment: Segment, size_bytes: int, *, read_only: bool) -> None:
        self._segment = segment
        self._protection = mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE
        self._home = segment.tensor((segment.size_bytes,), torch.uint8).data_ptr()
        self._mapped: dict[int, tuple[int, int]] = {}  # start -> offset in the segment, size
        self.address = _map(None, size_bytes, _PROT_NONE)
        _ranges.add(self)

    def map(self, start_bytes: int, offset_bytes: int, size_bytes: int) -> None:
        home, target = self._home + offset_bytes, self.address + start_bytes
        if not _move_pages(home, target, size_bytes):
            _map(target, size_bytes, self._protection, self._segment.fd, offset_bytes)
        self._mapped[start_bytes] = offset_bytes, size_bytes

    def unmap(self, start_bytes: int, size_bytes: int) -> None:
        offset_bytes, size_bytes = self._mapped.pop(start_bytes)
        target = self.address + start_bytes
        _move_pages(target, self._home + offset_bytes, size_bytes)
        _map(target, size_bytes, _PROT_NONE)

    def hide(self) -> None:
        """Map nothing any more; for a forked process, to which nobody says whose memory it is."""
        for start_bytes, (_, size_bytes) in self._mapped.items():
            _map(self.address + start_bytes, size_bytes, _PROT_NONE)


_ranges: weakref.WeakSet[HostRange] = weakref.WeakSet()


def _hide_all() -> None:
    for one in _ranges:
        one.hide()


os.register_at_fork(after_in_child=_hide_all)


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


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    word, size = ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype = libc.mremap.restype = word
    libc.mmap.argtypes = [word, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mremap.argtypes = [word, size, size, ctypes.c_int, word]
    libc.madvise.argtypes = [word, size, ctypes.c_int]
    return libc


def _map(
    address: int | None, size_bytes: int, protection: int, descriptor: int = -1, offset: int = 0
) -> int:
    """Map the file, or nothing, at `address`, or at an address that is free; return the address."""
    flags = mmap.MAP_SHARED
    if descriptor < 0:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    if address is not None:
        flags |= _MAP_FIXED
    found = _libc().mmap(address, size_bytes, protection, flags, descriptor, offset)
    if found == ctypes.c_void_p(-1).value:
        raise SegmentError(
            f"cannot map {size_bytes} bytes: {os.strerror(ctypes.get_errno())}; raise the limits "
            "of this process's addresses (ulimit -v) and mappings (sysctl vm.max_map_count)"
        )
    return int(found)


def _move_pages(source: int, target: int, size_bytes: int) -> bool:
    """Let `target` map what `source` does, which stays mapped, too; False if the kernel cannot."""
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    return bool(_libc().mremap(source, size_bytes, size_bytes, flags, target) == target)


def _available_bytes() -> int:
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 62

"""Device memory on CUDA: virtual memory management of the driver, through `cuda-bindings`.

A block is one or more physical allocations (`cuMemCreate`) of equal size, its *parts*, exported as
file descriptors and mapped one behind the other at an address of each process's own. The driver
maps a part as a whole only. All live in the device's primary context, which torch uses too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchrelay import _torch
from torchrelay.errors import SegmentError, UnavailableError
from torchrelay.switching.device._contract import Copy, align

__all__ = ["CudaLink", "CudaMemory", "load_driver"]


@functools.cache
def load_driver() -> Any:
    """Return the bindings of the CUDA driver.

    Raises:
        UnavailableError: the `[cuda]` extra or the driver itself is missing.
    """
    try:
        from cuda.bindings import driver  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise UnavailableError(
            "CUDA memory needs cuda-bindings: pip install cuda-bindings"
        ) from error
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # the library libcuda.so.1 cannot be loaded
        raise UnavailableError(
            f"the CUDA driver is not installed on this machine: {error}"
        ) from error
    _check(driver, "cuInit", status)
    return driver


class CudaMemory:
    """The CUDA implementation of :class:`DeviceMemory`."""

    def __init__(self, handles: _Handles, device: torch.device, *, read_only: bool) -> None:
        """Map the parts of `handles`."""
        self.size_bytes = len(handles.all) * handles.part_bytes
        self.granule_bytes = handles.part_bytes
        self.device = device
        self.read_only = read_only
        self._handles = handles
        self._mapping = _Mapping(handles, device, read_only=read_only)

    @classmethod
    def allocate(cls, size_bytes: int, device: torch.device, max_parts: int = 1) -> CudaMemory:
        """Allocate on `device`, rounded up to whole parts, and these to the device's granule.

        Raises:
            SegmentError: the driver refuses; out of memory, in most cases.
        """
        driver = load_driver()
        device = torch.device(device.type, device.index or 0)
        _use_primary_context(device)
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device.index
        properties.requestedHandleTypes = _posix()
        flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        granule = _call("cuMemGetAllocationGranularity", properties, flag)
        with _Handles(align(-(-size_bytes // max_parts), granule)) as handles:
            for _ in range(-(-size_bytes // handles.part_bytes)):
                handles.all.append(_call("cuMemCreate", handles.part_bytes, properties, 0))
            return cls(handles, device, read_only=False)

    @classmethod
    def open(
        cls,
        descriptors: Iterable[int],
        part_bytes: int,
        device: torch.device,
        *,
        read_only: bool,
    ) -> CudaMemory:
        """Map the parts behind `descriptors`, which the caller keeps and closes."""
        _use_primary_context(device)
        with _Handles(part_bytes) as handles:
            for one in descriptors:
                handles.all.append(_call("cuMemImportFromShareableHandle", one, _posix()))
            return cls(handles, device, read_only=read_only)

    @property
    def parts(self) -> int:
        return len(self._handles.all)

    def tensor(self) -> torch.Tensor:
        return _torch.tensor_at(self._mapping.address, self.size_bytes, self.device, self._mapping)

    def export(self, part: int = 0, *, read_only: bool = False) -> int:
        """Return a new descriptor. CUDA enforces `read_only` at the mapping, not at the
        descriptor.
        """
        handle = self._handles.all[part]
        descriptor: int = _call("cuMemExportToShareableHandle", handle, _posix(), 0)
        os.set_inheritable(descriptor, False)
        return descriptor

    def reserve(self, size_bytes: int) -> CudaRange:
        return CudaRange(self._handles, size_bytes, self.device, read_only=self.read_only)


class _Handles:
    """Physical allocations, released when this object is gone, or by an error in its block; what is
    mapped keeps the memory.
    """

    def __init__(self, part_bytes: int) -> None:
        self.part_bytes = part_bytes
        self.all: list[Any] = []
        self._release = weakref.finalize(self, _release, self.all)
        self._release.atexit = False  # the process's end frees everything

    def __enter__(self) -> _Handles:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is not None:
            self._release()


class CudaRange:
    """The CUDA implementation of :class:`AddressRange`; the addresses are never freed."""

    def __init__(
        self, handles: _Handles, size_bytes: int, device: torch.device, *, read_only: bool
    ) -> None:
        self._handles = handles
        self._access = _access(device, read_only=read_only)
        size_bytes = align(size_bytes, handles.part_bytes)
        self.address = int(_call("cuMemAddressReserve", size_bytes, 0, 0, 0))

    def map(self, start_bytes: int, offset_bytes: int, size_bytes: int) -> None:
        """Map part by part; one call makes all of them accessible."""
        part_bytes = self._handles.part_bytes
        first = offset_bytes // part_bytes
        with contextlib.ExitStack() as undo:
            for index in range(size_bytes // part_bytes):
                start, handle = start_bytes + index * part_bytes, self._handles.all[first + index]
                _call("cuMemMap", self._at(start), part_bytes, 0, handle, 0)
                undo.callback(self.unmap, start, part_bytes)
            start = self._at(start_bytes)
            _call("cuMemSetAccess", start, size_bytes, [self._access], 1)
            undo.pop_all()

    def unmap(self, start_bytes: int, size_bytes: int) -> None:
        part_bytes = self._handles.part_bytes
        for start in range(start_bytes, start_bytes + size_bytes, part_bytes):
            _call("cuMemUnmap", self._at(start), part_bytes)

    def _at(self, start_bytes: int) -> Any:
        return load_driver().CUdeviceptr(self.address + start_bytes)


class _Mapping:
    """A range over all parts; unmapped and freed when the last tensor over it is gone."""

    def __init__(self, handles: _Handles, device: torch.device, *, read_only: bool) -> None:
        size_bytes = len(handles.all) * handles.part_bytes
        with contextlib.ExitStack() as undo:
            mapped = CudaRange(handles, size_bytes, device, read_only=read_only)
            pointer = load_driver().CUdeviceptr(mapped.address)
            undo.callback(_call, "cuMemAddressFree", pointer, size_bytes)
            mapped.map(0, 0, size_bytes)
            undo.callback(mapped.unmap, 0, size_bytes)
            # Unmap, then free the range: the reverse order of what was done.
            weakref.finalize(self, undo.pop_all().close).atexit = False
        self.address = mapped.address


def _access(device: torch.device, *, read_only: bool) -> Any:
    driver = load_driver()
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device.index
    flags = driver.CUmemAccess_flags
    access.flags = (
        flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        if read_only
        else flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    )
    return access


def _release(handles: list[Any]) -> None:
    for handle in handles:
        _call("cuMemRelease", handle)


class CudaLink:
    """Copies from pinned host memory into an arena, on a stream of its own."""

    def __init__(self, arena: torch.Tensor, device: torch.device) -> None:
        self._device = device
        self._address = arena.data_ptr()
        _use_primary_context(self._device)
        flag = load_driver().CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = _call("cuStreamCreate", flag)
        self._registered: Counter[int] = Counter()  # by address
        self._registering = threading.Lock()  # callers register, the daemon's thread unregisters

    def start(self, copies: list[Copy]) -> Callable[[], None]:
        """Queue the copies and an event behind them; the returned function waits for the event."""
        _use_primary_context(self._device)
        with contextlib.ExitStack() as undo:
            # What is queued before an error must not arrive later: others may get the space.
            undo.callback(load_driver().cuStreamSynchronize, self._stream)
            for copy in copies:
                target, source = self._address + copy.offset_bytes, copy.source.data_ptr()
                size_bytes = copy.source.numel()
                _call("cuMemcpyHtoDAsync", target, source, size_bytes, self._stream)
            # Blocking: the waiting thread sleeps instead of spinning on a core.
            flags = load_driver().CUevent_flags
            blocking = int(flags.CU_EVENT_BLOCKING_SYNC) | int(flags.CU_EVENT_DISABLE_TIMING)
            event = _call("cuEventCreate", blocking)
            undo.callback(_call, "cuEventDestroy", event)
            _call("cuEventRecord", event, self._stream)
            undo.pop_all()

        def wait() -> None:
            try:
                _call("cuEventSynchronize", event)
            finally:
                _call("cuEventDestroy", event)

        return wait

    def register(self, source: torch.Tensor) -> None:
        """Pin `source`, so that copies from it are asynchronous and run at the link's full rate."""
        _use_primary_context(self._device)
        with self._registering:
            if not self._registered[source.data_ptr()]:
                flags = load_driver().CU_MEMHOSTREGISTER_PORTABLE
                _call("cuMemHostRegister", source.data_ptr(), source.numel(), flags)
            self._registered[source.data_ptr()] += 1

    def unregister(self, source: torch.Tensor) -> None:
        """Unpin `source` once it is not registered any more."""
        _use_primary_context(self._device)
        with self._registering:
            self._registered[source.data_ptr()] -= 1
            if not self._registered[source.data_ptr()]:
                del self._registered[source.data_ptr()]
                _call("cuMemHostUnregister", source.data_ptr())

    def close(self) -> None:
        if self._stream is None:
            return
        _use_primary_context(self._device)
        _call("cuStreamSynchronize", self._stream)
        for address in self._registered:
            _call("cuMemHostUnregister", address)
        self._registered.clear()
        _call("cuStreamDestroy", self._stream)
        self._stream = None


def _posix() -> Any:
    return load_driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


_contexts: dict[int, Any] = {}


def _use_primary_context(device: torch.device) -> None:
    """Make the device's primary context current in this thread; retained once for the life of the
    process.
    """
    if device.index not in _contexts:
        handle = _call("cuDeviceGet", device.index)
        _contexts[device.index] = _call("cuDevicePrimaryCtxRetain", handle)
    _call("cuCtxSetCurrent", _contexts[device.index])


def _call(name: str, *arguments: Any) -> Any:
    """Call a driver function and return its value; every CUresult but success raises
    SegmentError.
    """
    driver = load_driver()
    status, *values = getattr(driver, name)(*arguments)
    _check(driver, name, status)
    return values[0] if values else None


def _check(driver: Any, name: str, status: Any) -> None:
    if status == driver.CUresult.CUDA_SUCCESS:
        return
    advice = ""
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        advice = "; allocate less, or end other processes that use the device"
    raise SegmentError(f"{name} failed with {driver.CUresult(status).name}{advice}")

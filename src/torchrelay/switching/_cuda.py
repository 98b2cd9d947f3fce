"""Device memory on CUDA: virtual memory management of the driver, through `cuda-bindings`.

An arena is one physical allocation (`cuMemCreate`), exported as a file descriptor and mapped at an
address of each process's own. It lives in the device's primary context, which torch uses too.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from torchrelay import _torch
from torchrelay.errors import SegmentError, UnavailableError
from torchrelay.switching._contract import Copy, align

__all__ = ["CudaLink", "CudaMemory", "load_driver"]


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

    def __init__(
        self, driver: Any, handle: Any, size_bytes: int, device: torch.device, *, read_only: bool
    ) -> None:
        """Map `handle` and take ownership of it."""
        self.size_bytes = size_bytes
        self.device = device
        self.read_only = read_only
        self._driver = driver
        self._handle = handle
        try:
            self._mapping = _Mapping(driver, handle, size_bytes, device, read_only=read_only)
        except BaseException:
            _call(driver, "cuMemRelease", handle)
            raise
        release = weakref.finalize(self, _call, driver, "cuMemRelease", handle)
        release.atexit = False  # the process's end frees everything

    @classmethod
    def allocate(cls, size_bytes: int, device: torch.device) -> CudaMemory:
        """Allocate on `device`, rounded up to the device's granule.

        Raises:
            SegmentError: the driver refuses; out of memory, in most cases.
        """
        driver = load_driver()
        device = torch.device(device.type, device.index or 0)
        _use_primary_context(driver, device)
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device.index
        properties.requestedHandleTypes = _posix(driver)
        flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        granule = _call(driver, "cuMemGetAllocationGranularity", properties, flag)
        size_bytes = align(size_bytes, granule)
        handle = _call(driver, "cuMemCreate", size_bytes, properties, 0)
        return cls(driver, handle, size_bytes, device, read_only=False)

    @classmethod
    def open(
        cls, descriptor: int, size_bytes: int, device: torch.device, *, read_only: bool
    ) -> CudaMemory:
        """Map the allocation behind `descriptor`, which the caller keeps and closes."""
        driver = load_driver()
        _use_primary_context(driver, device)
        handle = _call(driver, "cuMemImportFromShareableHandle", descriptor, _posix(driver))
        return cls(driver, handle, size_bytes, device, read_only=read_only)

    def tensor(self) -> torch.Tensor:
        return _torch.tensor_at(self._mapping.address, self.size_bytes, self.device, self._mapping)

    def export(self, *, read_only: bool = False) -> int:
        """Return a new descriptor. CUDA enforces `read_only` at the mapping, not at the
        descriptor.
        """
        descriptor: int = _call(
            self._driver, "cuMemExportToShareableHandle", self._handle, _posix(self._driver), 0
        )
        os.set_inheritable(descriptor, False)
        return descriptor

    def nowhere(self) -> int:
        return int(_call(self._driver, "cuMemAddressReserve", self.size_bytes, 0, 0, 0))


class _Mapping:
    """An address range of this process over an allocation; unmapped when the last tensor over it is
    gone.
    """

    def __init__(
        self, driver: Any, handle: Any, size_bytes: int, device: torch.device, *, read_only: bool
    ) -> None:
        with contextlib.ExitStack() as undo:
            pointer = _call(driver, "cuMemAddressReserve", size_bytes, 0, 0, 0)
            undo.callback(_call, driver, "cuMemAddressFree", pointer, size_bytes)
            _call(driver, "cuMemMap", pointer, size_bytes, 0, handle, 0)
            undo.callback(_call, driver, "cuMemUnmap", pointer, size_bytes)
            access = driver.CUmemAccessDesc()
            access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = device.index
            flags = driver.CUmemAccess_flags
            access.flags = (
                flags.CU_MEM_ACCESS_FLAGS_PROT_READ
                if read_only
                else flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            )
            _call(driver, "cuMemSetAccess", pointer, size_bytes, [access], 1)
            # Unmap, then free the range: the reverse order of what was done.
            weakref.finalize(self, undo.pop_all().close).atexit = False
        self.address = int(pointer)


class CudaLink:
    """Copies from pinned host memory into an arena, on a stream of its own."""

    def __init__(self, arena: torch.Tensor, device: torch.device) -> None:
        self._driver = load_driver()
        self._device = device
        self._address = arena.data_ptr()
        _use_primary_context(self._driver, self._device)
        flag = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = _call(self._driver, "cuStreamCreate", flag)
        self._registered: Counter[int] = Counter()  # by address
        self._registering = threading.Lock()  # callers register, the daemon's thread unregisters

    def start(self, copies: list[Copy]) -> Callable[[], None]:
        """Queue the copies and an event behind them; the returned function waits for the event."""
        _use_primary_context(self._driver, self._device)
        with contextlib.ExitStack() as undo:
            # What is queued before an error must not arrive later: others may get the space.
            undo.callback(self._driver.cuStreamSynchronize, self._stream)
            for copy in copies:
                target, source = self._address + copy.offset_bytes, copy.source.data_ptr()
                size_bytes = copy.source.numel()
                _call(self._driver, "cuMemcpyHtoDAsync", target, source, size_bytes, self._stream)
            # Blocking: the waiting thread sleeps instead of spinning on a core.
            flags = self._driver.CUevent_flags
            blocking = int(flags.CU_EVENT_BLOCKING_SYNC) | int(flags.CU_EVENT_DISABLE_TIMING)
            event = _call(self._driver, "cuEventCreate", blocking)
            undo.callback(_call, self._driver, "cuEventDestroy", event)
            _call(self._driver, "cuEventRecord", event, self._stream)
            undo.pop_all()

        def wait() -> None:
            try:
                _call(self._driver, "cuEventSynchronize", event)
            finally:
                _call(self._driver, "cuEventDestroy", event)

        return wait

    def register(self, source: torch.Tensor) -> None:
        """Pin `source`, so that copies from it are asynchronous and run at the link's full rate."""
        _use_primary_context(self._driver, self._device)
        with self._registering:
            if not self._registered[source.data_ptr()]:
                flags = self._driver.CU_MEMHOSTREGISTER_PORTABLE
                _call(self._driver, "cuMemHostRegister", source.data_ptr(), source.numel(), flags)
            self._registered[source.data_ptr()] += 1

    def unregister(self, source: torch.Tensor) -> None:
        """Unpin `source` once it is not registered any more."""
        _use_primary_context(self._driver, self._device)
        with self._registering:
            self._registered[source.data_ptr()] -= 1
            if not self._registered[source.data_ptr()]:
                del self._registered[source.data_ptr()]
                _call(self._driver, "cuMemHostUnregister", source.data_ptr())

    def close(self) -> None:
        if self._stream is None:
            return
        _use_primary_context(self._driver, self._device)
        _call(self._driver, "cuStreamSynchronize", self._stream)
        for address in self._registered:
            _call(self._driver, "cuMemHostUnregister", address)
        self._registered.clear()
        _call(self._driver, "cuStreamDestroy", self._stream)
        self._stream = None


def _posix(driver: Any) -> Any:
    return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


_contexts: dict[int, Any] = {}


def _use_primary_context(driver: Any, device: torch.device) -> None:
    """Make the device's primary context current in this thread; retained once for the life of the
    process.
    """
    if device.index not in _contexts:
        handle = _call(driver, "cuDeviceGet", device.index)
        _contexts[device.index] = _call(driver, "cuDevicePrimaryCtxRetain", handle)
    _call(driver, "cuCtxSetCurrent", _contexts[device.index])


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    """Call a driver function and return its value; every CUresult but success raises
    SegmentError.
    """
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

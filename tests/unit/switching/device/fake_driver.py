"""A CUDA driver in host memory that checks every call: argument types and values, order, and what
is left.

Enums and structures are those of cuda-bindings, so a wrong name or type fails here too.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import torch
from cuda.bindings import driver as real

from torchrelay import _torch
from torchrelay.switching.device import _cuda

GRANULE = 2 << 20
_KEPT = ("CU", "CUDA")


def install(fake: FakeDriver, patch: Any = setattr) -> None:
    """Put `fake` in place of the driver, and tensors in host memory in place of torch's on CUDA."""

    def host_tensor(
        address: int, size_bytes: int, device: torch.device, owner: object
    ) -> torch.Tensor:
        assert device == torch.device("cuda", 0)
        block = (ctypes.c_uint8 * size_bytes).from_address(address)
        block.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(block, dtype=torch.uint8)

    storage_at = _torch.storage_at

    def host_storage(address: int, size_bytes: int, device: torch.device) -> torch.UntypedStorage:
        assert device == torch.device("cuda", 0)
        return storage_at(address, size_bytes, torch.device("cpu"))

    patch(_cuda, "load_driver", lambda: fake)
    patch(_torch, "storage_at", host_storage)
    patch(_cuda, "_contexts", {})
    patch(_torch, "tensor_at", host_tensor)


class FakeDriver:
    """Devices' memory is host memory; `log` lists the calls; `fail[name]` makes a call fail."""

    def __init__(self, memory_bytes: int = 64 << 20) -> None:
        self.memory_bytes = memory_bytes
        self.log: list[str] = []
        self.fail: dict[str, Any] = {}
        self.allocations: dict[int, tuple[int, int]] = {}  # handle -> (memfd, size)
        self.references: dict[int, int] = {}
        self.reserved: dict[int, int] = {}  # address -> size
        self.mapped: dict[int, tuple[int, int]] = {}  # address -> (handle, size)
        self.access: dict[int, Any] = {}
        self.pinned: dict[int, int] = {}
        self.streams: dict[int, list[tuple[int, int, int]]] = {}  # target, source, size
        self.events: dict[int, int | None] = {}  # event -> operations of its stream before it
        self._contexts = threading.local()  # current in each thread
        self._copying = threading.Lock()
        self._next = 1000
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_KEPT):
            return getattr(real, name)
        raise AttributeError(f"the driver has no function {name}, or this fake one lacks it")

    def assert_nothing_left(self) -> None:
        left = (
            self.allocations,
            self.reserved,
            self.mapped,
            self.pinned,
            self.streams,
            self.events,
        )
        assert not any(left), left

    def _call(self, name: str, *values: Any) -> tuple[Any, ...]:
        self.log.append(name)
        if name in self.fail:
            return (self.fail.pop(name), *[None for _ in values])
        return (real.CUresult.CUDA_SUCCESS, *values)

    def _new(self) -> int:
        self._next += 1
        return self._next

    # --- context

    def cuInit(self, flags: int) -> Any:
        assert flags == 0
        return self._call("cuInit")

    def cuDeviceGet(self, ordinal: int) -> Any:
        assert ordinal == 0
        return self._call("cuDeviceGet", real.CUdevice(ordinal))

    def cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        assert isinstance(device, real.CUdevice)
        return self._call("cuDevicePrimaryCtxRetain", 77)

    def cuCtxSetCurrent(self, context: int) -> Any:
        assert context == 77
        self._contexts.current = context
        return self._call("cuCtxSetCurrent")

    @property
    def context(self) -> int | None:
        """What is current in this thread."""
        return getattr(self._contexts, "current", None)

    # --- virtual memory

    def _check_properties(self, properties: Any) -> None:
        assert isinstance(properties, real.CUmemAllocationProp)
        assert properties.type == real.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        assert properties.location.type == real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        assert properties.location.id == 0
        posix = real.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        assert properties.requestedHandleTypes == posix

    def cuMemGetAllocationGranularity(self, properties: Any, flag: Any) -> Any:
        assert self.context, "no context is current"
        self._check_properties(properties)
        assert isinstance(flag, real.CUmemAllocationGranularity_flags)
        return self._call("cuMemGetAllocationGranularity", GRANULE)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> Any:
        assert self.context and flags == 0 and size > 0 and size % GRANULE == 0
        self._check_properties(properties)
        if size > self.memory_bytes:
            self.fail["cuMemCreate"] = real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        handle = self._new()
        result = self._call("cuMemCreate", handle)
        if result[1] is not None:
            descriptor = os.memfd_create("fake-cuda")
            os.ftruncate(descriptor, size)
            self.allocations[handle] = (descriptor, size)
        return result

    def cuMemExportToShareableHandle(self, handle: int, kind: Any, flags: int) -> Any:
        assert (
            flags == 0
            and kind == real.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
        return self._call("cuMemExportToShareableHandle", os.dup(self.allocations[handle][0]))

    def cuMemImportFromShareableHandle(self, descriptor: int, kind: Any) -> Any:
        assert self.context
        assert kind == real.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = self._new()
        result = self._call("cuMemImportFromShareableHandle", handle)
        if result[1] is not None:
            self.allocations[handle] = (os.dup(descriptor), os.fstat(descriptor).st_size)
        return result

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> Any:
        assert size % GRANULE == 0 and alignment == address == flags == 0
        # PROT_NONE: what is reserved and not mapped cannot be touched.
        pointer = self._libc.mmap(None, ctypes.c_size_t(size), 0, 0x22, -1, ctypes.c_long(0))
        result = self._call("cuMemAddressReserve", real.CUdeviceptr(pointer))
        if result[1] is not None:
            self.reserved[pointer] = size
        return result

    def cuMemMap(self, pointer: Any, size: int, offset: int, handle: int, flags: int) -> Any:
        assert isinstance(pointer, real.CUdeviceptr)
        assert offset == flags == 0 and size == self.allocations[handle][1], "the whole handle only"
        assert any(
            start <= int(pointer) and int(pointer) + size <= start + length
            for start, length in self.reserved.items()
        ), "not reserved"
        assert all(
            int(pointer) + size <= start or start + length <= int(pointer)
            for start, (_, length) in self.mapped.items()
        ), "mapped already"
        result = self._call("cuMemMap")
        if result[0] == real.CUresult.CUDA_SUCCESS:
            self.mapped[int(pointer)] = (handle, size)
            self.references[handle] = self.references.get(handle, 0) + 1
        return result

    def cuMemSetAccess(self, pointer: Any, size: int, descriptors: list[Any], count: int) -> Any:
        (descriptor,) = descriptors
        start, end = int(pointer), int(pointer) + size
        inside = sorted(one for one in self.mapped if start <= one < end)
        assert count == 1 and isinstance(pointer, real.CUdeviceptr)
        assert sum(self.mapped[one][1] for one in inside) == size, "all of it must be mapped"
        assert descriptor.location.type == real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        flags = real.CUmemAccess_flags
        protection = {
            flags.CU_MEM_ACCESS_FLAGS_PROT_READ: 1,
            flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE: 3,
        }
        result = self._call("cuMemSetAccess")
        if result[0] == real.CUresult.CUDA_SUCCESS:
            for one in inside:
                handle, length = self.mapped[one]
                self.access[one] = descriptor.flags
                descriptor_of = self.allocations[handle][0]
                fixed_shared = 0x11
                self._mmap(one, length, protection[descriptor.flags], fixed_shared, descriptor_of)
        return result

    def _mmap(self, at: int, size: int, protection: int, flags: int, descriptor: int) -> None:
        mapped = self._libc.mmap(
            ctypes.c_void_p(at),
            ctypes.c_size_t(size),
            protection,
            flags,
            descriptor,
            ctypes.c_long(0),
        )
        assert mapped == at

    def cuMemUnmap(self, pointer: Any, size: int) -> Any:
        assert isinstance(pointer, real.CUdeviceptr)
        handle, mapped_size = self.mapped.pop(int(pointer))
        assert mapped_size == size
        self.access.pop(int(pointer), None)
        self._mmap(int(pointer), size, 0, 0x32, -1)  # reserved again
        self.references[handle] -= 1
        self._drop(handle)
        return self._call("cuMemUnmap")

    def cuMemAddressFree(self, pointer: Any, size: int) -> Any:
        size_reserved = self.reserved.pop(int(pointer))
        assert size_reserved == size and not any(
            int(pointer) <= one < int(pointer) + size for one in self.mapped
        ), "unmap first"
        self._libc.munmap(ctypes.c_void_p(int(pointer)), ctypes.c_size_t(size))
        return self._call("cuMemAddressFree")

    def cuMemRelease(self, handle: int) -> Any:
        assert handle in self.allocations
        self.references[handle] = self.references.get(handle, 0) - (1 << 20)
        self._drop(handle)
        return self._call("cuMemRelease")

    def _drop(self, handle: int) -> None:
        """The memory lives until it is released and unmapped everywhere, as the driver's does."""
        if self.references.get(handle) == -(1 << 20):
            os.close(self.allocations.pop(handle)[0])

    # --- copies

    def cuStreamCreate(self, flag: Any) -> Any:
        assert self.context and flag == real.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = self._new()
        self.streams[stream] = []
        return self._call("cuStreamCreate", stream)

    def cuStreamDestroy(self, stream: int) -> Any:
        assert not self.streams.pop(stream), "the stream is busy"
        return self._call("cuStreamDestroy")

    def cuStreamSynchronize(self, stream: int) -> Any:
        self._run(stream)
        return self._call("cuStreamSynchronize")

    def cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> Any:
        assert self.context
        inside = sum(
            max(0, min(target + size, base + n) - max(target, base))
            for base, (_, n) in self.mapped.items()
        )
        assert inside == size, "not all of the target is mapped"
        assert any(
            base <= source and source + size <= base + n for base, n in self.pinned.items()
        ), "not pinned"
        result = self._call("cuMemcpyHtoDAsync")
        if result[0] == real.CUresult.CUDA_SUCCESS:
            self.streams[stream].append((target, source, size))
        return result

    def cuMemHostRegister(self, pointer: int, size: int, flags: int) -> Any:
        assert self.context and flags == real.CU_MEMHOSTREGISTER_PORTABLE and size > 0
        assert pointer not in self.pinned, "registered already"
        self.pinned[pointer] = size
        return self._call("cuMemHostRegister")

    def cuMemHostUnregister(self, pointer: int) -> Any:
        size = self.pinned.pop(pointer)
        for copies in self.streams.values():
            for _, source, _ in list(copies):
                assert not pointer <= source < pointer + size, "a copy from it is in progress"
        return self._call("cuMemHostUnregister")

    def cuEventCreate(self, flags: int) -> Any:
        wanted = real.CUevent_flags
        assert flags == int(wanted.CU_EVENT_BLOCKING_SYNC) | int(wanted.CU_EVENT_DISABLE_TIMING)
        event = self._new()
        result = self._call("cuEventCreate", event)
        if result[1] is not None:
            self.events[event] = None
        return result

    def cuEventRecord(self, event: int, stream: int) -> Any:
        self.events[event] = stream
        return self._call("cuEventRecord")

    def cuEventSynchronize(self, event: int) -> Any:
        stream = self.events[event]
        assert stream is not None, "the event was never recorded"
        self._run(stream)
        return self._call("cuEventSynchronize")

    def cuEventDestroy(self, event: int) -> Any:
        del self.events[event]
        return self._call("cuEventDestroy")

    def _run(self, stream: int) -> None:
        with self._copying:
            while self.streams[stream]:
                ctypes.memmove(*self.streams[stream][0])
                del self.streams[stream][0]

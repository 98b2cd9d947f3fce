"""One block of device memory that several processes map."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchrelay._helper import Channel
from torchrelay._platform import need_core, user_at_other_end
from torchrelay._resource import Resource
from torchrelay.buffers import check_place
from torchrelay.errors import (
    ArgumentError,
    CapacityError,
    OperationTimeoutError,
    PeerLostError,
    ProtocolError,
)
from torchrelay.switching.device._contract import ALIGNMENT_BYTES, DeviceMemory, align
from torchrelay.switching.device._host import HostMemory
from torchrelay.switching.models._layout import layout_of

__all__ = ["Region", "SharedCache"]

_POLL_S = 0.01


class SharedCache(Resource):
    """A block of device memory shared by the processes of one user; made by :meth:`allocate` or
    :meth:`recv`.

    On the CPU the block is an anonymous memory file, on CUDA a VMM allocation. Neither has a name:
    the memory is freed when the last process that maps it exits or is killed.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self.size_bytes = memory.size_bytes
        self.device = memory.device
        #: Whether the cache is read-only in this process; a write to it crashes the process.
        self.read_only = memory.read_only
        self._memory: DeviceMemory | None = memory
        self._regions: list[Region] = []

    @classmethod
    def allocate(
        cls, size_bytes: int, device: str | torch.device = "cpu", *, max_parts: int = 1
    ) -> SharedCache:
        """Allocate `size_bytes` on `device` and touch all of it.

        Args:
            device: "cpu", "cuda[:index]", or "auto": CUDA if this machine has a device, else the
                CPU.
            max_parts: on CUDA, how many allocations it may consist of. A part is the least that
                is mapped by itself; :meth:`send` takes a cache of one.

        CUDA rounds the size up to its granule of 2 MiB.

        Raises:
            ArgumentError: the size or the device is wrong.
            SegmentError: the device does not have that much memory now.
            UnavailableError: the device, or the `[cuda]` extra, is missing.
        """
        need_core("torchrelay.switching")
        if size_bytes < 1:
            raise ArgumentError(f"a shared cache needs at least 1 byte, not {size_bytes}")
        device = _device(device)
        if device.type == "cpu":
            return cls(HostMemory.allocate(size_bytes))
        from torchrelay.switching.device._cuda import CudaMemory  # noqa: PLC0415 - needs the [cuda] extra

        return cls(CudaMemory.allocate(size_bytes, device, max_parts))

    @classmethod
    def recv(cls, address: str | Path, *, timeout_s: float = 60.0) -> SharedCache:
        """Map the cache that another process of this user sends at `address`, waiting for it.

        Raises:
            OperationTimeoutError: nothing was sent within `timeout_s` seconds.
            ProtocolError: the process that listens there speaks another protocol, or is another
                user's.
        """
        need_core("torchrelay.switching")
        header, descriptor = _receive_descriptor(address, timeout_s=timeout_s)
        try:
            return cls.from_descriptors(header, [descriptor])
        finally:
            os.close(descriptor)

    @classmethod
    def from_descriptors(cls, header: dict[str, object], descriptors: Iterable[int]) -> SharedCache:
        """Map the memory of exported descriptors, one for each part, described by :meth:`describe`.

        The caller closes the descriptors; each is used before the next one is taken.
        """
        try:
            device = torch.device(str(header["device"]))
            size_bytes, parts = int(str(header["size_bytes"])), int(str(header["parts"]))
            read_only = bool(header["read_only"])
        except (KeyError, ValueError, RuntimeError) as error:
            raise ProtocolError(f"malformed description of a shared cache: {error}") from error
        if device.type == "cpu":
            memory: DeviceMemory = HostMemory.open(next(iter(descriptors)), read_only=read_only)
            if memory.size_bytes != size_bytes:
                raise ProtocolError(
                    f"the cache holds {memory.size_bytes} bytes, not {size_bytes} as announced"
                )
            return cls(memory)
        from torchrelay.switching.device._cuda import CudaMemory  # noqa: PLC0415

        part_bytes = size_bytes // parts
        return cls(CudaMemory.open(descriptors, part_bytes, device, read_only=read_only))

    def describe(self, *, read_only: bool = False) -> dict[str, object]:
        """Return the JSON values that :meth:`from_descriptors` needs beside descriptors."""
        return {
            "device": str(self.device),
            "size_bytes": self.size_bytes,
            "parts": self.memory.parts,
            "read_only": read_only or self.read_only,
        }

    def export(self, part: int = 0, *, read_only: bool = False) -> int:
        """Return a new descriptor of a part of the memory, for a child process; the caller closes
        it.
        """
        return self.memory.export(part, read_only=read_only or self.read_only)

    def send(
        self, address: str | Path, *, read_only: bool = False, timeout_s: float = 60.0
    ) -> None:
        """Send the cache to one process of this user that calls :meth:`recv` with the same
        `address`.

        Blocks until the other process has it. `address` is a path for a Unix socket, which exists,
        with mode 0600, for the length of the call.

        Raises:
            ArgumentError: `address` cannot be used.
            OperationTimeoutError: no process received within `timeout_s` seconds.
            PeerLostError: the receiver went away meanwhile.
        """
        descriptor = self.export(read_only=read_only)
        try:
            header = self.describe(read_only=read_only)
            _send_descriptor(address, header, descriptor, timeout_s=timeout_s)
        finally:
            os.close(descriptor)

    def tensor(
        self, shape: Sequence[int], dtype: torch.dtype, offset_bytes: int = 0
    ) -> torch.Tensor:
        """Return a contiguous tensor over the bytes from `offset_bytes`; it keeps the mapping
        alive.

        Raises:
            ArgumentError: it does not fit, or `offset_bytes` is not a multiple of the item size.
        """
        check_place(shape, dtype, offset_bytes, self.size_bytes, "a shared cache")
        size_bytes = math.prod(shape) * dtype.itemsize
        data = self.memory.tensor().narrow(0, offset_bytes, size_bytes)
        return data.view(dtype).view(tuple(shape))

    def insert_for_parameter(self, size_bytes: int = 1 << 30, offset_bytes: int = 0) -> Region:
        """Return a region of `size_bytes` from `offset_bytes` for parameters.

        Place modules there with :meth:`Region.put`.

        Raises:
            ArgumentError: the region leaves the cache, is not 512-byte aligned, or overlaps another
                one.
        """
        return self._insert("parameter", size_bytes, offset_bytes)

    def insert_for_computation(self, size_bytes: int, offset_bytes: int) -> Region:
        """Return a region of `size_bytes` from `offset_bytes` for intermediate results.

        Allocate tensors there with :meth:`Region.empty`.

        Raises:
            ArgumentError: as :meth:`insert_for_parameter`.
        """
        return self._insert("computation", size_bytes, offset_bytes)

    def clear(self) -> None:
        """Forget this process's regions, so that the memory can be inserted again. Tensors stay
        readable.
        """
        self._regions.clear()

    def close(self) -> None:
        """Unmap the cache in this process once no tensor over it is left. Idempotent."""
        self.clear()
        self._memory = None

    @property
    def memory(self) -> DeviceMemory:
        """This process's mapping."""
        if self._memory is None:
            raise ArgumentError("the shared cache is closed")
        return self._memory

    def _insert(self, purpose: str, size_bytes: int, offset_bytes: int) -> Region:
        region = Region(self, purpose, size_bytes, offset_bytes)
        is_inside = size_bytes >= 1 and offset_bytes >= 0 and region.end_bytes <= self.size_bytes
        if not is_inside or offset_bytes % ALIGNMENT_BYTES:
            raise ArgumentError(
                f"{region} does not fit a cache of {self.size_bytes} bytes, or its offset is no "
                f"multiple of {ALIGNMENT_BYTES}"
            )
        for other in self._regions:
            if offset_bytes < other.end_bytes and other.offset_bytes < region.end_bytes:
                raise ArgumentError(f"{region} overlaps {other}; clear() first")
        self._regions.append(region)
        return region


@dataclass(eq=False)
class Region:
    """A part of a shared cache from which tensors are allocated one after the other."""

    cache: SharedCache
    purpose: str
    size_bytes: int
    offset_bytes: int
    used_bytes: int = 0

    def __str__(self) -> str:
        return f"a {self.purpose} region of {self.size_bytes} bytes at offset {self.offset_bytes}"

    @property
    def end_bytes(self) -> int:
        """The offset behind the region."""
        return self.offset_bytes + self.size_bytes

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return an uninitialised, 512-byte aligned tensor from the region.

        Raises:
            CapacityError: the region has not enough bytes left.
        """
        size_bytes = math.prod(shape) * dtype.itemsize
        if self.used_bytes + size_bytes > self.size_bytes:
            raise CapacityError(
                f"{size_bytes} bytes do not fit the {self.purpose} region: {self.used_bytes} of "
                f"its {self.size_bytes} bytes are in use; reset() it or insert a larger one"
            )
        tensor = self.cache.tensor(shape, dtype, self.offset_bytes + self.used_bytes)
        self.used_bytes += align(size_bytes)
        return tensor

    def put(self, module: torch.nn.Module) -> torch.nn.Module:
        """Move all parameters and buffers of `module` into the region, in place, and return
        `module`.

        Tied tensors stay tied. The module's `Parameter` objects stay the same objects.

        Raises:
            CapacityError: they do not fit; nothing has been moved.
        """
        _, storages = layout_of(module)
        wanted = sum(align(storage.size_bytes) for storage in storages)
        if self.used_bytes + wanted > self.size_bytes:
            raise CapacityError(
                f"a module of {wanted} bytes does not fit the {self.purpose} region: "
                f"{self.used_bytes} of its {self.size_bytes} bytes are in use"
            )
        for storage in storages:
            data = self.empty((storage.size_bytes,), torch.uint8)
            data.copy_(storage.bytes())
            storage.rebind(data)
        return module

    def reset(self) -> None:
        """Make the whole region available again; new tensors reuse the memory of earlier ones."""
        self.used_bytes = 0


def _device(name: str | torch.device) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with contextlib.suppress(RuntimeError):
        device = torch.device(name)
        if device.type in ("cpu", "cuda"):
            return device
    raise ArgumentError(f"device = {name}: the choices are auto, cpu and cuda[:index]")


# --- file descriptors, passed between processes of one user over a Unix socket


def _send_descriptor(
    address: str | Path, header: dict[str, Any], descriptor: int, *, timeout_s: float
) -> None:
    """Wait for one process of this user at `address` and send it `descriptor` with a `header`.

    The socket file is created with mode 0600 and removed before this returns. Processes of other
    users are refused and do not count. A stale socket file is replaced.

    Raises:
        ArgumentError: `address` is too long, in use, or names something that is not a socket.
        OperationTimeoutError: no process received within `timeout_s` seconds.
        PeerLostError: the receiver went away before it acknowledged.
    """
    path, deadline = Path(address), time.monotonic() + timeout_s
    with _listening(path) as listener:
        channel = None
        while channel is None:
            listener.settimeout(_seconds_until(deadline))
            try:
                channel = _channel_of_this_user(listener.accept()[0])
            except TimeoutError:
                raise OperationTimeoutError(
                    f"no process received the shared cache at {path} within {timeout_s:g} s; call "
                    "recv() there"
                ) from None
        with contextlib.closing(channel):
            channel.send(header, [descriptor])
            if channel.receive(_seconds_until(deadline)) is None:
                raise PeerLostError(f"the receiver at {path} did not map the cache in time")


def _receive_descriptor(address: str | Path, *, timeout_s: float) -> tuple[dict[str, Any], int]:
    """Connect to a sender at `address`, waiting for it to listen, and return its header and the
    descriptor, which the caller closes.

    Raises:
        OperationTimeoutError: nothing arrived within `timeout_s` seconds.
        ProtocolError: what listens there is not a sender, or is another user's process.
    """
    path, deadline = Path(address), time.monotonic() + timeout_s
    while (received := _received_from(path, deadline)) is None:
        if time.monotonic() > deadline:
            raise OperationTimeoutError(
                f"no shared cache was sent at {path} within {timeout_s:g} s; call send() in "
                "the process that allocated it"
            )
        time.sleep(_POLL_S)
    return received


def _received_from(path: Path, deadline: float) -> tuple[dict[str, Any], int] | None:
    """Return what a sender sends; None if there is none, or it sends to another process."""
    connection = _connected(path, _seconds_until(deadline))
    if connection is None:
        return None
    channel = _channel_of_this_user(connection)
    if channel is None:
        raise ProtocolError(f"the process that listens at {path} belongs to another user")
    with contextlib.closing(channel):
        try:
            received = channel.receive(_seconds_until(deadline))
        except PeerLostError as error:
            if isinstance(error.__cause__, ConnectionResetError):  # it was not accepted
                return None
            raise ProtocolError(f"what listens at {path} is no sender: {error}") from error
        if received is None:
            return None
        header, descriptors = received
        if not isinstance(header, dict) or len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ProtocolError(f"what listens at {path} sent no shared cache")
        with contextlib.suppress(PeerLostError):  # the descriptor is here in any case
            channel.send(None)
    return header, descriptors[0]


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            _remove_stale(path)
            # The mode of a socket file follows the umask; no process can connect before listen().
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(8)
        except OSError as error:
            raise ArgumentError(
                f"cannot listen at {path}: {error}; choose another socket path"
            ) from error
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _remove_stale(path: Path) -> None:
    """Remove a socket file without a listener; leave everything else alone."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_socket():
        raise ArgumentError(f"{path} exists and is not a socket; choose another socket path")
    connection = _connected(path, timeout_s=1.0)
    if connection is not None:
        connection.close()
        raise ArgumentError(f"another process listens at {path}; choose another socket path")
    path.unlink(missing_ok=True)


def _connected(path: Path, timeout_s: float) -> socket.socket | None:
    """Return a connection to what listens at `path`; None if nothing does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    return connection


def _channel_of_this_user(connection: socket.socket) -> Channel | None:
    """Return a channel if the other end of `connection` is a process of this user; else close
    it.
    """
    if user_at_other_end(connection) == os.geteuid():
        return Channel(connection)
    connection.close()
    return None


def _seconds_until(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())

"""The memory in which the daemon and one worker exchange the tensors of a request."""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

import torch

from torchrelay.buffers import Segment
from torchrelay.errors import ArgumentError, CapacityError
from torchrelay.switching.device._contract import ALIGNMENT_BYTES, align

__all__ = ["BufferPool", "RequestBuffer", "Written"]

_HEADER_BYTES = ALIGNMENT_BYTES
# Copying less than this takes less time than lending it out and using another buffer.
_LEND_BYTES = 256 << 10
# Of one worker: a caller may keep a reply while the next one is computed, and that while a third
# is. With more replies kept, outputs are copied.
_BUFFERS = 3


# Where a tensor lies in a buffer: its name, dtype, shape, and offset in bytes. A class, or torch's
# dtypes, would take several times as long to pickle.
Written = tuple[str, str, tuple[int, ...], int]


class RequestBuffer:
    """The inputs of one request and, behind them, its outputs. The two sides use it in turn.

    Tensors move by `memmove`: after a long forward pass the processor's caches hold none of the
    code, and a copy by torch runs through more of it than the whole protocol does.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._started: memoryview[int] = _view_of(segment).cast("B")[:8].cast("q")
        self._tensors = segment.tensor((1,), torch.uint8).data_ptr() + _HEADER_BYTES
        self.size_bytes = segment.size_bytes - _HEADER_BYTES

    @classmethod
    def create(cls, size_bytes: int) -> RequestBuffer:
        """Create a buffer for `size_bytes` of inputs and outputs."""
        return cls(Segment.create(_HEADER_BYTES + size_bytes, "torchrelay-requests"))

    @classmethod
    def open(cls, descriptor: int) -> RequestBuffer:
        """Map the buffer of the other side and close `descriptor`."""
        try:
            return cls(Segment.from_fd(descriptor))
        finally:
            os.close(descriptor)

    @property
    def descriptor(self) -> int:
        """The buffer's file descriptor, which stays the buffer's own."""
        return self._segment.fd

    @property
    def started(self) -> int:
        """The id of the last request that the worker started; it outlives the worker."""
        return self._started[0]

    @started.setter
    def started(self, request_id: int) -> None:
        self._started[0] = request_id

    def write(self, tensors: Mapping[str, torch.Tensor], start: int) -> tuple[list[Written], int]:
        """Write `tensors`, of any device, from the aligned byte `start`; return where they are, and
        their end.

        Raises:
            CapacityError: they do not fit.
        """
        written, offset = [], start
        for name, tensor in tensors.items():
            plain = tensor.resolve_conj().resolve_neg().contiguous()
            size_bytes, left = plain.nbytes, self.size_bytes - offset
            if size_bytes > left:
                raise CapacityError(
                    f"the outputs take {sum(one.nbytes for one in tensors.values())} bytes, "
                    f"{self.size_bytes - start} of the request buffer are left; start with larger "
                    "request_bytes"
                )
            written.append((name, str(tensor.dtype), tuple(tensor.shape), offset))
            if plain.is_cpu:
                ctypes.memmove(self._tensors + offset, plain.data_ptr(), size_bytes)
            else:
                _tensor_in(_view_of(self._segment), written[-1]).copy_(plain)
            offset += align(size_bytes)
        return written, offset

    def read(self, written: list[Written]) -> dict[str, torch.Tensor]:
        """Return copies of the tensors that :meth:`write` wrote.

        Raises:
            ArgumentError: a mode of the calling thread makes tensors without memory.
        """
        tensors = {}
        for name, dtype, shape, offset in written:
            tensor = torch.empty(shape, dtype=_dtype(dtype), device="cpu")
            address = tensor.data_ptr()
            if tensor.nbytes and not address:
                raise ArgumentError(
                    "torch makes tensors without memory here; call outside of FakeTensorMode and "
                    "torch.func's transforms"
                )
            ctypes.memmove(address, self._tensors + offset, tensor.nbytes)
            tensors[name] = tensor
        return tensors

    def lend(self, written: list[Written], ended: Callable[[], object]) -> dict[str, torch.Tensor]:
        """Return the tensors themselves; `ended` is called, in any thread, when all are gone."""
        # Each tensor's storage keeps the view, and the view the mapping.
        view = _view_of(self._segment)
        weakref.finalize(view, ended).atexit = False
        return {one[0]: _tensor_in(view, one) for one in written}


class BufferPool:
    """The buffers of one worker, in the daemon: one in use, the others free or lent out."""

    def __init__(self, size_bytes: int) -> None:
        self.all = [RequestBuffer.create(size_bytes) for _ in range(_BUFFERS)]
        self.current, *free = self.all
        self._free = deque(free)  # callers' threads append

    @property
    def index(self) -> int:
        """Which buffer is the current one."""
        return self.all.index(self.current)

    def take(self, written: list[Written]) -> dict[str, torch.Tensor]:
        """Return the outputs in the current buffer; the next request may use another buffer.

        Large outputs are not copied: their buffer is used again when the caller has dropped them.
        """
        sizes = (math.prod(shape) * _dtype(dtype).itemsize for _, dtype, shape, _ in written)
        if sum(sizes) < _LEND_BYTES or not self._free:
            return self.current.read(written)
        lent, self.current = self.current, self._free.popleft()
        return lent.lend(written, partial(self._free.append, lent))


def _view_of(segment: Segment) -> memoryview[int]:
    return memoryview(segment.memory)  # type: ignore[arg-type] # a buffer since before PEP 688


def _tensor_in(view: memoryview[int], one: Written) -> torch.Tensor:
    _, name, shape, offset = one
    count, dtype = math.prod(shape), _dtype(name)
    if not count:
        return torch.empty(shape, dtype=dtype, device="cpu")
    start = _HEADER_BYTES + offset
    return torch.frombuffer(view, dtype=dtype, count=count, offset=start).view(shape)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype

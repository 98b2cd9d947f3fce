"""The memory to which asynchronous saves copy tensors, and which the writer process maps."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from torchrelay import _native
from torchrelay.buffers import Segment
from torchrelay.checkpoint._tensors import address_of, plain

__all__ = ["Staging", "starts_of"]

_logger = logging.getLogger("torchrelay.checkpoint")
_ALIGNMENT = 64
_SMALL_BYTES = 256 << 10  # of a copy that is not worth several threads


def starts_of(sizes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return where tensors of these sizes begin in a segment."""
    rounded = -(-sizes.astype(np.int64) // _ALIGNMENT) * _ALIGNMENT
    return (np.cumsum(rounded) - rounded).astype(np.uint64)


class Staging:
    """A shared segment that is reused from save to save, and replaced when a save needs more.

    It is page-locked for copies from CUDA tensors, which then run at the rate of the link.
    """

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self.is_new = False  # until the writer process has the segment
        self._locked: torch.Tensor | None = None  # over all of the segment, if it is page-locked

    @property
    def fd(self) -> int:
        assert self._segment is not None
        return self._segment.fd

    def copy(
        self,
        tensors: Sequence[torch.Tensor],
        starts: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
    ) -> None:
        """Copy tensors of ``sizes`` bytes to ``starts``. Blocks until they may change."""
        addresses = np.array([*map(address_of, tensors)], np.uint64)
        devices = {
            tensors[i].device for i in np.flatnonzero(addresses == 0).tolist() if tensors[i].is_cuda
        }
        end = int((starts + sizes).max(initial=0))
        self.reserve(end, locked=bool(devices))
        if self._segment is None:
            return  # there are no bytes
        small = (addresses != 0) & (sizes <= _SMALL_BYTES)
        whole = self._segment.tensor((self._segment.size_bytes,), torch.uint8)
        targets = starts[small] + np.uint64(whole.data_ptr())
        _native.copy_memory(targets, addresses[small], sizes[small])
        with torch.no_grad():
            for i in np.flatnonzero(~small).tolist():
                tensor = plain(tensors[i])
                target = self._segment.tensor(tensor.shape, tensor.dtype, int(starts[i]))
                target.copy_(tensor, non_blocking=tensor.is_cuda)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def reserve(self, size_bytes: int, *, locked: bool) -> None:
        """Ensure that the segment has ``size_bytes``."""
        if size_bytes > 0 and (self._segment is None or self._segment.size_bytes < size_bytes):
            self.close()  # before the new one is made, so that there are never two
            self._segment = Segment.create(size_bytes, "torchrelay-checkpoint")
            self.is_new = True
        if locked and self._locked is None and self._segment is not None:
            memory = self._segment.tensor((self._segment.size_bytes,), torch.uint8)
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
            if code:
                _logger.warning(
                    "the copy for asynchronous saves, %d bytes, cannot be page-locked (CUDA error "
                    "%d); saves are right, but stall longer",
                    memory.nbytes,
                    code,
                )
            else:
                self._locked = memory

    def close(self) -> None:
        """Release the memory."""
        locked, self._locked = self._locked, None
        if locked is not None:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(locked.data_ptr())
        self._segment = None

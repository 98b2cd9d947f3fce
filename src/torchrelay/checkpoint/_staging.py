"""The memory to which asynchronous saves copy tensors, and which the writer process maps."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from torchrelay.buffers import Segment
from torchrelay.checkpoint._tensors import byte_view, plain
from torchrelay.checkpoint._write import Source

__all__ = ["Staging"]

_logger = logging.getLogger("torchrelay.checkpoint")
_ALIGNMENT = 64
_SMALL_BYTES = 256 << 10  # of a copy that is not worth several threads


class Staging:
    """A shared segment that is reused from save to save, and replaced when a save needs more.

    It is page-locked for copies from CUDA tensors, which then run at the rate of the link.
    """

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self._locked: torch.Tensor | None = None  # over all of the segment, if it is page-locked

    @property
    def fd(self) -> int:
        assert self._segment is not None
        return self._segment.fd

    def copy(self, sources: Sequence[Source]) -> tuple[list[int], bool]:
        """Copy the tensors. Blocks until they may change.

        Returns:
            where each one starts, and whether the segment is new.
        """
        starts, end = [], 0
        for source in sources:
            starts.append(end)
            end = -(-(end + source.size_bytes) // _ALIGNMENT) * _ALIGNMENT
        devices = {source.tensor.device for source in sources if source.tensor.is_cuda}
        is_new = self.reserve(end, locked=bool(devices))
        if self._segment is None:
            return starts, is_new  # there are no bytes
        whole = byte_view(self._segment.tensor((self._segment.size_bytes,), torch.uint8))
        with torch.no_grad():
            for source, start in zip(sources, starts, strict=True):
                if not source.copies and source.size_bytes <= _SMALL_BYTES:
                    whole[start : start + source.size_bytes] = source.data()
                    continue
                target = self._segment.tensor(source.box.sizes, source.tensor.dtype, start)
                target.copy_(plain(source.tensor), non_blocking=source.tensor.is_cuda)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return starts, is_new

    def reserve(self, size_bytes: int, *, locked: bool) -> bool:
        """Ensure that the segment has ``size_bytes``; return whether it is a new one."""
        is_new = size_bytes > 0 and (self._segment is None or self._segment.size_bytes < size_bytes)
        if is_new:
            self.close()  # before the new one is made, so that there are never two
            self._segment = Segment.create(size_bytes, "torchrelay-checkpoint")
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
        return is_new

    def close(self) -> None:
        """Release the memory."""
        locked, self._locked = self._locked, None
        if locked is not None:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(locked.data_ptr())
        self._segment = None

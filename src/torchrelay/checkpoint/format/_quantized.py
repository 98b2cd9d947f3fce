"""Snapshots whose matrices are stored in 8 bits, with a scale for each block of them: what is read
is multiplied by the scales on the way to a tensor of another dtype.

``X_scale_inv`` holds the scales of ``X``, as DeepSeek and Qwen publish their models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from torchrelay._boxes import Box
from torchrelay.checkpoint._types import Dtype, Manifest, TensorEntry
from torchrelay.checkpoint.engine._read import segments_of
from torchrelay.errors import MismatchError

__all__ = ["SCALES", "Scales"]

SCALES = "_scale_inv"  # what the names of scales end with

_BLOCK = 128  # rows and columns; all publishers' today


class Scales:
    """The scales of a quantized matrix.

    Attributes:
        segments: what is read of them, into the parts ``targets`` of ``values``.
    """

    def __init__(self, key: str, stored: TensorEntry, entry: TensorEntry) -> None:
        self.key, self._stored = key, stored
        self.values = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype.name))
        whole = Box.whole(entry.shape)
        self.segments = segments_of(key, entry, whole)
        self.targets = [self.values[one.inner.within(whole)] for one in self.segments]

    @classmethod
    def of(cls, manifest: Manifest, key: str, dtype: Dtype) -> Scales | None:
        """Return those of a tensor that is read as ``dtype``; None if it is not quantized, or is
        wanted as it is.

        Raises:
            MismatchError: their number does not fit the tensor.
        """
        stored, entry = manifest.tensors[key], manifest.tensors.get(key + SCALES)
        is_quantized = stored.dtype.name.startswith("float8") and len(stored.shape) == 2
        is_wanted = dtype.name in ("float64", "float32", "float16", "bfloat16")
        if entry is None or not (is_quantized and is_wanted):
            return None
        blocks = tuple(-(-size // _BLOCK) for size in stored.shape)
        if entry.shape != blocks:
            raise MismatchError(
                f"{key!r} of shape {list(stored.shape)} has scales of shape {list(entry.shape)}; "
                f"known are those of blocks of {_BLOCK} by {_BLOCK}, which would be {list(blocks)}"
            )
        return cls(key + SCALES, stored, entry)

    def scaled(
        self, inner: Box, target: torch.Tensor | partial[torch.Tensor]
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return the memory into which ``inner`` is read, and what fills ``target`` from it."""
        stored = torch.empty(inner.sizes, dtype=getattr(torch, self._stored.dtype.name))

        def fill() -> None:
            into = target() if isinstance(target, partial) else target
            first, columns = inner.offsets[0], torch.arange(inner.sizes[1]) + inner.offsets[1]
            scales = self.values.float()[:, columns // _BLOCK]
            with torch.no_grad():
                for row in range(first // _BLOCK, -(-(first + inner.sizes[0]) // _BLOCK)):
                    rows = slice(max(0, row * _BLOCK - first), (row + 1) * _BLOCK - first)
                    into[rows].copy_(stored[rows].float() * scales[row])

        return stored, fill

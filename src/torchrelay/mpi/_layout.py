"""Memory layout of the parts of a tensor that is cut along an axis."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from torchrelay.errors import ArgumentError
from torchrelay.mpi._memory import fresh

__all__ = [
    "Blocks",
    "Layout",
    "any_length",
    "axis_of",
    "equal_part",
    "layout",
    "parts",
    "with_length",
]


def axis_of(axis: int, ndim: int) -> int:
    """Return ``axis`` counted from the front.

    Raises:
        ArgumentError: there is no such axis.
    """
    if not -ndim <= axis < ndim:
        raise ArgumentError(f"axis {axis} of a tensor that has {ndim} axes")
    return axis % ndim


def with_length(shape: Sequence[int], axis: int, length: int) -> list[int]:
    """Return ``shape`` with ``length`` along ``axis``."""
    result = list(shape)
    result[axis] = length
    return result


def any_length(x: Tensor, axis: int, known: Sequence[int] | None = None) -> tuple[object, ...]:
    """Return the shape of ``x`` with "any", or the ``known`` lengths of all ranks, at ``axis``."""
    shape: list[object] = list(x.shape)
    shape[axis] = tuple(known) if known else "any"
    return tuple(shape)


def equal_part(x: Tensor, axis: int, size: int) -> int:
    """Return the length along ``axis`` of each of ``size`` equal parts of ``x``.

    Raises:
        ArgumentError: it cannot be cut into equal parts.
    """
    length = x.shape[axis_of(axis, x.ndim)]
    if length % size:
        raise ArgumentError(f"{length} along axis {axis} cannot be cut into {size} equal parts")
    return length // size


class Layout(NamedTuple):
    """Positions of the consecutive parts of a tensor."""

    shapes: tuple[tuple[int, ...], ...]
    axis: int
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    total: int
    whole: tuple[int, ...]  # the tensor's shape
    is_whole: bool  # whether that is how the tensor itself lies


@functools.lru_cache(maxsize=128)
def layout(shapes: tuple[tuple[int, ...], ...], axis: int) -> Layout:
    """Return the layout of parts of these ``shapes``. Cached."""
    first, counts = shapes[0], tuple(math.prod(shape) for shape in shapes)
    whole = (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])
    starts = (0, *accumulate(counts[:-1]))
    return Layout(shapes, axis, counts, starts, sum(counts), whole, math.prod(first[:axis]) == 1)


@functools.lru_cache(maxsize=128)
def parts(shape: tuple[int, ...], lengths: tuple[int, ...], axis: int) -> Layout:
    """Return the layout of parts like ``shape`` with ``lengths`` along ``axis``."""
    return layout(tuple((*shape[:axis], length, *shape[axis + 1 :]) for length in lengths), axis)


class Blocks(NamedTuple):
    """Contiguous memory that holds parts of a tensor."""

    memory: Tensor
    layout: Layout

    @classmethod
    def empty(
        cls, dtype: torch.dtype, layout: Layout, device: torch.device | None = None
    ) -> Blocks:
        """Allocate memory for the parts."""
        shape = layout.whole if layout.is_whole else (layout.total,)
        return cls(fresh(shape, dtype, device), layout)

    @classmethod
    def cut(cls, x: Tensor, lengths: Sequence[int], axis: int) -> Blocks:
        """Cut contiguous ``x`` along ``axis``, without a copy if the parts are consecutive."""
        layout = parts(tuple(x.shape), tuple(lengths), axis)
        if layout.is_whole:
            return cls(x, layout)
        blocks = cls.empty(x.dtype, layout, x.device)
        for part, given in zip(
            blocks.tensors(), x.split_with_sizes(list(lengths), axis), strict=True
        ):
            part.copy_(given)
        return blocks

    def tensors(self) -> list[Tensor]:
        flat = self.memory.view(-1).split_with_sizes(self.layout.counts)
        return [part.view(shape) for part, shape in zip(flat, self.layout.shapes, strict=True)]

    def joined(self) -> Tensor:
        """Return the tensor, without a copy if possible."""
        return self.memory if self.layout.is_whole else torch.cat(self.tensors(), self.layout.axis)

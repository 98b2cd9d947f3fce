"""How the parts of a tensor that is cut along an axis lie in memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from torchrelay.errors import ArgumentError
from torchrelay.mpi._dtypes import buffer
from torchrelay.mpi._memory import fresh

__all__ = ["Blocks", "Layout", "axis_of", "equal_part", "layout", "parts", "with_length"]


def axis_of(axis: int, ndim: int) -> int:
    """``axis`` counted from the front.

    Raises:
        ArgumentError: there is no such axis.
    """
    if not -ndim <= axis < ndim:
        raise ArgumentError(f"axis {axis} of a tensor that has {ndim} axes")
    return axis % ndim


def with_length(shape: Sequence[int], axis: int, length: int) -> list[int]:
    """``shape``, but ``length`` along ``axis``."""
    result = list(shape)
    result[axis] = length
    return result


def equal_part(x: Tensor, axis: int, size: int) -> int:
    """How much of ``x`` along ``axis`` each of ``size`` ranks gets.

    Raises:
        ArgumentError: it cannot be cut into equal parts.
    """
    length = x.shape[axis_of(axis, x.ndim)]
    if length % size:
        raise ArgumentError(f"{length} along axis {axis} cannot be cut into {size} equal parts")
    return length // size


class Layout(NamedTuple):
    """Where the parts of a tensor lie that is cut along an axis: one after the other."""

    shapes: tuple[tuple[int, ...], ...]
    axis: int
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    total: int
    whole: tuple[int, ...]  # the tensor's shape
    is_whole: bool  # whether that is how the tensor itself lies


@functools.lru_cache(maxsize=128)
def layout(shapes: tuple[tuple[int, ...], ...], axis: int) -> Layout:
    """Of parts that have ``shapes``. Remembered, as :func:`parts`: it takes longer than a small message."""
    first, counts = shapes[0], tuple(math.prod(shape) for shape in shapes)
    whole = (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])
    starts = (0, *accumulate(counts[:-1]))
    return Layout(shapes, axis, counts, starts, sum(counts), whole, math.prod(first[:axis]) == 1)


@functools.lru_cache(maxsize=128)
def parts(shape: tuple[int, ...], lengths: tuple[int, ...], axis: int) -> Layout:
    """Of parts that are like ``shape``, but have ``lengths`` along ``axis``."""
    return layout(tuple((*shape[:axis], length, *shape[axis + 1 :]) for length in lengths), axis)


class Blocks(NamedTuple):
    """Contiguous memory, of any shape, in which parts of a tensor lie."""

    memory: Tensor
    layout: Layout

    @classmethod
    def empty(cls, dtype: torch.dtype, layout: Layout) -> Blocks:
        """New memory for them."""
        return cls(fresh(layout.whole if layout.is_whole else (layout.total,), dtype), layout)

    @classmethod
    def cut(cls, x: Tensor, lengths: Sequence[int], axis: int) -> Blocks:
        """Contiguous ``x``, cut along ``axis``; no copy where the parts lie one after the other."""
        layout = parts(tuple(x.shape), tuple(lengths), axis)
        if layout.is_whole:
            return cls(x, layout)
        blocks = cls.empty(x.dtype, layout)
        for part, given in zip(blocks.tensors(), x.split_with_sizes(list(lengths), axis), strict=True):
            part.copy_(given)
        return blocks

    def tensors(self) -> list[Tensor]:
        flat = self.memory.view(-1).split_with_sizes(self.layout.counts)
        return [part.view(shape) for part, shape in zip(flat, self.layout.shapes, strict=True)]

    def joined(self) -> Tensor:
        """The tensor; no copy where none is needed."""
        return self.memory if self.layout.is_whole else torch.cat(self.tensors(), self.layout.axis)

    def vector(self) -> tuple[object, ...]:
        """As mpi4py takes the memory of a v-collective."""
        memory, _, kind = buffer(self.memory)
        return (memory, self.layout.counts, self.layout.starts, kind)

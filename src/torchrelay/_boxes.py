"""Blocks of tensors: which part of a whole a rank, a chunk or a shard is. Imports no torch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from operator import add, sub
from typing import NamedTuple

__all__ = ["Box", "contiguous_runs", "intersection", "tiling_fault"]


class Box(NamedTuple):
    """A block of a tensor: its first element in each dimension, and its extent."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def of(cls, slices: Sequence[slice], shape: Sequence[int]) -> Box:
        """Return the box that ``slices`` of step 1 select; where they are fewer than the
        dimensions, the rest is whole.
        """
        full = (*slices, *(slice(None),) * (len(shape) - len(slices)))
        ranges = [range(*one.indices(size)) for one, size in zip(full, shape, strict=True)]
        return cls(tuple(one.start for one in ranges), tuple(map(len, ranges)))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the place of the box in a tensor that holds ``outer``."""
        return tuple(
            slice(a - b, a - b + size)
            for a, b, size in zip(self.offsets, outer.offsets, self.sizes, strict=True)
        )


def intersection(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes that are not empty, or None if it is empty."""
    for start, size, other_start, other_size in zip(*one, *other, strict=True):
        if start + size <= other_start or other_start + other_size <= start:
            return None
    offsets = tuple(map(max, one.offsets, other.offsets))
    ends = map(min, map(add, *one), map(add, *other))
    return Box(offsets, tuple(map(sub, ends, offsets)))


def tiling_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Describe why ``boxes`` do not cover a tensor of ``shape`` exactly once; None if they do."""
    if _is_nested_tiling(tuple(shape), boxes, 0):
        return None
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            return f"a chunk has {len(box.offsets)} dimensions, the tensor {len(shape)}"
        for start, extent, size in zip(box.offsets, box.sizes, shape, strict=True):
            if start < 0 or extent < 0 or start + extent > size:
                return f"the chunk at {box.offsets} of shape {box.sizes} is out of range"
    full = [box for box in boxes if box.numel]
    for box, other in combinations(full, 2):
        common = intersection(box, other)
        if common is not None:
            return f"two chunks overlap at {common.offsets}"
    covered, total = sum(box.numel for box in full), math.prod(shape)
    return None if covered == total else f"its chunks hold {covered} of {total} elements"


def _is_nested_tiling(shape: tuple[int, ...], boxes: Sequence[Box], dim: int) -> bool:
    """Whether ``boxes``, alike in the dimensions before ``dim``, cut the others one after another.

    Every sharding over a mesh does. Linear in the number of boxes, unlike the search for overlaps.
    """
    if len(boxes) == 1:
        offsets, sizes = boxes[0]
        return len(offsets) == len(shape) and sizes[dim:] == shape[dim:] and not any(offsets[dim:])
    if dim == len(shape):
        return False
    slabs: dict[tuple[int, int], list[Box]] = defaultdict(list)
    for box in boxes:
        if not len(box.offsets) == len(box.sizes) == len(shape):
            return False
        slabs[box.offsets[dim], box.sizes[dim]].append(box)
    end = 0
    for start, size in sorted(slabs):
        if start != end:
            return False
        end += size
    return end == shape[dim] and all(
        _is_nested_tiling(shape, slab, dim + 1) for slab in slabs.values()
    )


def contiguous_runs(
    inner: Box, outer: Box, strides: Sequence[int] | None = None
) -> tuple[int, int, tuple[int, ...]]:
    """Describe the position of ``inner`` in the storage of ``outer``.

    Args:
        strides: those of ``outer``; by default row-major.

    Returns:
        the index of the first element of ``inner``, the length of each contiguous run, and the
        strides of ``outer``, all in elements.
    """
    dims = range(len(outer.sizes))
    strides = tuple(strides or (math.prod(outer.sizes[dim + 1 :]) for dim in dims))
    first = sum(
        (a - b) * stride for a, b, stride in zip(inner.offsets, outer.offsets, strides, strict=True)
    )
    run = 1
    for size, stride in zip(reversed(inner.sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if stride != run:
            break
        run *= size
    return first, run, strides

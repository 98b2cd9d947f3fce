"""Geometry of boxes: intersections, an index for them, and whether boxes tile a tensor. Pure
functions.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence

from torchrelay.checkpoint._types import Box

__all__ = ["BoxIndex", "contiguous_runs", "intersection", "row_major_strides", "tiling_fault"]


def intersection(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    offsets = tuple(max(pair) for pair in zip(one.offsets, other.offsets, strict=True))
    ends = (
        min(a + m, b + n)
        for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
    sizes = tuple(end - start for start, end in zip(offsets, ends, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


class BoxIndex:
    """Finds which of many boxes intersect a given one, in time logarithmic in their number plus
    linear in the result.

    The boxes are sorted along the dimension in which they differ most; sharded tensors are cut
    along few dimensions, so that most candidates are hits.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._dim = _busiest_dimension(boxes)
        order = range(len(boxes))
        if self._dim is not None:
            dim = self._dim
            order = sorted(order, key=lambda i: boxes[i].offsets[dim])  # type: ignore[assignment]
            self._starts = [boxes[i].offsets[dim] for i in order]
            self._longest = max(box.sizes[dim] for box in boxes)
        self._entries = [(i, boxes[i]) for i in order]

    def meeting(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Return the position of each box that intersects ``box``, and the intersection."""
        first, last = 0, len(self._entries)
        if self._dim is not None:
            start = box.offsets[self._dim]
            first = bisect_left(self._starts, start - self._longest + 1)
            last = bisect_left(self._starts, start + box.sizes[self._dim])
        for position, candidate in self._entries[first:last]:
            common = intersection(candidate, box)
            if common is not None:
                yield position, common


def _busiest_dimension(boxes: Sequence[Box]) -> int | None:
    """Return the dimension with the most different offsets; None if all are equal."""
    if len(boxes) < 2 or not boxes[0].offsets:
        return None
    return max(
        range(len(boxes[0].offsets)), key=lambda dim: len({box.offsets[dim] for box in boxes})
    )


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
    index = BoxIndex(full)
    for position, box in enumerate(full):
        for other, common in index.meeting(box):
            if other != position:
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
    strides = tuple(strides or row_major_strides(outer.sizes))
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


def row_major_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor."""
    strides = [1] * len(sizes)
    for dim in reversed(range(len(strides) - 1)):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return tuple(strides)

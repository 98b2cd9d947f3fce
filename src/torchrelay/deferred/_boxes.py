"""Regions of a storage as boxes on a common grid, so that they can be intersected and cut.

A grid is a descending list of strides, each a multiple of the next. A region whose strides are on
the grid, or span several of its axes, covers a box: on each axis a start and a length.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torchrelay.deferred._graph import Region

__all__ = ["Box", "box_of", "common_grid", "intersection"]


@dataclass(frozen=True)
class Box:
    """A region on a grid.

    Attributes:
        starts, lengths: for each axis of the grid.
        groups: for each dimension of the region, the axes that it spans, outermost first; none if
            its size is 1.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The axes in the order of the region's dimensions; axes of length 1 come last."""
        used = [axis for group in self.groups for axis in group]
        return (*used, *(axis for axis in range(len(self.lengths)) if axis not in used))


def common_grid(regions: list[Region]) -> tuple[int, ...] | None:
    """Return the strides of a grid on which all ``regions`` may be boxes; None: there is none."""
    strides = {
        stride
        for region in regions
        for stride, extent in zip(region.stride, region.size, strict=True)
        if extent > 1
    }
    if 0 in strides:
        return None
    grid = sorted(strides, reverse=True) or [1]
    if any(outer % inner for outer, inner in itertools.pairwise(grid)):
        return None
    return tuple(grid)


def box_of(region: Region, grid: tuple[int, ...]) -> Box | None:
    """Return ``region`` as a box on ``grid``; None if it is not one."""
    starts, left = [], region.offset
    for stride in grid:
        starts.append(left // stride)
        left %= stride
    if left:
        return None
    lengths = [1] * len(grid)
    groups: list[tuple[int, ...]] = []
    taken: set[int] = set()
    for extent, stride in zip(region.size, region.stride, strict=True):
        group = _span(extent, stride, grid, lengths)
        if group is None or taken & set(group):
            return None
        taken.update(group)
        groups.append(group)
    for axis in range(1, len(grid)):
        if starts[axis] + lengths[axis] > grid[axis - 1] // grid[axis]:
            return None
    return Box(tuple(starts), tuple(lengths), tuple(groups))


def _span(
    extent: int, stride: int, grid: tuple[int, ...], lengths: list[int]
) -> tuple[int, ...] | None:
    """Return the axes that a dimension spans, outermost first, and enter their lengths."""
    if extent == 1:
        return ()
    axis = grid.index(stride)
    group: list[int] = []
    while axis > 0:
        room = grid[axis - 1] // grid[axis]
        if extent <= room:
            break
        if extent % room:
            return None
        lengths[axis] = room
        group.append(axis)
        extent //= room
        axis -= 1
    lengths[axis] = extent
    if extent > 1 or not group:
        group.append(axis)
    return tuple(reversed(group))


def intersection(one: Box, other: Box) -> tuple[tuple[int, int], ...] | None:
    """Return start and stop per axis of the intersection of two boxes; None if empty."""
    ranges = []
    for start, length, start2, length2 in zip(
        one.starts, one.lengths, other.starts, other.lengths, strict=True
    ):
        low, high = max(start, start2), min(start + length, start2 + length2)
        if low >= high:
            return None
        ranges.append((low, high))
    return tuple(ranges)

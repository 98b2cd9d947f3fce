"""The values of a part of a tensor, in the time and memory of that part.

The operations that wrote a storage are gone through in order, and each is carried out on what it has in
common with the part: constants and random numbers are filled in (the generator is moved to the first word
that the part needs), elementwise operations are given the same part of their arguments. What cannot be cut
so (a decomposition, a permutation) is evaluated whole and then sliced, one tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred import boxes, draws
from torchrelay.deferred.boxes import Box
from torchrelay.deferred.composites import constant
from torchrelay.deferred.graph import Constant, External, Node, Region, Storage, map_tensors
from torchrelay.deferred.operators import describe
from torchrelay.deferred.positions import Position
from torchrelay.deferred.replay import END, Replay, writers

__all__ = ["materialize_storage", "part_of"]


class _NotSliceableError(Exception):
    """Some operation cannot be carried out on a part."""


def part_of(region: Region, replay: Replay, before: int = END) -> torch.Tensor:
    """The values of ``region`` as the operations before place ``before`` left them: contiguous, of its shape."""
    if 0 in region.size:
        return torch.empty(region.size, dtype=region.dtype, device=replay.place(region.storage.device))
    try:
        with _torch.plain_torch():
            return _Part(region, replay, before).values()
    except _NotSliceableError:
        return replay.values(region, before).clone(memory_format=torch.contiguous_format)


def materialize_storage(storage: Storage, dtype: torch.dtype, replay: Replay) -> torch.UntypedStorage:
    """The memory of ``storage``, for good. What it copied a part of is not made whole if that can be avoided."""
    nodes = writers(storage, END)
    if storage.real is None and any(_reads_part(node) for node in nodes):
        flat = Region(storage, dtype, (storage.size_bytes // dtype.itemsize,), (1,))
        try:
            with _torch.plain_torch():
                storage.real = _Part(flat, replay, END).values().untyped_storage()
        except _NotSliceableError:
            return replay.storage(storage)
        for node in nodes:
            node.finish()
    return replay.storage(storage)


def _reads_part(node: Node) -> bool:
    return any(2 * region.size_bytes <= region.storage.size_bytes for region in node.reads)


class _Part:
    """One region, and the operations that decide its values, on a common grid."""

    def __init__(self, region: Region, replay: Replay, before: int) -> None:
        self._replay = replay
        self._region = region
        self._storage = region.storage
        self._device = replay.place(region.storage.device)
        self._nodes = writers(self._storage, before)
        self._targets = [_target(node, self._storage) for node in self._nodes]
        everything = [region, *self._targets]
        if any(other.dtype != region.dtype for other in everything):
            raise _NotSliceableError
        grid = boxes.common_grid(everything)
        if grid is None:
            raise _NotSliceableError
        self._grid = grid
        self._box = self._on_grid(region)

    def _on_grid(self, region: Region) -> Box:
        box = boxes.box_of(region, self._grid)
        if box is None:
            raise _NotSliceableError
        return box

    def values(self) -> torch.Tensor:
        canvas = self._canvas()
        for node, target in zip(self._nodes, self._targets, strict=True):
            box = self._on_grid(target)
            common = boxes.intersection(self._box, box)
            if common is not None:
                here = [
                    slice(low - s, high - s) for (low, high), s in zip(common, self._box.starts, strict=True)
                ]
                self._apply(node, target, box, common, canvas[tuple(here)])
        return canvas.permute(self._box.order).reshape(self._region.size)

    def _canvas(self) -> torch.Tensor:
        """The part in the order of the grid, laid out in memory in the order of the region."""
        order = self._box.order
        lengths = [self._box.lengths[axis] for axis in order]
        laid_out = torch.empty(lengths, dtype=self._region.dtype, device=self._device)
        canvas = laid_out.permute([order.index(axis) for axis in range(len(order))])
        if self._storage.real is not None:
            origin = self._region.over(self._storage.real)
            canvas.copy_(origin.as_strided(self._box.lengths, self._grid, self._region.offset))
        return canvas

    def _apply(
        self, node: Node, target: Region, box: Box, common: tuple[tuple[int, int], ...], canvas: torch.Tensor
    ) -> None:
        """Carries out ``node`` on ``canvas``, what its target has in common with the part."""
        cut = _Cut(target, box, common)
        mine = canvas.permute(box.order)
        operator = describe(node.func)
        if operator.draws:
            self._fill(node, target, cut, mine)
        elif node.func is constant:
            mine.copy_(cut.tensor(node.args[0].tensor))
        elif node.func in _CONSTANT_FILLS:
            mine.copy_(_CONSTANT_FILLS[node.func](node, mine))
        elif operator.slices and _is_local(node.func, target.dtype):
            self._elementwise(node, target, cut, mine)
        else:
            raise _NotSliceableError

    def _fill(self, node: Node, target: Region, cut: _Cut, mine: torch.Tensor) -> None:
        rule = draws.rule_for(node.func, target.dtype, node.args)
        count = target.numel
        if rule is None or rule.total(count) is None or not target.is_contiguous or node.position is None:
            raise _NotSliceableError
        if self._device.type != "cpu" or node.kwargs.keys() - _FACTORY_NAMES:
            raise _NotSliceableError
        position = node.position
        values = node.args[1:] if node.writes else ()

        def at(word: int) -> torch.Generator:
            return self._replay.generators.loose_at(Position(position.origin, position.words + word))

        def fill(start: int, part: torch.Tensor) -> None:
            draws.fill_part(node.func, values, rule, count, start, part, at)

        _fill_box(fill, 0, cut.shape, cut.ranges, mine)

    def _elementwise(self, node: Node, target: Region, cut: _Cut, mine: torch.Tensor) -> None:
        own = target if node.writes else None
        contiguous = mine.contiguous()

        def real(value: Region | External | Constant) -> torch.Tensor:
            if value is own:
                return contiguous
            if isinstance(value, Region):
                return part_of(cut.region(value), self._replay, node.seq)
            tensor = value.tensor if isinstance(value, Constant) else value.get(node)
            return cut.tensor(tensor)

        kinds = (Region, External, Constant)
        kwargs = {key: value for key, value in node.kwargs.items() if key != "memory_format"}
        if isinstance(kwargs.get("device"), torch.device):
            kwargs["device"] = self._replay.place(kwargs["device"])
        args = map_tensors(node.args, kinds, real)
        with _torch.default_dtype(node.default_dtype):
            result = node.func(*args, **map_tensors(kwargs, kinds, real))
        if result is not mine:
            mine.copy_(result)


_FACTORY_NAMES = {"dtype", "layout", "device", "pin_memory", "memory_format"}
# A part of a row that is no longer than this many elements is cut out of whole rows, drawn together.
_ROW_DRAWN_WHOLE = 1 << 16
_DRAWN_TOGETHER = 1 << 18


def _fill_box(
    fill: Callable[[int, torch.Tensor], None],
    start: int,
    shape: Sequence[int],
    ranges: Sequence[tuple[int, int]],
    part: torch.Tensor,
) -> None:
    """Fills ``part``, the box ``ranges`` of a contiguous tensor of ``shape`` whose first element is ``start``."""
    row = math.prod(shape[1:])
    low, high = ranges[0]
    if all(inner == (0, extent) for inner, extent in zip(ranges[1:], shape[1:], strict=True)):
        straight = part if part.is_contiguous() else part.new_empty(part.shape)
        fill(start + low * row, straight)
        if straight is not part:
            part.copy_(straight)
    elif row <= _ROW_DRAWN_WHOLE:
        many = max(1, _DRAWN_TOGETHER // row)
        inside = [slice(None), *(slice(*inner) for inner in ranges[1:])]
        for first in range(low, high, many):
            rows = part.new_empty(min(many, high - first), *shape[1:])
            fill(start + first * row, rows)
            part[first - low : first - low + len(rows)] = rows[tuple(inside)]
    else:
        for index in range(low, high):
            _fill_box(fill, start + index * row, shape[1:], ranges[1:], part[index - low])


def _target(node: Node, storage: Storage) -> Region:
    """What ``node`` writes of ``storage``."""
    found = [region for region in (*node.writes, *node.outputs) if region is not None]
    if len(found) != 1:
        raise _NotSliceableError
    return found[0]


class _Cut:
    """A part of an operation's target, in index space: its dimensions split into axes, and a range of each.

    ``shape`` are the lengths of the axes, ``ranges`` what is wanted of each, both in the target's order.
    """

    def __init__(self, target: Region, box: Box, common: tuple[tuple[int, int], ...]) -> None:
        order = box.order
        self.shape = [box.lengths[axis] for axis in order]
        self.ranges = [
            (common[axis][0] - box.starts[axis], common[axis][1] - box.starts[axis]) for axis in order
        ]
        self._splits = [[box.lengths[axis] for axis in group] for group in box.groups]
        self._extra = len(order) - sum(map(len, self._splits))

    def region(self, argument: Region) -> Region:
        """The same part of an argument that is broadcast against the target."""
        size: list[int] = []
        stride: list[int] = []
        offset = argument.offset
        for extent, step, low, high in self._axes(argument.size, argument.stride):
            offset += low * step
            size.append(high - low if extent != 1 else 1)
            stride.append(step)
        return Region(argument.storage, argument.dtype, tuple(size), tuple(stride), offset)

    def tensor(self, argument: torch.Tensor) -> torch.Tensor:
        """The same part of a real argument."""
        part = self.region(Region(_NOWHERE, argument.dtype, tuple(argument.shape), argument.stride(), 0))
        offset = argument.storage_offset() + part.offset
        return argument.as_strided(part.size, part.stride, offset).contiguous()

    def _axes(self, size: tuple[int, ...], stride: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
        """Extent, stride, start and stop of each axis of an argument, its dimensions split like the target's."""
        missing = len(self._splits) - len(size)
        if missing < 0:
            raise _NotSliceableError
        at = sum(len(split) for split in self._splits[:missing])
        for extent, step, split in zip(size, stride, self._splits[missing:], strict=True):
            whole = 1
            for length in split:
                whole *= length
            if extent not in (1, whole):
                raise _NotSliceableError
            inner = whole
            for length in split:
                inner //= length
                low, high = self.ranges[at]
                at += 1
                yield (length, step * inner, low, high) if extent != 1 else (1, 0, 0, 1)
        for _ in range(self._extra):
            yield 1, 0, 0, 1


_NOWHERE = Storage(0, torch.device("cpu"), deferred=False)

aten = torch.ops.aten


def _filled(value: float) -> Any:
    return lambda node, like: torch.full_like(like, value)


_CONSTANT_FILLS: dict[Any, Any] = {
    aten.zero_.default: _filled(0),
    aten.zeros.default: _filled(0),
    aten.zeros_like.default: _filled(0),
    aten.new_zeros.default: _filled(0),
    aten.ones.default: _filled(1),
    aten.ones_like.default: _filled(1),
    aten.new_ones.default: _filled(1),
    aten.full.default: lambda node, like: torch.full_like(like, node.args[1]),
    aten.full_like.default: lambda node, like: torch.full_like(like, node.args[1]),
    aten.new_full.default: lambda node, like: torch.full_like(like, node.args[2]),
    aten.fill_.Scalar: lambda node, like: torch.full_like(like, node.args[1]),
}
for _empty in (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default,
               aten.new_empty_strided.default):  # fmt: skip
    _CONSTANT_FILLS[_empty] = lambda node, like: like


@lru_cache(maxsize=1024)
def _is_local(func: Any, dtype: torch.dtype) -> bool:
    """Whether ``func`` gives an element the same bits wherever it lies in a tensor.

    Additions and copies do by IEEE arithmetic. A function that is computed by one method in vectors and by
    another at their ends may not: those are tried out, once a process.
    """
    if func not in _TRIED:
        return True
    values = torch.linspace(0.01, 0.99, 4099, dtype=torch.float64, device="cpu").to(dtype)
    whole = func(values.clone())
    return all(
        torch.equal(func(values[start:stop].clone()), whole[start:stop])
        for start, stop in ((0, 7), (1, 8), (3, 1000), (5, 4099), (4090, 4099), (1, 4098), (2048, 2080))
    )


_TRIED = {
    getattr(aten, name + in_place).default
    for name in ("erfinv", "exp", "log", "tanh", "sin", "cos", "erf", "log1p", "expm1")
    for in_place in ("", "_")
}

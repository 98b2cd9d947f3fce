"""The values of a part of a tensor, computed in the time and memory of that part.

The operations that wrote a storage are executed in order, each on its intersection with the part:
constants and random numbers are filled in (the generator is moved to the first word that the part
needs), and elementwise operations get the same part of their arguments. Operations that cannot be
cut (a decomposition, a permutation) are evaluated whole and then sliced, one tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred import _boxes, _draws
from torchrelay.deferred._boxes import Box
from torchrelay.deferred._graph import (
    Constant,
    External,
    Node,
    Position,
    Region,
    Storage,
    map_tensors,
)
from torchrelay.deferred._operators import constant, describe
from torchrelay.deferred._replay import Replay
from torchrelay.deferred._schedule import END, state_at, writers

__all__ = ["part_of"]


class _NotSliceableError(Exception):
    """An operation cannot be executed on a part."""


def part_of(region: Region, replay: Replay) -> torch.Tensor:
    """Return the values of ``region``: contiguous, of its shape, in new memory."""
    if region.storage.history().escaped is not None:
        return replay.values(region).clone(memory_format=torch.contiguous_format)
    return _Parts(replay, region.size_bytes).values(region, END)


class _Parts:
    """The parts of other tensors that one part is made of. Those asked for last are remembered.

    Args:
        size_bytes: of the part; what is remembered takes a few times as much.
    """

    def __init__(self, replay: Replay, size_bytes: int) -> None:
        self.replay = replay
        self._left_bytes = _REMEMBERED_PARTS * size_bytes + _REMEMBERED_BYTES
        self._known: dict[tuple[Any, ...], torch.Tensor] = {}

    def values(self, region: Region, before: int) -> torch.Tensor:
        """Return the values of ``region`` before place ``before`` in the program. Read only."""
        if 0 in region.size:
            where = self.replay.place(region.storage.device)
            return torch.empty(region.size, dtype=region.dtype, device=where)
        key = region, state_at(region.storage, before)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._made(region, before)
            self._left_bytes -= found.nbytes
            while self._left_bytes < 0 and len(self._known) > 1:
                self._left_bytes += self._known.pop(next(iter(self._known))).nbytes
        return found

    def _made(self, region: Region, before: int) -> torch.Tensor:
        try:
            return _Part(region, before, self).values()
        except _NotSliceableError:
            return self.replay.values(region, before).clone(memory_format=torch.contiguous_format)


_REMEMBERED_PARTS = 2
_REMEMBERED_BYTES = 1 << 20


class _Part:
    """A region, and the operations that decide its values, on a common grid."""

    def __init__(self, region: Region, before: int, parts: _Parts) -> None:
        self._parts = parts
        self._replay = replay = parts.replay
        self._region = region
        self._storage = region.storage
        self._device = replay.place(region.storage.device)
        self._nodes = writers(self._storage, before)
        self._origin: torch.UntypedStorage | None = None
        history = region.storage.history()
        if history.holds(self._nodes[-1].seq if self._nodes else 0, replay.materialization):
            self._origin = history.real
            self._nodes = [node for node in self._nodes if node.seq > history.version]
        self._targets = [_target(node) for node in self._nodes]
        everything = [region, *self._targets]
        if any(other.dtype != region.dtype or other.conj or other.neg for other in everything):
            raise _NotSliceableError
        everything = [other for other in everything if 0 not in other.size]
        grid = _boxes.common_grid(everything)
        if grid is None:
            raise _NotSliceableError
        self._grid = grid
        self._box = self._on_grid(region)

    def _on_grid(self, region: Region) -> Box:
        box = _boxes.box_of(region, self._grid)
        if box is None:
            raise _NotSliceableError
        return box

    def values(self) -> torch.Tensor:
        canvas = self._canvas()
        for node, target in zip(self._nodes, self._targets, strict=True):
            if 0 in target.size:
                continue
            box = self._on_grid(target)
            common = _boxes.intersection(self._box, box)
            if common is not None:
                here = [
                    slice(low - s, high - s)
                    for (low, high), s in zip(common, self._box.starts, strict=True)
                ]
                self._apply(node, target, box, common, canvas[tuple(here)])
        return canvas.permute(self._box.order).reshape(self._region.size)

    def _canvas(self) -> torch.Tensor:
        """Return the part in the order of the grid, laid out in memory like the region."""
        order = self._box.order
        lengths = [self._box.lengths[axis] for axis in order]
        laid_out = torch.empty(lengths, dtype=self._region.dtype, device=self._device)
        canvas = laid_out.permute([order.index(axis) for axis in range(len(order))])
        if self._origin is not None:
            origin = self._region.over(self._origin)
            canvas.copy_(origin.as_strided(self._box.lengths, self._grid, self._region.offset))
        return canvas

    def _apply(
        self,
        node: Node,
        target: Region,
        box: Box,
        common: tuple[tuple[int, int], ...],
        canvas: torch.Tensor,
    ) -> None:
        """Execute ``node`` on ``canvas``, the intersection of its target with the part."""
        cut = _Cut(target, box, common)
        mine = canvas.permute(box.order)
        operator = describe(node.func)
        if operator.draws:
            self._fill(node, target, cut, mine)
        elif node.func is constant:
            mine.copy_(cut.tensor(node.args[0].tensor))
        elif node.func in _VALUES:
            mine.fill_(_VALUES[node.func])
        elif node.func in _VALUE_PLACES:
            mine.fill_(node.args[_VALUE_PLACES[node.func]])
        elif operator.slices and _is_local(node.func, target.dtype):
            self._elementwise(node, target, cut, mine)
        elif node.func not in _UNINITIALIZED:
            raise _NotSliceableError

    def _fill(self, node: Node, target: Region, cut: _Cut, mine: torch.Tensor) -> None:
        rule = _draws.rule_for(node.func, target.dtype, node.args)
        count = target.numel
        if (
            rule is None
            or rule.total(count) is None
            or not target.is_contiguous
            or node.position is None
        ):
            raise _NotSliceableError
        if self._device.type != "cpu" or node.kwargs.keys() - _FACTORY_NAMES:
            raise _NotSliceableError
        position = node.position
        values = node.args[1:] if node.writes else ()

        def at(word: int) -> torch.Generator:
            return self._replay.generators.loose_at(
                Position(position.origin, position.words + word)
            )

        def fill(start: int, part: torch.Tensor) -> None:
            _draws.fill_part(node.func, values, rule, count, start, part, at)

        _fill_box(fill, 0, cut.shape, cut.ranges, mine)

    def _elementwise(self, node: Node, target: Region, cut: _Cut, mine: torch.Tensor) -> None:
        own = target if node.writes else None
        contiguous = mine.contiguous()
        if not target.size:
            # Whether a tensor has dimensions decides the type in which it is computed with.
            contiguous = contiguous.reshape(())

        def real(value: Region | External | Constant) -> torch.Tensor:
            if value is own:
                return contiguous
            if isinstance(value, Region):
                return self._parts.values(cut.region(value), node.seq)
            tensor = value.tensor if isinstance(value, Constant) else value.get(node)
            return cut.tensor(tensor)

        kinds = (Region, External, Constant)
        kwargs = {key: value for key, value in node.kwargs.items() if key != "memory_format"}
        if isinstance(kwargs.get("device"), torch.device):
            kwargs["device"] = self._replay.place(kwargs["device"])
        args = map_tensors(node.args, kinds, real)
        with _torch.recorded_modes(node.default_dtype, node.grad):
            result = node.func(*args, **map_tensors(kwargs, kinds, real))
        if result.data_ptr() != mine.data_ptr():
            mine.copy_(result)


_FACTORY_NAMES = {"dtype", "layout", "device", "pin_memory", "memory_format"}
# A part of a row that is no longer than this many elements is cut out of whole rows, drawn
# together.
_ROW_DRAWN_WHOLE = 1 << 16
_DRAWN_TOGETHER = 1 << 18


def _fill_box(
    fill: Callable[[int, torch.Tensor], None],
    start: int,
    shape: Sequence[int],
    ranges: Sequence[tuple[int, int]],
    part: torch.Tensor,
) -> None:
    """Fill ``part``, the box ``ranges`` of a contiguous tensor of ``shape``."""
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


def _target(node: Node) -> Region:
    """Return the one region that ``node`` writes."""
    found = node.targets()
    if len(found) != 1:
        raise _NotSliceableError
    return found[0]


class _Cut:
    """A part of an operation's target, in index space: its dimensions split into axes, and a range
    of each.

    ``shape`` are the lengths of the axes, ``ranges`` what is wanted of each, both in the target's
    order.
    """

    def __init__(self, target: Region, box: Box, common: tuple[tuple[int, int], ...]) -> None:
        order = box.order
        self.shape = [box.lengths[axis] for axis in order]
        self.ranges = [
            (common[axis][0] - box.starts[axis], common[axis][1] - box.starts[axis])
            for axis in order
        ]
        self._splits = [[box.lengths[axis] for axis in group] for group in box.groups]
        self._extra = len(order) - sum(map(len, self._splits))

    def region(self, argument: Region) -> Region:
        """Return the same part of an argument that is broadcast against the target."""
        if not argument.size:
            return argument
        size: list[int] = []
        stride: list[int] = []
        offset = argument.offset
        for extent, step, low, high in self._axes(argument.size, argument.stride):
            offset += low * step
            size.append(high - low if extent != 1 else 1)
            stride.append(step)
        return argument._replace(size=tuple(size), stride=tuple(stride), offset=offset)

    def tensor(self, argument: torch.Tensor) -> torch.Tensor:
        """Return the same part of a real argument."""
        if not argument.dim():
            return argument
        argument = argument.resolve_conj().resolve_neg()
        part = self.region(
            Region(_NOWHERE, argument.dtype, tuple(argument.shape), argument.stride(), 0)
        )
        offset = argument.storage_offset() + part.offset
        return argument.as_strided(part.size, part.stride, offset).contiguous()

    def _axes(
        self, size: tuple[int, ...], stride: tuple[int, ...]
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield extent, stride, start and stop of each axis of an argument, its dimensions split
        like the target's.
        """
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


_UNINITIALIZED = {
    aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default,
    aten.empty_strided.default, aten.new_empty_strided.default,
}  # fmt: skip

# Operations that fill with one value: the value, or the position of the argument that it is.
_VALUES: dict[Any, int] = {
    aten.zero_.default: 0, aten.zeros.default: 0, aten.zeros_like.default: 0,
    aten.new_zeros.default: 0, aten.ones.default: 1, aten.ones_like.default: 1,
    aten.new_ones.default: 1,
}  # fmt: skip
_VALUE_PLACES: dict[Any, int] = {
    aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2,
    aten.fill_.Scalar: 1,
}  # fmt: skip


@lru_cache(maxsize=1024)
def _is_local(func: Any, dtype: torch.dtype) -> bool:
    """Return whether ``func`` gives an element the same bits wherever it lies in a tensor.

    Additions and copies do by IEEE arithmetic. A function that is computed by one method in vectors
    and by another at their ends may not: those are tried out, once a process.
    """
    if not describe(func).approximates:
        return True
    values = torch.linspace(0.01, 0.99, 4099, dtype=torch.float64, device="cpu").to(dtype)
    whole = func(values.clone())
    return all(
        torch.equal(func(values[start:stop].clone()), whole[start:stop])
        for start, stop in (
            (0, 7),
            (1, 8),
            (3, 1000),
            (5, 4099),
            (4090, 4099),
            (1, 4098),
            (2048, 2080),
        )
    )

"""The values of a part of a tensor, computed in the time and memory of that part.

A part lies in a range of its storage. The operations that wrote the storage are executed in order,
each on what the range has of its target: constants and random numbers are filled in (the generator
is moved to the first word that the part needs), and elementwise operations get the same rows of
their arguments. A part with gaps, such as a few columns, is cut out of ranges of some rows.
Operations that cannot be cut (a decomposition, a permutation) are evaluated whole and then sliced,
one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred import _draws
from torchrelay.deferred._graph import (
    Constant,
    External,
    History,
    Node,
    Position,
    Region,
    Storage,
    map_tensors,
)
from torchrelay.deferred._operators import constant, describe
from torchrelay.deferred._replay import Replay
from torchrelay.deferred._schedule import END, writers

__all__ = ["part_of", "whole"]


class _NotSliceableError(Exception):
    """An operation cannot be executed on a part."""


def part_of(region: Region, replay: Replay) -> torch.Tensor:
    """Return the values of ``region``: contiguous, of its shape, in new memory."""
    if region.storage.history().escaped is not None:
        return replay.values(region).clone(memory_format=torch.contiguous_format)
    return _Parts(replay, region.size_bytes).values(region, END).contiguous()


def whole(region: Region, history: History, replay: Replay) -> torch.Tensor:
    """Return ``region`` in its last state, for good: its memory can be handed out. A source of
    which a part is read, such as the parameter that FSDP has cut, is not computed whole.
    """
    storage, nodes = region.storage, writers(region.storage, END)
    if history.real is None and any(map(_reads_part, nodes)):
        flat = Region(storage, region.dtype, (storage.size_bytes // region.dtype.itemsize,), (1,))
        with suppress(_NotSliceableError):
            values = _Parts(replay, storage.size_bytes).range(flat, END)
            history.hold(values.untyped_storage())
            history.version = nodes[-1].seq
            for node in history.record:
                node.finish()
    return replay.final(region, history)


def _reads_part(node: Node) -> bool:
    return any(2 * region.size_bytes <= region.storage.size_bytes for region in node.reads)


# What is remembered: so many times the part, and so many bytes more.
_REMEMBERED_PARTS = 2
_REMEMBERED_BYTES = 1 << 20
# From how many operations on arguments of arguments on these are computed whole: each nests calls.
_DEEPEST = 50
# The elements of a range out of which a part with gaps is cut, if it has several rows.
_MADE_TOGETHER = 1 << 18


class _Parts:
    """The parts of other tensors that one part is made of. Those asked for last are remembered.

    Args:
        size_bytes: of the part; what is remembered takes a few times as much.
    """

    def __init__(self, replay: Replay, size_bytes: int) -> None:
        self._replay = replay
        self._left_bytes = _REMEMBERED_PARTS * size_bytes + _REMEMBERED_BYTES
        self._known: dict[tuple[Any, ...], torch.Tensor] = {}
        self._depth = 0

    def values(self, region: Region, before: int) -> torch.Tensor:
        """Return the values of ``region`` before place ``before`` in the program. Read only."""
        if 0 in region.size:
            return self._empty(region)
        key = region, *(node.seq for node in writers(region.storage, before)[-1:])
        found = self._known.get(key)
        if found is None:
            self._depth += 1
            with suppress(_NotSliceableError):
                if self._depth > _DEEPEST:
                    raise _NotSliceableError
                found = self._cut_out(region, before)
            self._depth -= 1
            if found is None:  # not in a handler: the exception keeps the attempt's memory
                whole = self._replay.values(region, before)
                found = whole.clone(memory_format=torch.contiguous_format)
            self._known[key] = found
            self._left_bytes -= found.nbytes
            while self._left_bytes < 0 and len(self._known) > 1:
                self._left_bytes += self._known.pop(next(iter(self._known))).nbytes
        return found

    def _empty(self, region: Region) -> torch.Tensor:
        where = self._replay.place(region.storage.device)
        return torch.empty(region.size, dtype=region.dtype, device=where)

    def _cut_out(self, region: Region, before: int) -> torch.Tensor:
        """Return the values of ``region``, out of one range of its storage or of several."""
        dims = _in_memory_order(region)
        if region.span > max(region.numel, _MADE_TOGETHER):
            outer, extent = dims[0], region.size[dims[0]]
            together = max(1, _MADE_TOGETHER // region.stride[outer])
            if together < extent:
                made = self._empty(region)
                for first in range(0, extent, together):
                    piece = _rows(region, outer, first, min(first + together, extent))
                    target = made.narrow(outer, first, piece.size[outer])
                    target.copy_(self._cut_out(piece, before))
                return made
        start, stop = region.offset, region.offset + region.span
        if not region.is_contiguous:  # whole rows, because only these can be cut out of some
            row = max(1, region.stride[dims[0]])
            start -= start % row
            stop = min(stop + -stop % row, region.storage.size_bytes // region.dtype.itemsize)
        values = self.range(
            region._replace(size=(stop - start,), stride=(1,), offset=start), before
        )
        return values.as_strided(region.size, region.stride, region.offset - start)

    def range(self, region: Region, before: int) -> torch.Tensor:
        """Return the values of ``region``, adjacent elements of its storage."""
        nodes = writers(region.storage, before)
        targets = [_target(node) for node in nodes]
        if any(one.dtype != region.dtype or one.conj or one.neg for one in (region, *targets)):
            raise _NotSliceableError
        values = self._empty(region)
        history = region.storage.history()
        held = 0
        if history.holds(nodes[-1].seq if nodes else 0, self._replay.materialization):
            assert history.real is not None
            values.copy_(region.over(history.real))
            held = history.version
        for node, target in zip(nodes, targets, strict=True):
            cut = _cut(target, region) if node.seq > held else None
            if cut is not None:
                part = cut.region(target)
                offset = part.offset - region.offset
                self._apply(node, target, cut, values.as_strided(part.size, part.stride, offset))
        return values

    def _apply(self, node: Node, target: Region, cut: _Cut, mine: torch.Tensor) -> None:
        """Execute ``node`` on ``mine``, a part of its target."""
        operator = describe(node.func)
        if operator.draws:
            self._fill(node, target, cut, mine)
        elif node.func is constant:
            mine.copy_(cut.of(node.args[0].tensor))
        elif node.func in _VALUES:
            mine.fill_(_VALUES[node.func])
        elif node.func in _VALUE_PLACES:
            mine.fill_(node.args[_VALUE_PLACES[node.func]])
        elif operator.slices and not _is_scaled(node) and _is_local(node.func, mine.dtype):
            self._elementwise(node, cut, mine)
        elif node.func not in _UNINITIALIZED:
            raise _NotSliceableError

    def _fill(self, node: Node, target: Region, cut: _Cut, mine: torch.Tensor) -> None:
        position = node.position
        rule = _draws.rule_for(node.func, mine.dtype, node.args)
        if (
            rule is None
            or rule.total(target.numel) is None
            or not target.is_contiguous
            or position is None
            or mine.device.type != "cpu"
            or node.kwargs.keys() - _FACTORY_NAMES
        ):
            raise _NotSliceableError

        def at(word: int) -> torch.Generator:
            return self._replay.generators.at(Position(position.origin, position.words + word))

        values = node.args[1:] if node.writes else ()
        first = cut.region(target).offset - target.offset
        _draws.fill_part(node.func, values, rule, target.numel, first, mine, at)

    def _elementwise(self, node: Node, cut: _Cut, mine: torch.Tensor) -> None:
        own = node.writes[0] if node.writes else None
        if own is not None and _reads_what_it_writes(own, node.reads):
            raise _NotSliceableError
        contiguous = mine.contiguous()

        def real(value: Region | External | Constant) -> torch.Tensor:
            if value is own:
                return contiguous
            if isinstance(value, Region):
                return self.values(cut.region(value), node.seq)
            return cut.of(value.tensor if isinstance(value, Constant) else value.get(node))

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


def _reads_what_it_writes(target: Region, reads: Iterable[Region]) -> bool:
    """Return whether an element of ``target`` may be read after another one was written there."""
    return target.overlaps_itself or any(
        target.may_overlap(region) for region in reads if region != target
    )


def _target(node: Node) -> Region:
    """Return the one region that ``node`` writes."""
    found = node.targets()
    if len(found) != 1:
        raise _NotSliceableError
    return found[0]


def _in_memory_order(region: Region) -> list[int]:
    """Return the dimensions of ``region``, those with the largest steps in memory first."""
    steps = [step if n > 1 else 0 for step, n in zip(region.stride, region.size, strict=True)]
    return sorted(range(len(steps)), key=steps.__getitem__, reverse=True)


def _permuted(region: Region, dims: list[int]) -> Region:
    size, stride = ([of[dim] for dim in dims] for of in (region.size, region.stride))
    return region._replace(size=tuple(size), stride=tuple(stride))


def _rows(region: Region, dim: int, first: int, stop: int) -> Region:
    size = (*region.size[:dim], stop - first, *region.size[dim + 1 :])
    return region._replace(size=size, offset=region.offset + first * region.stride[dim])


@dataclass(frozen=True)
class _Cut:
    """The part of an operation's target that lies in a range of the storage.

    Attributes:
        dims: the dimensions of the target, in the order of memory.
        size: of the target, in this order.
        is_flat: the range ends within a row of the target, whose elements are adjacent.
        first, stop: the rows, or elements if it is flat, that are in the range.
    """

    dims: list[int]
    size: tuple[int, ...]
    is_flat: bool
    first: int
    stop: int

    def region(self, argument: Region) -> Region:
        """Return the same part of the target, or of an argument that is broadcast against it."""
        if not argument.size:
            return argument
        missing = len(self.dims) - len(argument.size)
        if missing < 0:
            raise _NotSliceableError
        size, stride = (1,) * missing + argument.size, (0,) * missing + argument.stride
        argument = _permuted(argument._replace(size=size, stride=stride), self.dims)
        if self.is_flat:
            if argument.size != self.size or not argument.is_contiguous:
                raise _NotSliceableError
            argument = argument._replace(size=(argument.numel,), stride=(1,))
        return argument if argument.size[0] == 1 else _rows(argument, 0, self.first, self.stop)

    def of(self, argument: torch.Tensor) -> torch.Tensor:
        """Return the same part of a real argument."""
        argument = argument.resolve_conj().resolve_neg()
        size, offset = tuple(argument.shape), int(argument.storage_offset())
        part = self.region(Region(_NOWHERE, argument.dtype, size, argument.stride(), offset))
        return argument.as_strided(part.size, part.stride, part.offset).contiguous()


_NOWHERE = Storage(0, torch.device("cpu"), deferred=False)


def _cut(target: Region, within: Region) -> _Cut | None:
    """Return the part of ``target`` that lies in ``within``, a range of the storage; or None."""
    dims = _in_memory_order(target)
    whole = _permuted(target, dims)
    low = within.offset - target.offset
    high = low + within.numel
    if 0 in whole.size or high <= 0 or low >= whole.span:
        return None
    if low <= 0 and high >= whole.span:
        return _Cut(dims, whole.size, False, 0, whole.size[0] if dims else 1)
    step, row = whole.stride[0], _rows(whole, 0, 0, 1).span
    if step >= row:
        inside = range(max(0, -(-low // step)), min(whole.size[0], (high - row) // step + 1))
        touched = range(max(0, (low - row) // step + 1), min(whole.size[0], -(-high // step)))
        if inside == touched:
            return _Cut(dims, whole.size, False, inside.start, inside.stop) if inside else None
    if not whole.is_contiguous:
        raise _NotSliceableError
    return _Cut(dims, whole.size, True, max(0, low), min(whole.numel, high))


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


def _is_scaled(node: Node) -> bool:
    """Return whether a factor of one argument is rounded by itself in some places only."""
    names = [argument.name for argument in node.func._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return bool(given.get("alpha", 1) != 1)


@lru_cache(maxsize=1024)
def _is_local(func: Any, dtype: torch.dtype) -> bool:
    """Return whether ``func`` gives an element the same bits wherever it lies in a tensor.

    Additions and copies do by IEEE arithmetic. Products of complex numbers, and functions that are
    computed by one method in vectors and by another at their ends, may not: the latter are tried
    out, once a process.
    """
    if dtype.is_complex:
        return False
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

"""Random fills: how many words they take from the CPU generator, and filling only a part.

The CPU generator produces 32-bit words in one sequence, and a contiguous fill takes them in the
order of its elements, so the words before any element can be counted and skipped. The counts were
derived from the generator. :func:`rule_for` verifies them once per process, operation and dtype
against the running torch, and returns no rule if they do not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred._generators import jump
from torchrelay.deferred._graph import Region
from torchrelay.deferred._operators import is_plain_normal, trunc_normal

__all__ = ["DrawRule", "fill_part", "rule_for", "words_drawn"]

aten = torch.ops.aten

# A normal fill makes its numbers sixteen at a time; the last sixteen are made anew if there is a
# remainder.
_GROUP = 16


class DrawRule:
    """How a fill takes its words: ``words`` for each element, in order.

    Attributes:
        needs_contiguous: whether it holds only for a tensor that is contiguous.
    """

    needs_contiguous = False

    def __init__(self, words: int) -> None:
        self.words = words

    def total(self, count: int) -> int | None:
        """Return the words that a fill of ``count`` elements takes; None: unknown."""
        return count * self.words

    def pieces(self, count: int, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Return the draws for elements ``start`` to ``stop`` of a contiguous fill: word, count,
        and which to keep.
        """
        yield start * self.words, stop - start, 0, stop - start


class _NormalDrawRule(DrawRule):
    """Normal numbers. Fewer than sixteen, or into a tensor that is not contiguous, use another
    method, which caches a number.

    Args:
        words: for each element.
        groups_first: only the words of whole groups are taken, not those of the remainder.
    """

    needs_contiguous = True

    def __init__(self, words: int, groups_first: bool) -> None:
        super().__init__(words)
        self._groups_first = groups_first

    def _tail(self, count: int) -> int:
        return (count - count % _GROUP if self._groups_first else count) * self.words

    def total(self, count: int) -> int | None:
        if 0 < count < _GROUP:
            return None
        return self._tail(count) + (_GROUP * self.words if count % _GROUP else 0)

    def pieces(self, count: int, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        tail = count - _GROUP if count % _GROUP else count
        if start < tail:
            first = start - start % _GROUP
            last = min(stop, tail)
            drawn = last - first + -(last - first) % _GROUP
            yield first * self.words, drawn, start - first, last - first
        if stop > tail:
            yield self._tail(count), _GROUP, max(start, tail) - tail, stop - tail


def _uniform(dtype: torch.dtype, args: tuple[Any, ...]) -> DrawRule:
    return DrawRule(2 if dtype is torch.float64 else 1)


def _normal(dtype: torch.dtype, args: tuple[Any, ...]) -> DrawRule:
    return _NormalDrawRule(
        2 if dtype is torch.float64 else 1, dtype in (torch.bfloat16, torch.float16)
    )


def _two(dtype: torch.dtype, args: tuple[Any, ...]) -> DrawRule:
    return DrawRule(2)


def _random(dtype: torch.dtype, args: tuple[Any, ...]) -> DrawRule:
    if len(args) <= 1:
        return DrawRule(2 if dtype in (torch.float64, torch.int64) else 1)
    low, high = (0, args[1]) if len(args) == 2 else (args[1], args[2])
    return DrawRule(2 if high is None or high - low >= 1 << 32 else 1)


# For each fill: its rule, and the arguments with which the rule is tried out; those of random_ are
# the call's own.
_RULES: dict[
    Any, tuple[Callable[[torch.dtype, tuple[Any, ...]], DrawRule], tuple[float, ...] | None]
] = {
    aten.uniform_.default: (_uniform, ()),
    aten.normal_.default: (_normal, ()),
    aten.bernoulli_.float: (_two, (0.3,)),
    aten.exponential_.default: (_two, ()),
    aten.cauchy_.default: (_two, ()),
    aten.geometric_.default: (_two, (0.3,)),
    aten.random_.default: (_random, None),
    aten.random_.to: (_random, None),
    getattr(aten.random_, "from"): (_random, None),
}

# Factories that fill what they make: the in-place fill that does the same.
_AS_FILL: dict[Any, Any] = {
    aten.rand.default: aten.uniform_.default,
    aten.randn.default: aten.normal_.default,
    aten.rand_like.default: aten.uniform_.default,
    aten.randn_like.default: aten.normal_.default,
    aten.rand.generator: aten.uniform_.default,
    aten.randn.generator: aten.normal_.default,
}


def rule_for(func: Any, dtype: torch.dtype, args: tuple[Any, ...] = ()) -> DrawRule | None:
    """Return how ``func`` draws for a contiguous tensor of ``dtype``; None: unknown."""
    if func is trunc_normal and is_plain_normal(dtype, *args[1:]):
        func, args = aten.normal_.default, args[:3]
    func = _AS_FILL.get(func, func)
    if func not in _RULES:
        return None
    make, values = _RULES[func]
    rule = make(dtype, args)
    if values is None:  # how many words a fill takes can depend on the bounds of integers alone
        values = args[1:]
    return rule if _holds(func, dtype, rule.words, values) else None


@lru_cache(maxsize=1024)
def _holds(func: Any, dtype: torch.dtype, words: int, values: tuple[float, ...]) -> bool:
    """Return whether the rule predicts a fill of 100 elements, whole and in parts."""
    rule = _RULES[func][0](dtype, (None, *values))
    generator = torch.Generator()
    generator.manual_seed(0)
    state = generator.get_state()
    with _torch.plain_torch():
        whole = func(torch.empty(100, dtype=dtype, device="cpu"), *values, generator=generator)
        total = rule.total(100)
        if total is None or not torch.equal(generator.get_state(), jump(state, total)):
            return False

        def at(word: int) -> torch.Generator:
            generator.set_state(jump(state, word))
            return generator

        for start, stop in ((0, 100), (37, 75), (16, 32), (77, 95), (90, 100)):
            part = torch.empty(stop - start, dtype=dtype, device="cpu")
            fill_part(func, values, rule, 100, start, part, at)
            if not torch.equal(part, whole[start:stop]):
                return False
    return True


def words_drawn(func: Any, region: Region, args: tuple[Any, ...]) -> int | None:
    """Return the words that ``func`` takes to fill ``region``; None: unknown before drawing."""
    rule = rule_for(func, region.dtype, args)
    if rule is None or (rule.needs_contiguous and not region.is_contiguous):
        return None
    return rule.total(region.numel)


def fill_part(
    func: Any,
    values: tuple[Any, ...],
    rule: DrawRule,
    count: int,
    start: int,
    part: torch.Tensor,
    at: Callable[[int], torch.Generator],
) -> None:
    """Fill contiguous ``part`` with the elements from ``start`` of a fill of ``count`` elements.

    Args:
        values: the arguments of ``func`` after the tensor.
        at: returns a generator that many words after the start of the fill.
    """
    if func is trunc_normal:
        func, values = aten.normal_.default, values[:2]
    func = _AS_FILL.get(func, func)
    flat = part.view(-1)
    filled = 0
    for word, drawn, first, last in rule.pieces(count, start, start + flat.numel()):
        size = last - first
        if drawn == size:
            func(flat[filled : filled + size], *values, generator=at(word))
        else:
            more = torch.empty(drawn, dtype=part.dtype, device=part.device)
            flat[filled : filled + size] = func(more, *values, generator=at(word))[first:last]
        filled += size

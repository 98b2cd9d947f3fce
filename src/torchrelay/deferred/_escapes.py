"""Fake tensors that deferred initialisation left in caches and globals instead of its result.

A table that a program computes once and keeps (``functools.lru_cache``, a global dict) would stay
fake, and later construction with it would be fake, too. After such an initialisation,
materialisation searches once for what keeps them; tensors kept elsewhere, such as by a closure, are
reported.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchrelay.deferred._modules import PLAIN, fakes_inside, own_tensors
from torchrelay.deferred._tensor import FakeTensor, Life

__all__ = ["found", "note"]

# Of tensors that are not in the result of their initialisation.
_lives: list[weakref.ref[Life]] = []

# How many containers deep a cache is looked into.
_DEPTH = 3


def note(lives: list[weakref.ref[Life]], result: Any) -> None:
    """Register the lives of all fake tensors created for ``result`` that are not in it."""
    alive = {id(life()): life for life in lives if life() is not None}
    if isinstance(result, torch.nn.Module):  # in most cases, these are all
        for module in result.modules():
            for tensor in own_tensors(module).values():
                alive.pop(id(getattr(tensor, "_life", None)), None)
    if alive:
        expected = {id(fake._life) for fake in _fakes_of(result)}
        _lives.extend(life for key, life in alive.items() if key not in expected)


def found() -> tuple[list[tuple[str, FakeTensor]], list[tuple[str, FakeTensor]]]:
    """Return each escaped tensor once: those in caches and globals, and the others with owners."""
    lives = _lives[:]
    _lives.clear()
    alive = _alive(lives)
    cached: dict[int, tuple[str, FakeTensor]] = {}
    wanted = {id(fake) for fake in alive if not isinstance(fake, torch.nn.Parameter)}
    for where, value in _roots() if wanted else ():
        for fake in fakes_inside(value, _DEPTH):
            if id(fake) in wanted:
                cached.setdefault(id(fake), (where, fake))
    elsewhere: list[tuple[str, FakeTensor]] = []
    if len(alive) > len(cached):
        del alive[:]
        gc.collect()  # what only a cycle keeps is no one's
        alive = [fake for fake in _alive(lives) if id(fake) not in cached]
        holders = [(_holder(fake, {id(alive)}), fake) for fake in alive]
        elsewhere = [(holder, fake) for holder, fake in holders if holder is not None]
    return list(cached.values()), elsewhere


def _alive(lives: list[weakref.ref[Life]]) -> list[FakeTensor]:
    """Return the fake tensors that still have one of ``lives``."""
    left = {id(life()) for life in lives if life() is not None}
    return [one for one in gc.get_objects() if _is_left(one, left)] if left else []


def _is_left(one: object, left: set[int]) -> bool:
    kind = type(one)  # isinstance() would ask proxies, which may answer with code of their own
    return issubclass(kind, FakeTensor) and id(one.__dict__.get("_life")) in left


def _holder(fake: FakeTensor, ours: set[int]) -> str | None:
    """Return what keeps ``fake``: a function with a closure, or an object; None if unknown.

    Args:
        ours: ids of the lists with which the search itself holds it.
    """
    level: list[Any] = [fake]
    where = None
    for _ in range(2 * _DEPTH):
        ours.add(id(level))
        level = [one for one in gc.get_referrers(*level) if _may_keep(one) and id(one) not in ours]
        if not level:
            break
        where = next((_name(one) for one in level if type(one) not in _CONTAINERS), None)
        if where is not None:
            return where
        where = f"a {type(level[0]).__name__}"
    return where


def _may_keep(one: object) -> bool:
    return type(one) not in (types.FrameType, types.GeneratorType)


def _name(one: object) -> str:
    if isinstance(one, types.FunctionType):
        return f"the closure of {one.__module__}.{one.__qualname__}"
    return f"a {type(one).__module__}.{type(one).__qualname__}"


_CONTAINERS = (list, tuple, set, dict, types.CellType)


def _fakes_of(result: Any) -> Iterator[FakeTensor]:
    leaves = tree_leaves(result)
    for leaf in leaves[:]:
        if not isinstance(leaf, (torch.nn.Module, torch.Tensor)):  # a trainer, a data class
            leaves.extend(tree_leaves(getattr(leaf, "__dict__", None)))
    for leaf in leaves:
        if isinstance(leaf, torch.nn.Module):
            for module in leaf.modules():
                yield from fakes_inside(list(own_tensors(module).values()), _DEPTH)
                yield from fakes_inside(dict(module.__dict__), _DEPTH)
        else:
            yield from fakes_inside(leaf, _DEPTH)


def _roots() -> Iterator[tuple[str, Any]]:
    """Yield what lives as long as the process: cached results, globals, class attributes."""
    for one in gc.get_objects():
        if type(one) is functools._lru_cache_wrapper:
            name = f"functools.cache of {one.__module__}.{one.__qualname__}"
            yield name, gc.get_referents(one)
    for name, module in list(sys.modules.items()):
        if type(module) is types.ModuleType and not name.startswith(
            ("torch.", "torchrelay.deferred")
        ):
            for key, value in list(vars(module).items()):
                if issubclass(type(value), type):
                    if value.__module__ == name:
                        yield f"{name}.{key}", dict(vars(value))
                elif type(value) not in PLAIN:
                    yield f"{name}.{key}", value

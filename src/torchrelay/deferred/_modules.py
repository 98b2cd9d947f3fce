"""The tensors of a module, in the order of materialisation; and fake tensors elsewhere.

A table that a program computes once and keeps (``functools.lru_cache``, a global dict) would stay
fake after deferred initialisation, and later construction with it would be fake, too.
Materialisation searches once for the caches and globals that keep such tensors; those kept
elsewhere, as by a closure, are only reported.
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

from torchrelay.deferred._tensor import FakeTensor, Life

__all__ = [
    "OF_EVERY_MODULE", "PLAIN", "children_first", "escape_count", "fakes_inside", "find_escapes",
    "note_escapes", "own_tensors", "take_escapes",
]  # fmt: skip

# What torch gives to every module: no attributes of the program.
OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))

# What most globals and attributes are, and no container.
PLAIN = {
    types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, str, int, float, bool,
    bytes, type(None),
}  # fmt: skip


def fakes_inside(value: Any, depth: int) -> Iterator[FakeTensor]:
    """Yield the fake tensors in ``value``, ``depth`` containers deep, running none of its code."""
    kind = type(value)
    if issubclass(kind, FakeTensor):
        yield value
    elif depth and issubclass(kind, (list, tuple, set, dict)):
        for item in gc.get_referents(value):
            if type(item) not in PLAIN:
                yield from fakes_inside(item, depth - 1)


def own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the module's own parameters and buffers, by name."""
    both = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def children_first(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield each submodule once, children first, with the prefix of its tensors' names."""
    names = {
        id(submodule): name
        for name, submodule in reversed(list(module.named_modules(remove_duplicate=False)))
    }
    seen: set[int] = set()

    def walk(one: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
        seen.add(id(one))
        for child in one.children():
            if id(child) not in seen:
                yield from walk(child)
        name = names[id(one)]
        yield (f"{name}." if name else ""), one

    yield from walk(module)


# Of tensors that are not in the result of their initialisation.
_lives: list[weakref.ref[Life]] = []

# How many containers deep a cache is looked into.
_DEPTH = 3


def note_escapes(lives: list[weakref.ref[Life]], result: Any) -> None:
    """Register the lives of all fake tensors created for ``result`` that are not in it."""
    alive = {id(life()): life for life in lives if life() is not None}
    if isinstance(result, torch.nn.Module):  # in most cases, these are all
        for module in result.modules():
            for tensor in own_tensors(module).values():
                alive.pop(id(getattr(tensor, "_life", None)), None)
    if alive:
        expected = {id(fake._life) for fake in _fakes_of(result)}
        _lives.extend(life for key, life in alive.items() if key not in expected)


def escape_count() -> int:
    """Return a mark for :func:`take_escapes`."""
    return len(_lives)


def take_escapes(since: int) -> list[FakeTensor]:
    """Return the tensors that have escaped ``since`` a mark and are still alive, whoever keeps
    them; :func:`find_escapes` does not return them any more.
    """
    lives = _lives[since:]
    del _lives[since:]
    if any(life() is not None for life in lives):
        gc.collect()
    return _alive({id(life()) for life in lives if life() is not None})


def find_escapes() -> tuple[list[tuple[str, FakeTensor]], list[FakeTensor]]:
    """Return each escaped tensor once: those in caches and globals with their owners, and those
    that something else keeps.
    """
    lives = _lives[:]
    _lives.clear()
    if any(life() is not None for life in lives):
        gc.collect()  # what only a cycle keeps is no one's
    alive = _alive({id(life()) for life in lives if life() is not None})
    cached: dict[int, tuple[str, FakeTensor]] = {}
    wanted = {id(fake) for fake in alive if not isinstance(fake, torch.nn.Parameter)}
    for where, value in _roots() if wanted else ():
        for fake in fakes_inside(value, _DEPTH):
            if id(fake) in wanted:
                cached.setdefault(id(fake), (where, fake))
    return list(cached.values()), [
        fake for fake in alive if id(fake) not in cached and _is_kept(fake, alive)
    ]


def _alive(lives: set[int]) -> list[FakeTensor]:
    """Return the fake tensors that have one of ``lives``, which are ids."""
    # isinstance() would ask proxies, which may answer with code of their own.
    fakes = (
        one for one in (gc.get_objects() if lives else ()) if issubclass(type(one), FakeTensor)
    )
    return [fake for fake in fakes if id(fake.__dict__.get("_life")) in lives]


def _is_kept(fake: FakeTensor, ours: list[FakeTensor]) -> bool:
    """Return whether something else than ``ours`` and running functions refers to ``fake``."""
    running = (types.FrameType, types.GeneratorType)
    return any(one is not ours and type(one) not in running for one in gc.get_referrers(fake))


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

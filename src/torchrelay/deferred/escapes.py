"""Fake tensors that a deferred initialisation has left elsewhere than in its result: in caches and globals.

A table that a program computes once and keeps (``functools.lru_cache``, a global dict) would stay fake, and make
fake what is built with it later. Who keeps them is searched for once after such an initialisation, when its
module is materialized.
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

from torchrelay.deferred.modules import own_tensors
from torchrelay.deferred.tensor import FakeTensor, Life

__all__ = ["found", "note"]

_lives: list[weakref.ref[Life]] = []  # of tensors that are not in the result of their initialisation

# How many containers deep a cache is looked into.
_DEPTH = 3


def note(lives: list[weakref.ref[Life]], result: Any) -> None:
    """``lives`` are those of all fake tensors made for ``result``, and of others that may have gone elsewhere."""
    alive = [life for life in lives if life() is not None]
    if alive:
        expected = {id(fake._life) for fake in _fakes_of(result)}
        _lives.extend(life for life in alive if id(life()) not in expected)


def found() -> list[tuple[str, FakeTensor]]:
    """Each such tensor that a cache or a global keeps, with where; each is looked for once."""
    left = {id(life()) for life in _lives if life() is not None}
    _lives.clear()
    wanted = {id(one) for one in gc.get_objects() if _is_left(one, left)} if left else set()
    fakes: dict[int, tuple[str, FakeTensor]] = {}
    for where, value in _roots() if wanted else ():
        for fake in _inside(value, _DEPTH):
            if id(fake) in wanted:
                fakes.setdefault(id(fake), (where, fake))
    return list(fakes.values())


def _is_left(one: object, left: set[int]) -> bool:
    """Whether ``one`` is a fake tensor of which an initialisation knows nothing; caches hold no parameters."""
    kind = type(one)  # isinstance() would ask proxies, which may answer with code of their own
    if not issubclass(kind, FakeTensor) or isinstance(one, torch.nn.Parameter):
        return False
    return id(one.__dict__.get("_life")) in left


def _fakes_of(result: Any) -> Iterator[FakeTensor]:
    leaves = tree_leaves(result)
    for leaf in leaves[:]:
        if not isinstance(leaf, (torch.nn.Module, torch.Tensor)):  # a trainer, a data class
            leaves.extend(tree_leaves(getattr(leaf, "__dict__", None)))
    for leaf in leaves:
        if isinstance(leaf, torch.nn.Module):
            for module in leaf.modules():
                yield from _inside(list(own_tensors(module).values()), _DEPTH)
                yield from _inside(dict(module.__dict__), _DEPTH)
        else:
            yield from _inside(leaf, _DEPTH)


def _inside(value: Any, depth: int) -> Iterator[FakeTensor]:
    """The fake tensors in ``value``; no code of its own is run, as of a mapping that imports what it is asked for."""
    kind = type(value)
    if issubclass(kind, FakeTensor):
        yield value
    elif depth and issubclass(kind, (list, tuple, set, dict)):
        for item in gc.get_referents(value):
            if type(item) not in _PLAIN:
                yield from _inside(item, depth - 1)


# What most globals are, and no container.
_PLAIN = {
    types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, str, int, float, bool, bytes, type(None),
}  # fmt: skip


def _roots() -> Iterator[tuple[str, Any]]:
    """Whatever lives as long as the process: results of cached functions, globals, attributes of classes."""
    for one in gc.get_objects():
        if type(one) is functools._lru_cache_wrapper:
            name = f"functools.cache of {one.__module__}.{one.__qualname__}"
            yield name, gc.get_referents(one)
    for name, module in list(sys.modules.items()):
        if type(module) is types.ModuleType and not name.startswith(("torch.", "torchrelay.deferred")):
            for key, value in list(vars(module).items()):
                if issubclass(type(value), type):
                    if value.__module__ == name:
                        yield f"{name}.{key}", dict(vars(value))
                elif type(value) not in _PLAIN:
                    yield f"{name}.{key}", value

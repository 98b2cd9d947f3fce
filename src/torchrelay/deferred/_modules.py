"""The tensors of a module and its submodules, in the order of materialisation; fake tensors in
other objects.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from typing import Any

import torch

from torchrelay.deferred._tensor import FakeTensor

__all__ = ["PLAIN", "children_first", "fakes_inside", "own_tensors"]

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


def children_first(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.nn.Module]]:
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

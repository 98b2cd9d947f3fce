"""The tensors of a module and its submodules, in the order of materialisation."""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["children_first", "own_tensors"]


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

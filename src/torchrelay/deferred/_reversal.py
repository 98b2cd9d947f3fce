"""Back to deferred, by the record that a module still has or by a recipe."""

from __future__ import annotations

from pathlib import Path

import torch

from torchrelay import _torch
from torchrelay.deferred import _recipes
from torchrelay.deferred._modules import children_first
from torchrelay.deferred._tensor import go_back
from torchrelay.deferred._traces import Trace, rebuilt, trace_of
from torchrelay.errors import ArgumentError, MismatchError, UnsupportedError

__all__ = ["dematerialize", "from_recipe", "recipe"]

# Where a tensor stands in a module: its registry, its name there, its qualified name, itself.
_Place = tuple[dict[str, torch.Tensor | None], str, str, torch.Tensor]


def dematerialize(module: torch.nn.Module) -> None:
    """Free the memory of ``module``'s tensors, which become deferred again with the same values.

    A parameter that had become a slice is whole again. What had become a DTensor is a new object.

    Raises:
        ArgumentError: ``module`` is not a module.
        DeferredError: a tensor has no record, or changed since its materialisation. Nothing is
            changed.
        UnsupportedError: FSDP2 manages the module. Nothing is changed.
    """
    places = _places(module)
    if _torch.has_fsdp2(module):
        raise UnsupportedError(
            "dematerialize(): fully_shard() keeps the memory of the parameters of this module, or "
            "of a part of it, beside the module. Build the module anew with deferred_init(), or "
            "save its values."
        )
    _put_back(places, {name: trace_of(name, tensor) for name, tensor in _named(places).items()})


def recipe(module: torch.nn.Module, path: str | Path | None = None) -> bytes:
    """Return how the tensors of ``module`` are computed: seeds and operations, as JSON.

    The module may be deferred, or materialised and unchanged since. The size is a few kilobytes for
    modules of any size.

    Args:
        path: a file to which the recipe is written.

    Raises:
        ArgumentError: ``module`` is not a module.
        DeferredError: a tensor has no record, changed since its materialisation, or was computed
            from real tensors from outside.
        UnsupportedError: a recipe cannot contain one of the operations.
    """
    data = _recipes.dump(
        {name: trace_of(name, tensor) for name, tensor in _named(_places(module)).items()}
    )
    if path is not None:
        Path(path).write_bytes(data)
    return data


def from_recipe(module: torch.nn.Module, source: bytes | str | Path) -> None:
    """Make the tensors of ``module`` deferred, with the values that ``source`` defines.

    Args:
        module: has tensors of the recipe's names and shapes: deferred, meta or real.
        source: the result of :func:`recipe`, or the path of a file with it.

    Raises:
        ArgumentError: ``module`` is not a module.
        CorruptionError: ``source`` is not a recipe, or is damaged. Nothing is changed.
        MismatchError: the recipe is for other tensors. Nothing is changed.
    """
    places = _places(module)
    traces = _recipes.load(source if isinstance(source, bytes) else Path(source).read_bytes())
    named = _named(places)
    for name in sorted(named.keys() | traces.keys()):
        there = tuple(named[name].shape) if name in named else "missing"
        asked = traces[name].region.size if name in traces else "missing"
        if there != asked:
            raise MismatchError(
                f"{name}: the module has shape {there}, the recipe {asked}. Is it of another "
                "module?"
            )
    _put_back(places, {name: traces[name] for name in named})


def _places(module: torch.nn.Module) -> list[_Place]:
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(
            "dematerialize(), recipe() and from_recipe() take a module, not "
            f"{type(module).__name__}."
        )
    return [
        (registry, name, f"{prefix}{name}", tensor)
        for prefix, submodule in children_first(module, "")
        for registry in _registries(submodule)
        for name, tensor in registry.items()
        if tensor is not None
    ]


def _registries(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor | None], ...]:
    return module._parameters, module._buffers  # type: ignore[return-value]


def _named(places: list[_Place]) -> dict[str, torch.Tensor]:
    """Return each tensor once, under the first of its names."""
    first = {id(tensor): (name, tensor) for _, _, name, tensor in reversed(places)}
    return dict(first.values())


def _put_back(places: list[_Place], traces: dict[str, Trace]) -> None:
    named = _named(places)
    fakes = dict(zip(traces, rebuilt(traces.values()), strict=True))
    new = {id(tensor): go_back(tensor, fakes[name]) for name, tensor in named.items()}
    for registry, name, _, tensor in places:
        registry[name] = new[id(tensor)]

"""A nested state as leaves by key."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchrelay import _torch
from torchrelay.checkpoint._types import StatePath
from torchrelay.errors import ArgumentError, CorruptionError

__all__ = [
    "MAX_DEPTH",
    "SUBCLASS",
    "Index",
    "Leaf",
    "Subclass",
    "check_put",
    "expand",
    "flatten",
    "insert",
    "is_stateful",
    "key_of",
    "leaf_path",
    "put",
]

MAX_DEPTH = 100
_MAX_GAP = 1_000_000  # items that a list may lack before the one that a path leads to
SUBCLASS = "$subclass"  # after the key of a tensor that is stored by its parts: its class


class Index(int):
    """A position in a list, as distinct from an integer key of a dictionary."""


class Leaf(NamedTuple):
    """A value of a nested state. ``path`` has the caller's own keys and indices."""

    path: tuple[Any, ...]
    value: Any


@dataclass(frozen=True)
class Subclass:
    """The class of a tensor that is stored by its parts, and what it needs beside them.

    A load compares it; it never replaces it.
    """

    name: str
    context: Any

    @property
    def value(self) -> dict[str, Any]:
        return {"class": self.name, "context": self.context}


def is_stateful(value: Any) -> bool:
    """Return whether ``value`` has a state dict, as modules and optimizers do."""
    return (
        not isinstance(value, torch.Tensor)
        and hasattr(value, "state_dict")
        and hasattr(value, "load_state_dict")
    )


def key_of(path: tuple[Any, ...]) -> str:
    """Return the key of a leaf: its path joined by dots, as in DCP."""
    return ".".join(map(str, path))


def expand(state: Any) -> dict[str, Leaf]:
    """Return the leaves of a state by key; of modules and other stateful objects, at any depth,
    those of their state dicts.

    Raises:
        ArgumentError: as for :func:`flatten`, or ``state`` is neither a dictionary nor stateful.
    """
    if is_stateful(state):
        state = state.state_dict()
    found: dict[str, Leaf] = {}
    for leaf in flatten(state).values():
        if is_stateful(leaf.value):
            inner = expand(leaf.value).values()
            leaves = [Leaf((*leaf.path, *one.path), one.value) for one in inner]
        else:
            leaves = [leaf]
        for one in leaves:
            _add(found, one)
    return found


def flatten(state: Any) -> dict[str, Leaf]:
    """Return the leaves of a nested state by key.

    Dictionaries are flattened, lists that hold tensors, dictionaries or stateful objects, tuples
    that hold tensors or stateful objects, and tensors that are wrappers around others. A stateful
    object is a leaf.

    Raises:
        ArgumentError: two leaves would have the same key, the state is nested too deep, or it is no
            dictionary.
    """
    if not isinstance(state, Mapping):
        raise ArgumentError(
            f"a state is a dictionary, a module or has state_dict(); got {type(state).__name__}"
        )
    found: dict[str, Leaf] = {}
    _visit(found, (), state)
    return found


def _visit(found: dict[str, Leaf], path: tuple[Any, ...], value: Any) -> None:
    if len(path) > MAX_DEPTH:
        raise ArgumentError(
            f"{key_of(path[:3])}...: the state is nested more than {MAX_DEPTH} levels deep"
        )
    if isinstance(value, torch.Tensor):
        _visit_tensor(found, path, value)
    elif is_stateful(value):
        _add(found, Leaf(path, value))
    elif isinstance(value, Mapping):
        for name, item in value.items():
            _visit(found, (*path, name), item)
    elif isinstance(value, list | tuple) and _is_nested(value):
        for index, item in enumerate(value):
            _visit(found, (*path, Index(index)), item)
    else:
        _add(found, Leaf(path, value))


def _visit_tensor(found: dict[str, Leaf], path: tuple[Any, ...], tensor: torch.Tensor) -> None:
    tensor = _torch.waited(tensor)
    is_plain = _torch.sharding_of(tensor) == "plain" and not tensor.is_nested
    parts = _torch.parts_of(tensor) if is_plain else None
    if parts is None:
        _add(found, Leaf(path, tensor))
        return
    names, context = parts
    kind = type(tensor)
    described = Subclass(f"{kind.__module__}.{kind.__qualname__}", context)
    _add(found, Leaf((*path, SUBCLASS), described))
    for name in names:
        _visit(found, (*path, name), getattr(tensor, name))


def _add(found: dict[str, Leaf], leaf: Leaf) -> None:
    key = key_of(leaf.path)
    if key in found:
        raise ArgumentError(f"two values of the state have the key {key!r}")
    found[key] = leaf


def _is_nested(value: list[Any] | tuple[Any, ...], depth: int = 0) -> bool:
    """Return whether a list or tuple is flattened; those too deep are, to be refused there."""
    return _holds_tensors(value, depth) or (
        isinstance(value, list)
        and any(
            isinstance(item, Mapping) or (isinstance(item, list) and _is_nested(item, depth + 1))
            for item in value
        )
    )


def _holds_tensors(value: Any, depth: int) -> bool:
    if isinstance(value, Mapping | list | tuple):
        items = value.values() if isinstance(value, Mapping) else value
        return depth > MAX_DEPTH or any(_holds_tensors(item, depth + 1) for item in items)
    return isinstance(value, torch.Tensor) or is_stateful(value)


def leaf_path(path: StatePath) -> tuple[Any, ...]:
    """Return the path of a leaf from its form in a manifest."""
    return tuple(
        step[0] if isinstance(step, tuple) else Index(step) if type(step) is int else step
        for step in path
    )


def insert(state: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    """Set ``value`` at ``path``, creating dictionaries and lists on the way.

    Raises:
        CorruptionError: the path leads far behind the end of a list.
    """
    here: Any = state
    for step, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(here, list):
            if step > len(here) + _MAX_GAP:
                raise CorruptionError(f"{key_of(path)}: {step} is an impossible index")
            here.extend([None] * (step + 1 - len(here)))
        if following is None:
            here[step] = value
            return
        missing = here[step] is None if isinstance(here, list) else step not in here
        if missing:
            here[step] = [] if isinstance(following, Index) else {}
        here = here[step]


def check_put(state: Any, path: tuple[Any, ...]) -> None:
    """Check that the leaf at ``path`` can be replaced.

    Raises:
        ArgumentError: a container on the way cannot be changed.
    """
    for step in path:
        if not isinstance(state, tuple | list | MutableMapping):
            raise ArgumentError(
                f"{key_of(path)}: the value cannot be replaced, as it is in a "
                f"{type(state).__name__}; load into a dictionary"
            )
        state = state[step]


def put(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Replace the leaf at ``path``; return ``state``, or the tuple in its place."""
    if not path:
        return value
    step, item = path[0], state[path[0]]
    new = put(item, path[1:], value)
    if isinstance(state, tuple):
        items = [*state[:step], new, *state[step + 1 :]]
        return state._make(items) if hasattr(state, "_make") else type(state)(items)
    if new is not item:
        state[step] = new
    return state

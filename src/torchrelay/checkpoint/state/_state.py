"""A nested state as leaves by key."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from torchrelay import _torch
from torchrelay.checkpoint._types import CONTAINER, MAX_DEPTH, METADATA, StatePath
from torchrelay.checkpoint.format._values import Encoded, decode, encode
from torchrelay.checkpoint.state._metadata import noted, stored
from torchrelay.checkpoint.state._subclasses import SUBCLASS, parts_of
from torchrelay.errors import (
    ArgumentError,
    CorruptionError,
    MismatchError,
    TorchRelayError,
    describe,
)

__all__ = [
    "ORDINARY",
    "ContainerClass",
    "Index",
    "Leaf",
    "TupleIndex",
    "TupleItems",
    "check_put",
    "finished",
    "flatten",
    "insert",
    "is_nested",
    "is_stateful",
    "key_of",
    "leaf_path",
    "like",
    "put",
    "relative_path",
    "state_dict_of",
]

_MAX_GAP = 1_000_000  # items that a list may lack before the one that a path leads to
_NAMES = (METADATA, CONTAINER)
ORDINARY = (torch.Tensor, torch.nn.Parameter)  # tensors that are neither deferred nor sharded


class Index(int):
    """A position in a list, as distinct from an integer key of a dictionary."""

    def stored(self) -> int:
        """Return what a checkpoint has in a path for it; :func:`leaf_path` reads it."""
        return int(self)


class TupleIndex(Index):
    """A position in a tuple."""

    def stored(self) -> int:
        return ~int(self)


class ContainerClass(Encoded):
    """The class of a dictionary or a tuple: the encoded form of one without values."""

    @classmethod
    def of(cls, value: Any) -> ContainerClass | None:
        """Return the class of a container; None if it is plain, or a checkpoint cannot hold it."""
        kind = type(value)
        if kind in (OrderedDict, Counter):
            empty: Any = kind()
        elif kind is defaultdict:
            empty = defaultdict(value.default_factory)
        elif isinstance(value, tuple) and hasattr(kind, "_fields"):
            empty = tuple.__new__(kind, [None] * len(value))
        else:
            return None
        try:
            return cls(encode("", empty))
        except ArgumentError:
            return None

    def empty(self) -> Any:
        """Return one without values; None if its class is not imported."""
        with suppress(MismatchError):
            return decode(CONTAINER, self.content)
        return None


class TupleItems(list[Any]):
    """The items of a tuple while it is made, and at the end, its class."""

    def finished(self) -> tuple[Any, ...]:
        """Return the tuple."""
        *items, last = self or [None]
        if not isinstance(last, ContainerClass):
            return tuple(self)
        empty = last.empty()
        is_like = isinstance(empty, tuple) and len(empty) == len(items)
        return tuple.__new__(type(empty) if is_like else tuple, items)


class Leaf(NamedTuple):
    """A value of a nested state. ``path`` has the caller's own keys and indices."""

    path: tuple[Any, ...]
    value: Any

    @property
    def is_empty(self) -> bool:
        """Return whether it stands for an empty dictionary."""
        return isinstance(self.value, Mapping) and not self.value


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


def flatten(state: Any, *, expand: bool = False) -> dict[str, Leaf]:
    """Return the leaves of a nested state by key.

    Dictionaries are flattened, lists that hold tensors, dictionaries or stateful objects, tuples
    that hold tensors or stateful objects, and tensors that are wrappers around others. A stateful
    object is a leaf or, with ``expand``, is replaced by its state dict. With ``expand``, an empty
    dictionary is a leaf too, and so are the versions of modules that a state dict has.

    Raises:
        ArgumentError: two leaves would have the same key, the state is nested too deep, or it is no
            dictionary.
    """
    found: dict[str, Leaf] = {}
    if expand and is_stateful(state):
        state = state_dict_of("", state)
    _visit_mapping(found, (), "", state, expand)
    return found


def state_dict_of(key: str, value: Any, get: Callable[[], Any] | None = None) -> Any:
    """Return what ``state_dict()`` of a stateful object returns, or ``get()`` in its place.

    Raises:
        ArgumentError: it raises something else than our errors, or memory is short; the message
            names the object.
    """
    try:
        return value.state_dict() if get is None else get()
    except (TorchRelayError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        name = f" {key!r}" if key else ""
        raise ArgumentError(
            f"state_dict() of {type(value).__name__}{name} raised {describe(error)}"
        ) from error


def _visit_mapping(
    found: dict[str, Leaf], path: tuple[Any, ...], start: str, state: Any, expand: bool
) -> None:
    """Add the leaves of a dictionary. ``start`` is what their keys begin with."""
    if not isinstance(state, Mapping):
        raise ArgumentError(
            f"a state is a dictionary, a module or has state_dict(); got {type(state).__name__}"
        )
    kind = ContainerClass.of(state) if expand and not hasattr(state, "_metadata") else None
    taken = next((name for name in _NAMES if expand and name in state), None)
    if taken is not None:
        raise ArgumentError(f"{start}{taken}: the key has a meaning in checkpoints; rename it")
    if expand and path and not state and kind is None:
        _add(found, path, start[:-1], {})
    metadata = stored(state) if expand and state else None
    if metadata is not None:
        _visit(found, (*path, METADATA), f"{start}{METADATA}", metadata, expand)
    if kind is not None:
        _add(found, (*path, CONTAINER), f"{start}{CONTAINER}", kind)
    for name, item in state.items():
        key = f"{start}{name!s}"
        if type(item) in ORDINARY and key not in found:
            found[key] = Leaf((*path, name), item)
        else:
            _visit(found, (*path, name), key, item, expand)


def _visit(
    found: dict[str, Leaf], path: tuple[Any, ...], key: str, value: Any, expand: bool
) -> None:
    if len(path) > MAX_DEPTH:
        raise ArgumentError(
            f"{key_of(path[:3])}...: the state is nested more than {MAX_DEPTH} levels deep"
        )
    if isinstance(value, torch.Tensor):
        value = _torch.waited(value)
        parts = parts_of(key, value)
        if parts is not None:
            for name, part in parts.items():
                _visit(found, (*path, name), f"{key}.{name}", part, expand)
            return
    elif is_stateful(value):
        if expand:
            _visit_mapping(found, path, f"{key}.", state_dict_of(key, value), expand)
            return
    elif isinstance(value, Mapping) and path[-1] != SUBCLASS:  # read back, it is still one value
        _visit_mapping(found, path, f"{key}.", value, expand)
        return
    elif isinstance(value, list | tuple) and is_nested(value):
        kind = TupleIndex if isinstance(value, tuple) else Index
        for index, item in enumerate(value):
            _visit(found, (*path, kind(index)), f"{key}.{index}", item, expand)
        own = ContainerClass.of(value) if expand else None
        if own is not None:
            _add(found, (*path, kind(len(value))), f"{key}.{CONTAINER}", own)
        return
    _add(found, path, key, value)


def _add(found: dict[str, Leaf], path: tuple[Any, ...], key: str, value: Any) -> None:
    if key in found:
        raise ArgumentError(f"two values of the state have the key {key!r}")
    found[key] = Leaf(path, value)


def is_nested(value: list[Any] | tuple[Any, ...], depth: int = 0) -> bool:
    """Return whether a list or tuple is flattened; those too deep are, to be refused there."""
    return _holds_tensors(value, depth) or (
        isinstance(value, list)
        and any(
            isinstance(item, Mapping) or (isinstance(item, list) and is_nested(item, depth + 1))
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
        decode(f"{path}: a key", step[0])
        if isinstance(step, tuple)
        else ((Index(step) if step >= 0 else TupleIndex(~step)) if type(step) is int else step)
        for step in path
    )


def relative_path(path: StatePath, key: str, start: str) -> tuple[Any, ...]:
    """Return the path of a leaf without what leads to ``start``, with which ``key`` begins."""
    left, steps = start, leaf_path(path) or (key,)
    for index, step in enumerate(steps):
        if not left:
            return steps[index:]
        if not f"{step}.".startswith(left):
            if not left.startswith(f"{step}."):
                break
            left = left.removeprefix(f"{step}.")
        elif f"{step}." != left:
            return (str(step).removeprefix(left), *steps[index + 1 :])
        else:
            left = ""
    return (key.removeprefix(start),)


def insert(state: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    """Set ``value`` at ``path``, creating dictionaries and lists on the way.

    Raises:
        CorruptionError: the path leads far behind the end of a list.
    """
    here: Any = state
    for depth, step in enumerate(path, 1):
        if isinstance(here, list):
            if step > len(here) + _MAX_GAP:
                raise CorruptionError(f"{key_of(path)}: {step} is an impossible index")
            here.extend([None] * (step + 1 - len(here)))
        if depth == len(path):
            here[step] = value
            return
        missing = here[step] is None if isinstance(here, list) else step not in here
        if missing:
            after = path[depth]
            is_tuple = isinstance(after, TupleIndex)
            here[step] = TupleItems() if is_tuple else [] if isinstance(after, Index) else {}
        here = here[step]


def finished(state: Any) -> Any:
    """Return what :func:`insert` made, with the classes of containers and the versions of modules
    in place.
    """
    if type(state) is dict:
        kept = {name: finished(item) for name, item in state.items() if name not in _NAMES}
        if CONTAINER in state:
            return like(kept, state[CONTAINER].empty())
        return noted(kept, state[METADATA]) if METADATA in state else kept
    if type(state) is TupleItems:
        return TupleItems(map(finished, state)).finished()
    return [*map(finished, state)] if type(state) is list else state


def like(items: dict[Any, Any], container: Any) -> Any:
    """Return a dictionary of the class of ``container``, if that is one."""
    if not isinstance(container, MutableMapping) or type(container) is dict:
        return items
    made = copy.copy(container)
    made.clear()
    made.update(items)
    return made


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

"""What each rank contributes to a save, and whether the ranks agree on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchrelay.checkpoint._group import Group
from torchrelay.checkpoint._plan import Held, deal, no_collection
from torchrelay.checkpoint._saving import Description, TensorDescription
from torchrelay.checkpoint._state import Index, Leaf, Subclass, expand
from torchrelay.checkpoint._tensors import (
    Shard,
    TensorState,
    check_memory,
    memory_of,
    source_data,
    tensor_state,
)
from torchrelay.checkpoint._types import StatePath
from torchrelay.checkpoint._values import encode
from torchrelay.checkpoint._write import Source
from torchrelay.errors import ArgumentError, MismatchError

__all__ = ["Inventory", "encoded", "gather_inventory", "sources_of", "take_inventory", "ties"]


@dataclass(frozen=True)
class Inventory:
    """A rank's tensors by key, and the description of its state."""

    tensors: Mapping[str, TensorState]
    description: Description


@no_collection()
def take_inventory(state: Any) -> Inventory:
    """Return the leaves of a state.

    Raises:
        ArgumentError: a value that a checkpoint cannot hold.
        DeferredError: a tensor without values.
        UnsupportedError: a tensor that it cannot hold.
    """
    tensors: dict[str, TensorState] = {}
    objects: dict[str, Any] = {}
    paths: dict[str, StatePath] = {}
    for key, leaf in expand(state).items():
        paths[key] = tuple(_path_item(key, item) for item in leaf.path)
        if isinstance(leaf.value, torch.Tensor):
            tensors[key] = _checked(key, leaf.value)
        else:
            objects[key] = encoded(key, leaf)
    described = {
        key: TensorDescription(t.dtype.name, t.shape, t.layout, t.mesh)
        for key, t in tensors.items()
    }
    blank = (key for key, t in tensors.items() if not any(s.box.numel for s in t.shards))
    owners = {**ties(tensors), **dict.fromkeys(blank, "")}
    return Inventory(tensors, Description(described, objects, paths, owners))


def _checked(key: str, tensor: torch.Tensor) -> TensorState:
    state = tensor_state(key, tensor)
    for shard in state.shards:
        check_memory(key, shard.tensor)
    return state


def encoded(key: str, leaf: Leaf) -> Any:
    """Return the value of a leaf as JSON."""
    return encode(key, leaf.value.value if isinstance(leaf.value, Subclass) else leaf.value)


def _path_item(key: str, item: Any) -> str | int | tuple[int]:
    if isinstance(item, Index):
        return int(item)
    if type(item) is int:
        return (item,)
    if type(item) is not str:
        raise ArgumentError(
            f"{key}: the keys of a state are strings and integers, not {type(item).__name__}"
        )
    return item


def ties(tensors: Mapping[str, TensorState]) -> dict[str, str]:
    """Return, for each tensor that is the same in memory as earlier ones, the key of the first."""
    first: dict[Any, str] = {}
    tied: dict[str, str] = {}
    for key, state in tensors.items():
        memory = [(shard.box, memory_of(shard.tensor)) for shard in state.shards]
        if all(at for _, at in memory) and memory:
            owner = first.setdefault((state.shape, state.layout, state.mesh, *memory), key)
            if owner != key:
                tied[key] = owner
    return tied


def gather_inventory(
    state: Any, ranks: Group, before: Callable[[], None] = lambda: None
) -> tuple[Inventory, list[Description]]:
    """Return this rank's inventory and, in the group's order, the descriptions of all ranks; one
    description if it is equal on all.

    An error on one rank is raised on all.

    ``before`` is called first, in the same round of messages.

    Raises:
        MismatchError: two ranks have different values, dtypes, shapes or layouts under one key.
        ArgumentError, DeferredError, UnsupportedError: as :func:`take_inventory`.
    """
    found: list[Inventory] = []

    def take() -> bytes:
        before()
        found.append(take_inventory(state))
        return found[0].description.fingerprint() if ranks.size > 1 else b""

    fingerprints = ranks.together(take)
    (mine,) = found
    if len(set(fingerprints)) == 1:
        return mine, [mine.description]
    everyone = ranks.all_gather(mine.description)
    seen: dict[str, tuple[int, Any]] = {}
    for rank, description in zip(ranks.ranks, everyone, strict=True):
        comparable = {key: what.comparable for key, what in description.tensors.items()}
        for key, what in [*comparable.items(), *description.objects.items()]:
            other, known = seen.setdefault(key, (rank, what))
            if known != what:
                raise MismatchError(
                    f"{key}: rank {other} has {_shown(known)}, rank {rank} has {_shown(what)}; "
                    "values that differ need keys that differ, such as one with the rank in it"
                )
    return mine, everyone


def _shown(what: Any) -> str:
    if isinstance(what, tuple):
        dtype, shape, layout = what
        return f"a {dtype} tensor of shape {list(shape)} ({layout})"
    text = json.dumps(what)
    return text if len(text) < 80 else f"{text[:77]}..."


@no_collection()
def sources_of(mine: Inventory, everyone: Sequence[Description], ranks: Group) -> list[Source]:
    """Return the chunks that this rank writes. Pure."""
    held = []
    for keys in _tied_everywhere(mine, everyone):
        state = mine.tensors[keys[0]]
        for shard in state.shards:
            if shard.box.numel:
                size_bytes = shard.box.numel * state.dtype.itemsize
                data = source_data(shard.tensor)
                source = Source(
                    keys, state.dtype, state.shape, shard.box, size_bytes, *data, shard.tensor
                )
                holders = _holders(keys[0], shard, everyone, ranks)
                held.append(Held((keys[0], shard.box.offsets), size_bytes, holders, source))
    return deal(held, ranks.global_rank)


def _tied_everywhere(mine: Inventory, everyone: Sequence[Description]) -> list[tuple[str, ...]]:
    """Return this rank's keys in groups; those of a group are one tensor on every rank.

    Their order is the same on all ranks.
    """
    together: dict[Any, list[str]] = {}
    for key in {key: None for described in everyone for key in described.tensors}:
        if key in mine.tensors:
            owners = tuple(described.owner(key) for described in everyone)
            apart = key if not any(owners) else None
            together.setdefault((owners, apart), []).append(key)
    return [tuple(keys) for keys in together.values()]


def _holders(
    key: str, shard: Shard, everyone: Sequence[Description], ranks: Group
) -> tuple[int, ...]:
    """Return the ranks of the group that have the same block, ascending."""
    if shard.positions == () or ranks.size == 1:
        return (ranks.global_rank,)
    if len(everyone) == 1:
        having = dict.fromkeys(ranks.ranks, everyone[0].tensors[key])
    else:
        having = {
            rank: described.tensors[key]
            for rank, described in zip(ranks.ranks, everyone, strict=True)
            if key in described.tensors
        }
    if shard.positions is None:
        return tuple(sorted(having))
    # Meshes of other ranks hold the same blocks in the same places.
    meshes = {described.mesh for described in having.values()}
    found = {mesh[position] for mesh in meshes for position in shard.positions}
    return tuple(sorted(found & having.keys()))

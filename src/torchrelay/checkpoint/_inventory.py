"""What each rank contributes to a save, and whether the ranks agree on it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchrelay.checkpoint._group import Group
from torchrelay.checkpoint._plan import Held, deal, no_collection
from torchrelay.checkpoint._saving import Description
from torchrelay.checkpoint._state import Index, Leaf, Subclass, flatten
from torchrelay.checkpoint._tensors import TensorState, check_memory, memory_of, tensor_state
from torchrelay.checkpoint._types import StatePath
from torchrelay.checkpoint._values import encode
from torchrelay.checkpoint._write import PlannedChunk
from torchrelay.errors import ArgumentError, MismatchError

__all__ = ["Inventory", "encoded", "gather_inventory", "plan_chunks", "tensors_of"]


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
    for key, leaf in flatten(state, expand=True).items():
        path, value = leaf
        paths[key] = _stored_path(key, path)
        if isinstance(value, torch.Tensor):
            tensors[key] = found = tensor_state(key, value)
            for tensor in found.tensors:
                check_memory(key, tensor)
        else:
            objects[key] = encoded(key, leaf)
    described = {key: found.layout.described for key, found in tensors.items()}
    blank = [key for key, found in tensors.items() if found.layout.is_blank]
    owners = {**ties(tensors), **dict.fromkeys(blank, "")}
    return Inventory(tensors, Description(described, objects, paths, owners))


def encoded(key: str, leaf: Leaf) -> Any:
    """Return the value of a leaf as JSON."""
    return encode(key, leaf.value.value if isinstance(leaf.value, Subclass) else leaf.value)


def _stored_path(key: str, path: tuple[Any, ...]) -> StatePath:
    for item in path:
        if type(item) is not str:
            return tuple(_path_item(key, item) for item in path)
    return path


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
    by_address: dict[int, list[str]] = defaultdict(list)
    for key, (_, blocks) in tensors.items():
        if blocks and blocks[0].numel():
            by_address[blocks[0].data_ptr()].append(key)
    first: dict[Any, str] = {}
    tied: dict[str, str] = {}
    for key in (key for keys in by_address.values() if len(keys) > 1 for key in keys):
        layout, blocks = tensors[key]
        memory = tuple(map(memory_of, blocks))
        owner = first.setdefault((layout, memory), key) if all(memory) else key
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
def plan_chunks(
    mine: Inventory, everyone: Sequence[Description], ranks: Group
) -> list[PlannedChunk]:
    """Return the chunks that this rank writes. Pure."""
    held = []
    for keys in _tied_everywhere(mine, everyone):
        dtype, described, blocks = mine.tensors[keys[0]].layout
        for index, (box, positions, size_bytes) in enumerate(blocks):
            if size_bytes:
                chunk = PlannedChunk(keys, dtype, described.shape, box, size_bytes, index)
                holders = _holders(keys[0], positions, everyone, ranks)
                held.append(Held((keys[0], box.offsets), size_bytes, holders, chunk))
    return deal(held, ranks.global_rank)


def tensors_of(mine: Inventory, chunks: Sequence[PlannedChunk]) -> list[torch.Tensor]:
    """Return the tensor of each chunk."""
    return [mine.tensors[chunk.keys[0]].tensors[chunk.block] for chunk in chunks]


def _tied_everywhere(mine: Inventory, everyone: Sequence[Description]) -> list[tuple[str, ...]]:
    """Return this rank's keys in groups; those of a group are one tensor on every rank.

    Their order is the same on all ranks.
    """
    if len(everyone) == 1:
        owners = everyone[0].owners
        together: dict[Any, list[str]] = defaultdict(list)
        for key in mine.tensors:
            together[owners.get(key) or key].append(key)
        return [*map(tuple, together.values())]
    together = defaultdict(list)
    for key in {key: None for described in everyone for key in described.tensors}:
        if key in mine.tensors:
            owned = tuple(described.owner(key) for described in everyone)
            together[owned, None if any(owned) else key].append(key)
    return [*map(tuple, together.values())]


def _holders(
    key: str, positions: tuple[int, ...] | None, everyone: Sequence[Description], ranks: Group
) -> tuple[int, ...]:
    """Return the ranks of the group that have the same block, ascending."""
    if positions == () or ranks.size == 1:
        return (ranks.global_rank,)
    if len(everyone) == 1:
        having = dict.fromkeys(ranks.ranks, everyone[0].tensors[key])
    else:
        having = {
            rank: described.tensors[key]
            for rank, described in zip(ranks.ranks, everyone, strict=True)
            if key in described.tensors
        }
    if positions is None:
        return tuple(sorted(having))
    # Meshes of other ranks hold the same blocks in the same places.
    meshes = {described.mesh for described in having.values()}
    found = {mesh[position] for mesh in meshes for position in positions}
    return tuple(sorted(found & having.keys()))

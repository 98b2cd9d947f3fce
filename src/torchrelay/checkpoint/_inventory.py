"""What each rank contributes to a save, and whether the ranks agree on it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchrelay.checkpoint._assemble import Description
from torchrelay.checkpoint._group import Group
from torchrelay.checkpoint._plan import Held, deal
from torchrelay.checkpoint._state import (
    Index,
    TensorState,
    as_state,
    flatten,
    source_data,
    tensor_state,
)
from torchrelay.checkpoint._types import StatePath
from torchrelay.checkpoint._values import encode
from torchrelay.checkpoint._write import Source
from torchrelay.errors import ArgumentError, MismatchError

__all__ = ["Inventory", "agree", "sources_of", "take_inventory"]


@dataclass(frozen=True)
class Inventory:
    """A rank's tensors by key, and the description of its state. ``tied`` gives a key's further
    keys.
    """

    tensors: Mapping[str, TensorState]
    tied: Mapping[str, tuple[str, ...]]
    description: Description


def take_inventory(state: Any) -> Inventory:
    """Return the leaves of a state.

    Raises:
        ArgumentError: a value that a checkpoint cannot hold.
        UnsupportedError: a tensor that it cannot hold.
    """
    tensors: dict[str, TensorState] = {}
    objects: dict[str, Any] = {}
    paths: dict[str, StatePath] = {}
    for key, leaf in flatten(as_state(state)).items():
        paths[key] = tuple(_path_item(key, item) for item in leaf.path)
        if isinstance(leaf.value, torch.Tensor):
            tensors[key] = tensor_state(key, leaf.value)
        else:
            objects[key] = encode(key, leaf.value)
    described = {key: (t.dtype.name, t.shape, t.layout) for key, t in tensors.items()}
    return Inventory(tensors, _tied(tensors), Description(described, objects, paths))


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


def _tied(tensors: Mapping[str, TensorState]) -> dict[str, tuple[str, ...]]:
    """Return the keys whose tensors share memory, by the first of them."""
    first: dict[Any, str] = {}
    tied: dict[str, tuple[str, ...]] = {}
    for key, state in tensors.items():
        if not any(shard.box.numel for shard in state.shards) or not all(
            shard.tensor.data_ptr() for shard in state.shards
        ):
            tied[key] = ()
            continue
        memory = tuple(
            (shard.box, shard.tensor.data_ptr(), shard.tensor.stride(), str(shard.tensor.device))
            for shard in state.shards
        )
        owner = first.setdefault((state.dtype, state.shape, state.layout, memory), key)
        if owner == key:
            tied[key] = ()
        else:
            tied[owner] = (*tied[owner], key)
    return tied


def agree(mine: Description, fingerprints: Sequence[bytes], ranks: Group) -> list[Description]:
    """Return one description if it is equal on all ranks, else each rank's, in the group's order.

    Raises:
        MismatchError: two ranks have different values, dtypes, shapes or layouts under one key.
    """
    if len(set(fingerprints)) == 1:
        return [mine]
    everyone = ranks.all_gather(mine)
    seen: dict[str, tuple[int, Any]] = {}
    for rank, description in zip(ranks.ranks, everyone, strict=True):
        for key, what in [*description.tensors.items(), *description.objects.items()]:
            other, before = seen.setdefault(key, (rank, what))
            if before != what:
                raise MismatchError(
                    f"{key}: rank {other} has {_shown(before)}, rank {rank} has {_shown(what)}; "
                    "values that differ need keys that differ, such as one with the rank in it"
                )
    return everyone


def _shown(what: Any) -> str:
    if isinstance(what, tuple):
        dtype, shape, layout = what
        return f"a {dtype} tensor of shape {list(shape)} ({layout})"
    text = json.dumps(what)
    return text if len(text) < 80 else f"{text[:77]}..."


def sources_of(mine: Inventory, everyone: Sequence[Description], ranks: Group) -> list[Source]:
    """Return the chunks that this rank writes. Pure."""
    held = []
    members = set(ranks.ranks)
    for key, more in mine.tied.items():
        state = mine.tensors[key]
        everywhere = _having(key, everyone, ranks)
        for shard in state.shards:
            if not shard.box.numel:
                continue
            holders = everywhere if shard.holders is None else shard.holders or (ranks.global_rank,)
            source = Source(
                (key, *more),
                state.dtype,
                state.shape,
                shard.box,
                *source_data(shard.tensor),
                shard.tensor,
            )
            name = (key, shard.box.offsets)
            held.append(
                Held(name, source.size_bytes, tuple(h for h in holders if h in members), source)
            )
    return deal(held, ranks.global_rank)


def _having(key: str, everyone: Sequence[Description], ranks: Group) -> tuple[int, ...]:
    """Return the ranks whose state has ``key``."""
    if len(everyone) == 1:
        return tuple(sorted(ranks.ranks))
    return tuple(
        sorted(rank for rank, d in zip(ranks.ranks, everyone, strict=True) if key in d.tensors)
    )

"""What a save is about: what each rank has, and what it writes. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from torchrelay._boxes import Box
from torchrelay.checkpoint._types import EXPORT, Dtype, Sizes, StatePath, TensorDescription
from torchrelay.checkpoint.format._safetensors import aligned

__all__ = ["EXPORT", "Description", "Exports", "Plan", "PlannedChunk", "StateLayout", "deal"]


class PlannedChunk(NamedTuple):
    """A chunk to write: ``block`` is its index among the blocks of the rank's state.

    ``keys`` has more than one name if tied tensors share the chunk.
    """

    keys: tuple[str, ...]
    dtype: Dtype
    shape: tuple[int, ...]
    box: Box
    size_bytes: int
    block: int = 0

    @property
    def name(self) -> str:
        """Return the name of the chunk inside its file."""
        key = self.keys[0]
        if self.box.sizes == self.shape:
            return key
        return f"{key}@{','.join(map(str, self.box.offsets))}"


@dataclass(frozen=True)
class StateLayout:
    """What a rank's state consists of, without values and data.

    ``owners`` gives the first key of a tensor that has several; it is empty if no element of the
    tensor is on this rank.
    """

    tensors: Mapping[str, TensorDescription]
    paths: Mapping[str, StatePath]
    owners: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def digest(self) -> bytes:
        """Equal for two ranks exactly if their layouts are, apart from empty owners."""
        owners = {key: owner for key, owner in self.owners.items() if owner}
        text = json.dumps([dict(part) for part in (self.tensors, self.paths, owners)])
        return hashlib.sha256(text.encode()).digest()

    def owner(self, key: str) -> str | None:
        """Return the first key of the tensor at ``key``; None if nothing of it is here."""
        return (self.owners.get(key, key) or None) if key in self.tensors else None


@dataclass(frozen=True)
class Exports:
    """What a save writes for readers of safetensors: tensors with their names there, by key, and
    small files by name. ``stem`` begins the names of the files of tensors.
    """

    FILE_NAME = re.compile(r"(?!data-|manifest\.json|torchrelay)[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")

    names: Mapping[str, str]
    files: Mapping[str, bytes]
    stem: str
    max_file_bytes: int

    def name_of(self, chunk: PlannedChunk) -> str | None:
        return next((self.names[key] for key in chunk.keys if key in self.names), None)


class Description(NamedTuple):
    """A rank's state without data: the ranks compare it, and the manifest is made from it.
    ``objects`` are the encoded values.
    """

    layout: StateLayout
    objects: Mapping[str, Any]

    def fingerprint(self) -> bytes:
        """Equal for two ranks exactly if their descriptions are, apart from empty owners."""
        text = json.dumps(dict(self.objects))
        return self.layout.digest + hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True)
class Plan:
    """What a rank writes: its chunks with their sizes, in bytes, and their places in the staging
    memory; on the coordinator also the layouts of all ranks, one if they are equal.
    """

    chunks: Sequence[PlannedChunk]
    sizes: Sizes
    starts: Sizes
    layouts: Sequence[StateLayout]

    @classmethod
    def of(cls, chunks: Sequence[PlannedChunk], layouts: Sequence[StateLayout]) -> Plan:
        sizes = np.array([chunk.size_bytes for chunk in chunks], np.int64)
        return cls(chunks, sizes.astype(np.uint64), aligned(sizes).astype(np.uint64), layouts)


def deal(chunks: Sequence[tuple[PlannedChunk, tuple[int, ...]]], rank: int) -> list[PlannedChunk]:
    """Return those of ``chunks``, each with its holders in ascending order, that ``rank`` writes.

    The chunks of each set of holders are dealt largest first, to the rank that has least.
    """
    by_holders: dict[tuple[int, ...], list[PlannedChunk]] = defaultdict(list)
    for chunk, holders in chunks:
        by_holders[holders].append(chunk)
    mine: list[PlannedChunk] = []
    for holders, shared in by_holders.items():
        if len(holders) == 1:
            mine += shared
            continue
        loads = dict.fromkeys(holders, 0)
        for chunk in sorted(shared, key=lambda chunk: (-chunk.size_bytes, chunk.name)):
            writer = min(holders, key=lambda holder: (loads[holder], holder))
            loads[writer] += chunk.size_bytes
            if writer == rank:
                mine.append(chunk)
    return mine

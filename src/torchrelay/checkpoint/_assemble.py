"""Assembles the manifest from the parts of all ranks, before the coordinator commits. Imports no
torch.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchrelay.checkpoint import _manifest
from torchrelay.checkpoint._boxes import tiling_fault
from torchrelay.checkpoint._types import Box, DataFile, StatePath
from torchrelay.checkpoint._write import Part
from torchrelay.errors import MismatchError

__all__ = ["ChunkRecord", "Description", "PartRecord", "TensorDescription", "assemble", "record_of"]


class TensorDescription(NamedTuple):
    """A tensor of a rank. ``layout`` and ``mesh`` are those of its state."""

    dtype: str
    shape: tuple[int, ...]
    layout: str = ""
    mesh: tuple[int, ...] = ()

    @property
    def comparable(self) -> tuple[str, tuple[int, ...], str]:
        """Return what must be the same on all ranks."""
        return self.dtype, self.shape, self.layout


@dataclass(frozen=True)
class Description:
    """An inventory without its data: the ranks compare it, and the manifest is made from it.

    ``owners`` gives the first key of a tensor that has several; it is empty if no element of the
    tensor is on this rank.
    """

    tensors: Mapping[str, TensorDescription]
    objects: Mapping[str, Any]  # encoded
    paths: Mapping[str, StatePath]
    owners: Mapping[str, str] = field(default_factory=dict)

    def fingerprint(self) -> bytes:
        """Equal for two ranks exactly if their descriptions are, apart from empty owners."""
        owners = {key: owner for key, owner in self.owners.items() if owner}
        parts = (self.tensors, self.objects, self.paths, owners)
        text = json.dumps([dict(part) for part in parts])
        return hashlib.sha256(text.encode()).digest()

    def owner(self, key: str) -> str | None:
        """Return the first key of the tensor at ``key``; None if nothing of it is here."""
        return (self.owners.get(key, key) or None) if key in self.tensors else None


class ChunkRecord(NamedTuple):
    """A chunk that was written: the keys that share it, its place, and its entry in the
    manifest.
    """

    keys: tuple[str, ...]
    box: Box
    text: str


@dataclass(frozen=True)
class PartRecord:
    """What one rank has written: its files and chunks, for the coordinator."""

    files: dict[str, DataFile]
    chunks: list[ChunkRecord]


def record_of(part: Part) -> PartRecord:
    """Return the record of a part. Each rank encodes its own chunks, to spare the coordinator."""
    return PartRecord(
        part.files,
        [
            ChunkRecord(source.keys, chunk.box, _manifest.chunk_text(chunk, source.size_bytes))
            for source, chunk in part.chunks
        ],
    )


def assemble(
    everyone: Sequence[Description],
    records: Sequence[PartRecord],
    *,
    name: str,
    save_id: str | None = None,
) -> tuple[bytes, dict[str, int]]:
    """Return the manifest of a checkpoint whose parts are written, and the sizes of its files.

    Args:
        everyone: the descriptions of the ranks; one description if it is the same for all.
        records: the parts of all ranks.
        name: the last part of the checkpoint's path.
        save_id: the checkpoint's id; by default a random one.

    Raises:
        MismatchError: the parts do not make whole tensors.
    """
    chunks: dict[str, dict[Box, str]] = defaultdict(dict)
    files: dict[str, DataFile] = {}
    for record in records:
        files.update(record.files)
        for keys, box, text in record.chunks:
            for key in keys:
                chunks[key].setdefault(box, text)
    tensors: dict[str, str] = {}
    objects: dict[str, Any] = {}
    paths: dict[str, StatePath] = {}
    for description in everyone:
        objects.update(description.objects)
        paths.update(description.paths)
        for key, (dtype, shape, *_) in description.tensors.items():
            if key not in tensors:
                found = sorted(chunks[key].items())
                fault = tiling_fault(shape, [box for box, _ in found])
                if fault:
                    raise MismatchError(
                        f"the ranks together do not hold the whole tensor {key!r} of shape "
                        f"{list(shape)}: {fault}"
                    )
                tensors[key] = _manifest.tensor_text(dtype, shape, [text for _, text in found])
    data = _manifest.to_bytes(
        save_id=save_id or secrets.token_hex(8),
        name=name,
        saved_at_ns=time.time_ns(),
        world_size=len(records),
        files=files,
        tensors=tensors,
        objects=objects,
        paths=paths,
    )
    return data, {name: file.size_bytes for name, file in files.items()}

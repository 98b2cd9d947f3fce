"""Putting the parts of all ranks together: what the coordinator does before it commits. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrelay.checkpoint import _manifest
from torchrelay.checkpoint._types import DTYPES, Box, Chunk, DataFile, Manifest, StatePath, TensorEntry
from torchrelay.checkpoint._write import Part
from torchrelay.errors import CorruptionError, MismatchError

__all__ = ["Description", "PartRecord", "assemble", "record_of"]


@dataclass(frozen=True)
class Description:
    """An inventory without its data: what ranks compare, and what the manifest is made of."""

    tensors: Mapping[str, tuple[str, tuple[int, ...], str]]  # dtype, shape, layout
    objects: Mapping[str, Any]  # encoded
    paths: Mapping[str, StatePath]

    def fingerprint(self) -> bytes:
        """Equal for two ranks exactly if their descriptions are."""
        text = json.dumps([dict(self.tensors), dict(self.objects), dict(self.paths)])
        return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True)
class PartRecord:
    """What the coordinator needs to know of a rank's part: its files, and each chunk with its keys."""

    files: dict[str, DataFile]
    chunks: list[tuple[tuple[str, ...], Chunk]]


def record_of(part: Part) -> PartRecord:
    return PartRecord(part.files, [(source.keys, chunk) for source, chunk in part.chunks])


def assemble(
    everyone: Sequence[Description],
    records: Sequence[PartRecord],
    *,
    world_size: int,
    save_id: str | None = None,
) -> tuple[bytes, dict[str, int]]:
    """The manifest of a checkpoint whose parts are written, and the sizes of its files.

    Raises:
        MismatchError: the parts do not make whole tensors.
    """
    chunks: dict[str, dict[Box, Chunk]] = defaultdict(dict)
    files: dict[str, DataFile] = {}
    for record in records:
        files.update(record.files)
        for keys, chunk in record.chunks:
            for key in keys:
                chunks[key].setdefault(chunk.box, chunk)
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, Any] = {}
    paths: dict[str, StatePath] = {}
    for description in everyone:
        objects.update(description.objects)
        paths.update(description.paths)
        for key, (dtype, shape, _) in description.tensors.items():
            found = sorted(chunks[key].values(), key=lambda chunk: chunk.box.offsets)
            tensors[key] = TensorEntry(DTYPES[dtype], tuple(shape), tuple(found))
    manifest = Manifest(
        id=save_id or secrets.token_hex(8),
        saved_at_ns=time.time_ns(),
        world_size=world_size,
        files=files,
        tensors=tensors,
        objects=objects,
        paths=paths,
    )
    data = _manifest.to_bytes(manifest)
    try:
        _manifest.from_bytes(data, "what the ranks hold")
    except CorruptionError as error:
        raise MismatchError(f"the ranks together do not hold whole tensors: {error}") from error
    return data, {name: file.size_bytes for name, file in files.items()}

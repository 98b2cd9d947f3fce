"""A rank's part of a checkpoint in memory: a segment that is a safetensors file of ours, and a
record of what lies in it. The records of all ranks make the manifest. Imports no torch.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from torchrelay import _native
from torchrelay.checkpoint._tasks import divided, no_collection
from torchrelay.checkpoint._types import BLOCK_BYTES, DataFile, Sizes
from torchrelay.checkpoint.engine._output import ChunkRecord
from torchrelay.checkpoint.engine._written import Written, assemble
from torchrelay.checkpoint.format._manifest import Head, chunk_text
from torchrelay.checkpoint.format._safetensors import ALIGNMENT, lay_out, unique
from torchrelay.checkpoint.plan._plan import Description, Plan, StateLayout
from torchrelay.errors import CorruptionError, TorchRelayError

__all__ = ["FileLayout", "PartInfo", "check_part", "file_name", "manifest_of"]


class PartInfo(NamedTuple):
    """Which of the ``world_size`` parts of a checkpoint, and which checkpoint."""

    save_id: str
    step: int
    saved_at_ns: int
    world_size: int
    part: int
    rank: int
    size_bytes: int

    @property
    def key(self) -> tuple[str, int]:
        return self.save_id, self.part


def file_name(rank: int) -> str:
    """Return the name of a rank's file, the same as that of its first file on the disk."""
    return f"data-{rank:05d}-00000.safetensors"


class FileLayout(NamedTuple):
    """Where the chunks of a plan lie in the file; those of ``plan`` are in its order."""

    plan: Plan
    names: Sequence[str]
    header: bytes
    size_bytes: int

    @classmethod
    def of(cls, plan: Plan) -> FileLayout:
        # What needs padding comes last.
        chunks = sorted(plan.chunks, key=lambda chunk: chunk.size_bytes % ALIGNMENT != 0)
        names = unique([chunk.name for chunk in chunks])
        described = ((one.dtype, one.box.sizes, one.size_bytes) for one in chunks)
        header, starts, ends = lay_out(dict(zip(names, described, strict=True)))
        sizes = np.array([chunk.size_bytes for chunk in chunks], np.uint64)
        arranged = Plan(chunks, sizes, starts.astype(np.uint64), plan.layouts)
        return cls(arranged, names, header, int(ends.max(initial=len(header))))

    @no_collection()
    def written(self, rank: int, fd: int | None = None) -> Written:
        """Return what the manifest has of the file, with the checksums of the bytes at ``fd``.

        Raises:
            CorruptionError: the file is too short.
        """
        chunks, sizes, starts, _ = vars(self.plan).values()
        index, offsets, pieces = divided(sizes, BLOCK_BYTES)
        checksums, name = b"", file_name(rank)
        places = np.zeros(len(chunks) + 1, np.intp)
        if fd is not None:
            checksums = _checksums(fd, starts[index] + offsets, pieces)
            places[1:] = 4 * np.cumsum(np.bincount(index, minlength=len(chunks)))
        columns = (chunks, self.names, starts.tolist(), pairwise(places.tolist()))
        records = [
            ChunkRecord(
                chunk.keys,
                chunk.box,
                chunk_text(chunk.box, name, within, start, checksums[place:end], chunk.size_bytes),
            )
            for chunk, within, start, (place, end) in zip(*columns, strict=True)
        ]
        header = self.header
        file = DataFile(self.size_bytes, len(header), _native.crc32c(header))
        return Written({name: file}, records)

    def record(self, rank: int, fd: int, objects: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the record of the part whose bytes are at ``fd``. On the coordinator it has also
        what describes all ranks, or one if they are equal; ``objects`` are their values.
        """
        layouts = zip(self.plan.layouts, objects, strict=False)
        descriptions = [(layout.tensors, layout.paths, values) for layout, values in layouts]
        return json.dumps({**vars(self.written(rank, fd)), "descriptions": descriptions}).encode()


def _checksums(fd: int, starts: Sizes, sizes: Sizes) -> bytes:
    if not len(starts):
        return b""
    found, end = _native.crc32c_of_file(fd, starts, sizes)
    if end < starts[-1] + sizes[-1]:
        raise CorruptionError(f"a checkpoint in memory ends at byte {end}, before it should")
    return found


def check_part(record: bytes, fd: int) -> None:
    """Compare the bytes at ``fd`` with the checksums in a record.

    Raises:
        CorruptionError: they differ.
    """
    part = json.loads(record)
    chunks = [json.loads(text) for *_, text in part["chunks"]]
    (file,) = (DataFile(*one) for one in part["files"].values())
    spans = np.array([(0, file.header_bytes), *(one["bytes"] for one in chunks)], np.uint64)
    starts = spans[1:, 0]
    index, offsets, sizes = divided(spans[1:, 1] - starts, BLOCK_BYTES)
    found = _checksums(fd, starts[index] + offsets, sizes)
    expected = b"".join(binascii.a2b_base64(one["crc32c"]) for one in chunks)
    header = _checksums(fd, spans[:1, 0], spans[:1, 1])  # one, however long it is
    if found != expected or header != file.header_crc32c.to_bytes(4, "little"):
        raise CorruptionError("a part of a checkpoint in memory was damaged while it was copied")


def manifest_of(records: Sequence[bytes], head: Head) -> bytes:
    """Return the manifest of a checkpoint, from the records of all its parts in their order.

    Raises:
        CorruptionError: they do not make one, such as those of a save that has failed.
    """
    try:
        parts = [json.loads(record) for record in records]
        descriptions = [
            Description(StateLayout(tensors, paths), objects)
            for tensors, paths, objects in parts[0]["descriptions"]
        ]
        return assemble(descriptions, [*map(Written.from_json, parts)], head)[0]
    except (ValueError, LookupError, TypeError, TorchRelayError) as error:
        raise CorruptionError(
            f"{head.name}: the records in memory do not make a checkpoint ({error})"
        ) from error

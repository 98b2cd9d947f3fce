"""A data file that a save writes: where each chunk goes, and the tasks that write it. Imports no
torch.

Tensors that need no padding come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from torchrelay import _native
from torchrelay._boxes import Box
from torchrelay.checkpoint._tasks import memory_at
from torchrelay.checkpoint._types import BLOCK_BYTES, DataFile
from torchrelay.checkpoint.format._manifest import chunk_text
from torchrelay.checkpoint.format._safetensors import ALIGNMENT, lay_out, unique
from torchrelay.checkpoint.plan._plan import Exports, PlannedChunk
from torchrelay.checkpoint.storage._contract import Sink

__all__ = ["ChunkRecord", "Data", "OutputFile", "Progress", "Task", "grouped"]

_PIECE_BYTES = 16 << 20  # of a chunk, written by one call; a multiple of BLOCK_BYTES
# Neighbours of together less than this, at most a block, are written from a copy that is still in
# the cache.
_PACK_BYTES = 1 << 20
Progress = Callable[[int], None]
Task = Callable[[], None]
# The bytes of a chunk: their address, or a function that returns a copy of them when it is needed.
Data = int | Callable[[], memoryview]
T = TypeVar("T")


class ChunkRecord(NamedTuple):
    """A chunk that was written: the keys that share it, its place, and its entry in the
    manifest.
    """

    keys: tuple[str, ...]
    box: Box
    text: str


class OutputFile:
    """One data file: its layout, and the tasks that write it."""

    def __init__(
        self,
        name: str,
        sink: Sink,
        chunks: Sequence[tuple[PlannedChunk, Data]],
        checksum: bool,
        progress: Progress,
        exports: Exports | None = None,
    ) -> None:
        """Lay a file out. ``exports`` is given for one that is for other readers."""
        self.name = name
        self.sink = sink
        self._progress = progress
        # What needs padding comes last; where there is none, dtypes keep what follows aligned.
        if exports is None:
            chunks = sorted(chunks, key=lambda one: one[0].size_bytes % ALIGNMENT != 0)
        else:
            chunks = sorted(chunks, key=lambda one: -one[0].dtype.itemsize)
        self._chunks = [chunk for chunk, _ in chunks]
        self._data = [data for _, data in chunks]
        self._checksum = checksum
        names = [None if exports is None else exports.name_of(chunk) for chunk in self._chunks]
        pairs = zip(names, self._chunks, strict=True)
        self.names = unique([chunk.name if name is None else name for name, chunk in pairs])
        described = ((one.dtype, one.box.sizes, one.size_bytes) for one in self._chunks)
        self._header, self._starts, self._ends = lay_out(
            dict(zip(self.names, described, strict=True)), ALIGNMENT if exports is None else 1
        )
        size_bytes = int(self._ends.max(initial=len(self._header)))
        self.file = DataFile(size_bytes, len(self._header), _native.crc32c(self._header))
        # Of each chunk, the first byte of its checksums, 4 bytes for a block.
        blocks = (-(-chunk.size_bytes // BLOCK_BYTES) for chunk in self._chunks)
        self._places = [*accumulate((4 * count for count in blocks), initial=0)]
        self._checksums = bytearray(self._places[-1])

    def tasks(self) -> Iterator[Task]:
        """Yield what writes the file, in its order: small chunks together, large ones in pieces."""
        self.sink.write(0, memoryview(self._header))
        sizes = [chunk.size_bytes for chunk in self._chunks]
        for group in grouped(range(len(sizes)), sizes, _PACK_BYTES):
            if len(group) > 1:
                yield partial(self._write_together, group)
                continue
            # What is copied is not divided, so that it is copied only once.
            size = sizes[group[0]]
            step = _PIECE_BYTES if isinstance(self._data[group[0]], int) else size
            for begin in range(0, size, step):
                yield partial(self._write_piece, group[0], begin, min(begin + step, size))

    def _write_together(self, indices: list[int]) -> None:
        """Write small chunks that follow one another, from a copy of them."""
        data = [self._data[index] for index in indices]
        sizes = np.array([self._chunks[index].size_bytes for index in indices], np.uint64)
        copies = [one if isinstance(one, int) else np.frombuffer(one(), "u1") for one in data]
        sources = [one if isinstance(one, int) else one.ctypes.data for one in copies]
        first = self._starts[indices[0]]
        packed = np.zeros(self._ends[indices[-1]] - first, np.uint8)
        targets = (packed.ctypes.data + self._starts[indices] - first).astype(np.uint64)
        _native.copy_memory(targets, np.array(sources, np.uint64), sizes)
        if self._checksum:
            found = _native.crc32c_of_memory(targets, sizes)
            self._set_checksums(self._places[indices[0]], found)
        self.sink.write(int(first), memoryview(packed.data))
        self._progress(int(sizes.sum()))

    def _write_piece(self, index: int, first: int, end: int) -> None:
        data, start = self._data[index], int(self._starts[index])
        view = memory_at(data + first, end - first) if isinstance(data, int) else data()
        if self._checksum:
            found = _native.crc32c_blocks(view, BLOCK_BYTES)
            self._set_checksums(self._places[index] + first // BLOCK_BYTES * 4, found)
        self.sink.write(start + first, view.cast("B"))
        self._progress(end - first)

    def _set_checksums(self, place: int, found: bytes) -> None:
        self._checksums[place : place + len(found)] = found

    def records(self) -> Iterator[ChunkRecord]:
        """Return the record of each chunk, once the file is written."""
        places = self._places if self._checksum else [0] * len(self._places)
        columns = (self._chunks, self.names, self._starts.tolist(), pairwise(places))
        for chunk, name, start, (place, end) in zip(*columns, strict=True):
            found = self._checksums[place:end]
            text = chunk_text(chunk.box, self.name, name, start, found, chunk.size_bytes)
            yield ChunkRecord(chunk.keys, chunk.box, text)


def grouped(items: Iterable[T], sizes: Iterable[int], limit_bytes: int) -> list[list[T]]:
    """Return groups of consecutive items of at most ``limit_bytes``, or of one that is larger."""
    groups: list[list[T]] = []
    total = limit_bytes
    for item, size_bytes in zip(items, sizes, strict=True):
        total += size_bytes
        if not groups or total > limit_bytes:
            groups.append([])
            total = size_bytes
        groups[-1].append(item)
    return groups

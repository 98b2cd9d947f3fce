"""Writing of a rank's data files: layout, checksums and writes in threads. Imports no torch.

A data file is a plain safetensors file whose tensors begin at multiples of 64 bytes. safetensors
allows no gaps between tensors, so padding is a tensor of bytes itself, named ``__padding__``, a dot
and a number, and the file's metadata name its writer. Big tensors come first; few of them leave a
remainder.

The same code runs in the trainer (a synchronous save) and in the writer process (an asynchronous
one).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from torchrelay import _native
from torchrelay._progress import no_progress
from torchrelay.checkpoint._catalog import Keep
from torchrelay.checkpoint._manifest import chunk_text, quoted
from torchrelay.checkpoint._storage import Sink, Transaction
from torchrelay.checkpoint._tasks import memory_at, no_collection, run_tasks, usable_threads
from torchrelay.checkpoint._types import (
    BLOCK_BYTES,
    PADDING,
    Box,
    DataFile,
    Dtype,
    check_count,
)

__all__ = [
    "MAX_STAGING_BYTES",
    "ChunkRecord",
    "Data",
    "Part",
    "PlannedChunk",
    "SaveOptions",
    "grouped",
    "write_part",
]

_ALIGNMENT = 64
_PIECE_BYTES = 16 << 20  # of a chunk, written by one call; a multiple of BLOCK_BYTES
# Chunks up to this size, less than a block, are written together with their neighbours, from a copy
# that is still in the cache.
_SMALL_BYTES = 128 << 10
_PACK_BYTES = 1 << 20
MAX_STAGING_BYTES = 1 << 30
Progress = Callable[[int], None]
Task = Callable[[], None]
# The bytes of a chunk: their address, or a function that returns a copy of them when it is needed.
Data = int | Callable[[], memoryview]
T = TypeVar("T")


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


class ChunkRecord(NamedTuple):
    """A chunk that was written: the keys that share it, its place, and its entry in the
    manifest.
    """

    keys: tuple[str, ...]
    box: Box
    text: str


@dataclass
class Part:
    """What one rank has written, for the coordinator. With DCP's planner also its encoded values by
    key.
    """

    files: dict[str, DataFile] = field(default_factory=dict)
    chunks: list[ChunkRecord] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SaveOptions:
    """Arguments of every way to save; see :func:`torchrelay.checkpoint.save`.

    Raises:
        ArgumentError: one is out of range.
    """

    threads: int | None = None
    fsync: bool = True
    checksum: bool = True
    keep: int | Keep | None = None
    max_staging_bytes: int | None = MAX_STAGING_BYTES

    def __post_init__(self) -> None:
        check_count("threads", self.threads)
        check_count("max_staging_bytes", self.max_staging_bytes)


def write_part(
    transaction: Transaction,
    rank: int,
    chunks: Sequence[PlannedChunk],
    data: Sequence[Data],
    options: SaveOptions,
    progress: Progress = no_progress,
) -> Part:
    """Write ``chunks``, each with its ``data``, into new files. Returns when they are durable.

    ``progress`` is called with bytes written since the last call, from several threads.

    Raises:
        StorageError: a file cannot be written.
    """
    copied = (
        chunk.size_bytes
        for chunk, source in zip(chunks, data, strict=True)
        if not isinstance(source, int)
    )
    # Each thread copies one chunk at a time.
    copies = (options.max_staging_bytes or MAX_STAGING_BYTES) // max(copied, default=1)
    threads = min(usable_threads(options.threads), max(1, copies))
    with no_collection():
        sizes = (chunk.size_bytes for chunk in chunks)
        groups = grouped(zip(chunks, data, strict=True), sizes, transaction.max_file_bytes)
        names = [f"data-{rank:05d}-{number:05d}.safetensors" for number in range(len(groups))]
        writers = [
            _FileWriter(transaction, name, group, options.checksum)
            for name, group in zip(names, groups, strict=True)
        ]
    try:
        run_tasks([task for writer in writers for task in writer.start(progress)], threads)
        run_tasks([writer.finish for writer in writers], threads)
    except BaseException:
        for writer in writers:
            writer.abort()
        raise
    files = {writer.name: writer.file for writer in writers}
    with no_collection():
        return Part(files, [record for writer in writers for record in writer.records()])


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


@dataclass(frozen=True)
class _Layout:
    """The layout of a file: ``header`` is its first bytes, ``order`` the tensors in the order of
    the file, ``starts`` the offset of each tensor, and ``ends`` that of what follows it and its
    padding.
    """

    header: bytes
    order: NDArray[np.intp]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @property
    def size_bytes(self) -> int:
        return int(self.ends.max(initial=len(self.header)))


def _lay_out(names: Sequence[str], chunks: Sequence[PlannedChunk]) -> _Layout:
    """Return the layout of a file with these chunks, whose names in it must differ."""
    sizes = np.array([chunk.size_bytes for chunk in chunks], np.int64)
    order = np.argsort(sizes % _ALIGNMENT != 0, kind="stable")
    sizes = sizes[order]
    rounded = -(-sizes // _ALIGNMENT) * _ALIGNMENT
    rounded[-1:] = sizes[-1:]
    ends = np.cumsum(rounded)
    entries = ['"__metadata__":{"format":"pt","writer":"torchrelay"}']
    columns = (order.tolist(), (ends - rounded).tolist(), sizes.tolist(), ends.tolist())
    for place, (i, start, size, end) in enumerate(zip(*columns, strict=True)):
        dtype, sides = chunks[i].dtype, chunks[i].box.sizes
        shape = [*sides, dtype.width] if dtype.width > 1 else [*sides]
        entries.append(
            f'{quoted(names[i])}:{{"dtype":"{dtype.code}","shape":{shape},'
            f'"data_offsets":[{start},{start + size}]}}'
        )
        if start + size < end:
            entries.append(
                f'"{PADDING}.{place}":{{"dtype":"U8","shape":[{end - start - size}],'
                f'"data_offsets":[{start + size},{end}]}}'
            )
    text = f"{{{','.join(entries)}}}".encode()
    text = text.ljust(-(-(len(text) + 8) // _ALIGNMENT) * _ALIGNMENT - 8)
    header = struct.pack("<Q", len(text)) + text
    starts, after = np.empty_like(ends), np.empty_like(ends)
    starts[order], after[order] = len(header) + ends - rounded, len(header) + ends
    return _Layout(header, order, starts, after)


class _FileWriter:
    """One data file: its layout, and the tasks that write it."""

    def __init__(
        self,
        transaction: Transaction,
        name: str,
        chunks: Sequence[tuple[PlannedChunk, Data]],
        checksum: bool,
    ) -> None:
        self.name = name
        self._transaction = transaction
        self._chunks = [chunk for chunk, _ in chunks]
        self._data = [data for _, data in chunks]
        self._checksum = checksum
        self._names = _unique([chunk.name for chunk in self._chunks])
        self._layout = _lay_out(self._names, self._chunks)
        header = self._layout.header
        self.file = DataFile(self._layout.size_bytes, len(header), _native.crc32c(header))
        self._checksums: dict[int, bytes | bytearray] = {}
        self._sink: Sink | None = None

    def start(self, progress: Progress) -> list[Task]:
        """Return what writes the file; all of it must be done before :meth:`finish`."""
        tasks = self._tasks(progress)
        return [partial(_run_in_order, tasks)] if self._transaction.sequential else [*tasks]

    def _tasks(self, progress: Progress) -> Iterator[Task]:
        """Create the file and yield what writes it, in its order: small chunks together, large ones
        in pieces.
        """
        self._sink = self._transaction.create(self.name)
        self._sink.write(0, memoryview(self._layout.header))
        together: list[int] = []
        first = 0  # byte of the file at which they begin
        for index in self._layout.order.tolist():
            size = self._chunks[index].size_bytes
            is_small = size <= _SMALL_BYTES
            end = int(self._layout.ends[index])
            if together and (not is_small or end - first > _PACK_BYTES):
                yield partial(self._write_together, together, progress)
                together = []
            if is_small:
                first = first if together else int(self._layout.starts[index])
                together.append(index)
                continue
            # What is copied is not divided, so that it is copied only once.
            step = _PIECE_BYTES if isinstance(self._data[index], int) else size
            self._checksums[index] = bytearray(4 * -(-size // BLOCK_BYTES))
            for begin in range(0, size, step):
                end = min(begin + step, size)
                yield partial(self._write_piece, index, begin, end, progress)
        if together:
            yield partial(self._write_together, together, progress)

    def _write_together(self, indices: list[int], progress: Progress) -> None:
        """Write small chunks that follow one another, from a copy of them."""
        data = [self._data[index] for index in indices]
        sizes = np.array([self._chunks[index].size_bytes for index in indices], np.uint64)
        copies = [one if isinstance(one, int) else np.frombuffer(one(), "u1") for one in data]
        sources = [one if isinstance(one, int) else one.ctypes.data for one in copies]
        first = self._layout.starts[indices[0]]
        packed = np.zeros(self._layout.ends[indices[-1]] - first, np.uint8)
        targets = (packed.ctypes.data + self._layout.starts[indices] - first).astype(np.uint64)
        _native.copy_memory(targets, np.array(sources, np.uint64), sizes)
        if self._checksum:
            found = _native.crc32c_of_memory(targets, sizes)
            for place, index in enumerate(indices):
                self._checksums[index] = found[4 * place : 4 * place + 4]
        assert self._sink is not None
        self._sink.write(int(first), memoryview(packed.data))
        progress(int(sizes.sum()))

    def _write_piece(self, index: int, first: int, end: int, progress: Progress) -> None:
        data, start = self._data[index], int(self._layout.starts[index])
        view = memory_at(data + first, end - first) if isinstance(data, int) else data()
        if self._checksum:
            found = _native.crc32c_blocks(view, BLOCK_BYTES)
            place = first // BLOCK_BYTES * 4
            self._checksums[index][place : place + len(found)] = found  # type: ignore[index]
        assert self._sink is not None
        self._sink.write(start + first, view.cast("B"))
        progress(end - first)

    def finish(self) -> None:
        """Wait until the file is durable."""
        if self._sink is not None:
            self._sink.close()

    def abort(self) -> None:
        if self._sink is not None:
            self._sink.abort()

    def records(self) -> Iterator[ChunkRecord]:
        """Return the record of each chunk, once the file is written."""
        starts = self._layout.starts.tolist()
        for index, (chunk, name, start) in enumerate(
            zip(self._chunks, self._names, starts, strict=True)
        ):
            found = self._checksums[index] if self._checksum else b""
            text = chunk_text(chunk.box, self.name, name, start, found, chunk.size_bytes)
            yield ChunkRecord(chunk.keys, chunk.box, text)


def _run_in_order(tasks: Iterable[Task]) -> None:
    for task in tasks:
        task()


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names, changed where they are reserved or repeated."""
    used: set[str] = set()
    found = []
    for name in names:
        free = f"_{name}" if name.startswith(("__metadata__", PADDING)) else name
        while free in used:
            free += "'"
        used.add(free)
        found.append(free)
    return found

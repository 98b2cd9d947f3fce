"""Writing of a rank's data files: layout, checksums and writes in threads. Imports no torch.

The same code runs in the trainer (a synchronous save) and in the writer process (an asynchronous
one). Sources that follow one another in a file are written together, as one batch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torchrelay import _native
from torchrelay.checkpoint._data_file import ALIGNMENT, PADDING, Wanted, lay_out
from torchrelay.checkpoint._manifest import chunk_text
from torchrelay.checkpoint._plan import no_collection
from torchrelay.checkpoint._storage import Sink, Transaction
from torchrelay.checkpoint._types import BLOCK_BYTES, Box, DataFile, Dtype

__all__ = [
    "MAX_STAGING_BYTES",
    "ChunkRecord",
    "Part",
    "Source",
    "default_threads",
    "grouped",
    "write_part",
]

_BATCH_BYTES = 16 << 20  # written by one call; a multiple of BLOCK_BYTES
_BATCH_PIECES = 1000  # of one call; Linux takes 1,024 with their paddings
MAX_STAGING_BYTES = 1 << 30
_ZEROS = memoryview(bytes(ALIGNMENT))
Progress = Callable[[int], None]
T = TypeVar("T")


class Source(NamedTuple):
    """A chunk to write. ``data`` returns its bytes when they are needed, as a copy if ``copies``.

    ``keys`` has more than one name if tied tensors share the chunk. ``tensor`` is the tensor it
    comes from, where there is one in this process.
    """

    keys: tuple[str, ...]
    dtype: Dtype
    shape: tuple[int, ...]
    box: Box
    size_bytes: int
    data: Callable[[], memoryview]
    copies: bool = False
    tensor: Any = None

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
    key, and the id of the save that it has seen.
    """

    files: dict[str, DataFile] = field(default_factory=dict)
    chunks: list[ChunkRecord] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    seen_id: str = ""


def default_threads() -> int:
    """Return the number of cores that this process may use, at most 4: more do not help a disk."""
    return min(4, len(os.sched_getaffinity(0)))


def write_part(
    transaction: Transaction,
    rank: int,
    sources: Sequence[Source],
    *,
    threads: int,
    checksum: bool,
    max_staging_bytes: int = MAX_STAGING_BYTES,
    progress: Progress | None = None,
) -> Part:
    """Write ``sources`` into new files. Returns when they are durable.

    Args:
        threads: how many write at once.
        checksum: whether each block gets its CRC32C.
        max_staging_bytes: memory for the copies that sources make; one larger source is copied
            alone.
        progress: called with bytes written since the last call, from several threads.

    Raises:
        StorageError: a file cannot be written.
    """
    budget = _Budget(max_staging_bytes)
    with no_collection():
        writers = [
            _FileWriter(
                transaction, f"data-{rank:05d}-{number:05d}.safetensors", group, checksum, budget
            )
            for number, group in enumerate(
                grouped(
                    sources, (source.size_bytes for source in sources), transaction.max_file_bytes
                )
            )
        ]
    with ThreadPoolExecutor(threads, "torchrelay-checkpoint") as pool:
        futures: list[Future[None]] = []
        try:
            for writer in writers:
                futures += writer.start(pool, progress)
            for future in futures:
                future.result()
            for finished in [pool.submit(writer.finish) for writer in writers]:
                finished.result()
        except BaseException:
            for future in futures:
                future.cancel()
            wait(futures)
            for writer in writers:
                writer.abort()
            raise
    files = {writer.name: writer.file for writer in writers}
    with no_collection():
        return Part(files, [chunk for writer in writers for chunk in writer.chunks()])


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


class _Budget:
    """A memory budget that threads share: each waits until what it needs is free."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._spent = 0
        self._changed = threading.Condition()

    @contextmanager
    def spent(self, size_bytes: int) -> Iterator[None]:
        size_bytes = min(size_bytes, self._limit)
        with self._changed:
            self._changed.wait_for(lambda: self._spent + size_bytes <= self._limit)
            self._spent += size_bytes
        try:
            yield
        finally:
            with self._changed:
                self._spent -= size_bytes
                self._changed.notify_all()


class _Piece(NamedTuple):
    """The bytes [first, end) of a source, and how many of padding follow them."""

    source: int  # its index
    first: int
    end: int
    padding: int


class _FileWriter:
    """One data file: its layout, and the tasks that write it."""

    def __init__(
        self,
        transaction: Transaction,
        name: str,
        sources: Sequence[Source],
        checksum: bool,
        budget: _Budget,
    ) -> None:
        self.name = name
        self._budget = budget
        self._transaction = transaction
        self._sources = sources
        self._checksum = checksum
        self._names = _unique([source.name for source in sources])
        self._layout = lay_out(
            [
                Wanted(stored, source.dtype, source.box.sizes, source.size_bytes)
                for stored, source in zip(self._names, sources, strict=True)
            ]
        )
        header = self._layout.header
        self.file = DataFile(self._layout.size_bytes, len(header), _native.crc32c(header))
        self._checksums: dict[tuple[int, int], bytes] = {}
        self._sink: Sink | None = None

    def start(self, pool: ThreadPoolExecutor, progress: Progress | None) -> list[Future[None]]:
        """Start writing; every future returned must be done before :meth:`finish`."""
        if self._transaction.sequential:
            return [pool.submit(self._write_in_order, progress)]
        self._create()
        return [pool.submit(self._write, batch, progress) for batch in self._batches()]

    def _create(self) -> None:
        self._sink = self._transaction.create(self.name)
        self._sink.write(0, memoryview(self._layout.header))

    def _write_in_order(self, progress: Progress | None) -> None:
        self._create()
        for batch in self._batches():
            self._write(batch, progress)

    def _batches(self) -> Iterator[list[_Piece]]:
        """Yield the pieces of each batch, in the order of the file."""
        batch: list[_Piece] = []
        size = 0
        for place, index in enumerate(self._layout.order):
            source = self._sources[index]
            # A source that copies itself is not divided, so that it does so only once.
            step = source.size_bytes if source.copies else _BATCH_BYTES
            for first in range(0, source.size_bytes, max(1, step)):
                end = min(first + step, source.size_bytes)
                if batch and (size + end - first > _BATCH_BYTES or 2 * len(batch) >= _BATCH_PIECES):
                    yield batch
                    batch, size = [], 0
                padding = self._layout.paddings[place] if end == source.size_bytes else 0
                batch.append(_Piece(index, first, end, padding))
                size += end - first
        if batch:
            yield batch

    def _write(self, batch: list[_Piece], progress: Progress | None) -> None:
        copied = sum(p.end - p.first for p in batch if self._sources[p.source].copies)
        with self._budget.spent(copied):
            views: list[memoryview] = []
            for index, first, end, padding in batch:
                data = self._sources[index].data()[first:end]
                if self._checksum:
                    self._checksums[index, first] = _native.crc32c_blocks(data, BLOCK_BYTES)
                views.append(data)
                if padding:
                    views.append(_ZEROS[:padding])
            assert self._sink is not None
            self._sink.write(self._layout.starts[batch[0].source] + batch[0].first, *views)
        if progress is not None:
            progress(sum(piece.end - piece.first for piece in batch))

    def finish(self) -> None:
        """Wait until the file is durable."""
        if self._sink is not None:
            self._sink.close()

    def abort(self) -> None:
        if self._sink is not None:
            self._sink.abort()

    def chunks(self) -> Iterator[ChunkRecord]:
        """Return the record of each source, once the file is written."""
        checksums: list[bytes] = [b""] * len(self._sources)
        for (index, _), found in sorted(self._checksums.items()):
            checksums[index] += found
        places = zip(self._sources, self._names, self._layout.starts, checksums, strict=True)
        for source, name, start, found in places:
            text = chunk_text(source.box, self.name, name, start, found, source.size_bytes)
            yield ChunkRecord(source.keys, source.box, text)


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

"""Writes one rank's data files: layout, checksums and writes in threads. Imports no torch.

The same code runs in the trainer (a synchronous save) and in the writer process (an asynchronous
one).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torchrelay import _native
from torchrelay.checkpoint._data_file import PADDING, Layout, Wanted, lay_out
from torchrelay.checkpoint._storage import Sink, Transaction
from torchrelay.checkpoint._types import BLOCK_BYTES, Box, Chunk, DataFile, Dtype

__all__ = ["MAX_STAGING_BYTES", "Part", "Source", "default_threads", "write_part"]

_PIECE_BYTES = 16 << 20  # written by one call; a multiple of BLOCK_BYTES
MAX_STAGING_BYTES = 1 << 30
Progress = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class Source:
    """A chunk to write. ``data`` returns its bytes when they are needed, as a copy if ``copies``.

    ``keys`` has more than one name if tied tensors share the chunk. ``tensor`` is the tensor it
    comes from, where there is one in this process.
    """

    keys: tuple[str, ...]
    dtype: Dtype
    shape: tuple[int, ...]
    box: Box
    data: Callable[[], memoryview]
    copies: bool = False
    tensor: Any = None

    @property
    def size_bytes(self) -> int:
        return self.box.numel * self.dtype.itemsize

    @property
    def name(self) -> str:
        """Return the name of the chunk inside its file."""
        key = self.keys[0]
        if self.box.sizes == self.shape:
            return key
        return f"{key}@{','.join(map(str, self.box.offsets))}"


@dataclass(frozen=True)
class Part:
    """The result of one rank: its files, and the chunk of each source."""

    files: dict[str, DataFile]
    chunks: list[tuple[Source, Chunk]]


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
    files: dict[str, DataFile] = {}
    chunks: list[tuple[Source, Chunk]] = []
    budget = _Budget(max_staging_bytes)
    with ThreadPoolExecutor(threads, "torchrelay-checkpoint") as pool:
        writers = []
        for number, group in enumerate(_grouped(sources, transaction.max_file_bytes)):
            name = f"data-{rank:05d}-{number:05d}.safetensors"
            writer = _FileWriter(transaction, name, group, checksum, budget)
            writers.append((writer, writer.start(pool, progress)))
        try:
            for _, futures in writers:
                _wait(futures)
            for finished in [pool.submit(writer.finish) for writer, _ in writers]:
                finished.result()
        except BaseException:
            for _, futures in writers:
                for future in futures:
                    future.cancel()
            wait([future for _, futures in writers for future in futures])
            for writer, _ in writers:
                writer.abort()
            raise
    for writer, _ in writers:
        files[writer.name] = writer.file
        chunks += writer.chunks
    return Part(files, chunks)


def _wait(futures: Sequence[Future[None]]) -> None:
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()


def _grouped(sources: Sequence[Source], limit_bytes: int) -> Iterator[list[Source]]:
    """Yield groups of consecutive sources of at most ``limit_bytes``, or of one that is larger."""
    group: list[Source] = []
    size = 0
    for source in sources:
        if group and size + source.size_bytes > limit_bytes:
            yield group
            group, size = [], 0
        group.append(source)
        size += source.size_bytes
    if group:
        yield group


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
        names = _unique([source.name for source in sources])
        wanted = [
            Wanted(stored, source.dtype, source.box.sizes)
            for stored, source in zip(names, sources, strict=True)
        ]
        self._layout: Layout = lay_out(wanted)
        self.file = DataFile(
            self._layout.size_bytes, len(self._layout.header), _native.crc32c(self._layout.header)
        )
        self._names = names
        self._checksums: list[dict[int, bytes]] = [{} for _ in sources]
        self._sink: Sink | None = None

    def start(self, pool: ThreadPoolExecutor, progress: Progress | None) -> list[Future[None]]:
        """Start writing; every future returned must be done before :meth:`finish`."""
        if self._transaction.sequential:
            return [pool.submit(self._write_in_order, progress)]
        self._sink = self._transaction.create(self.name)
        self._sink.write(0, memoryview(self._layout.header))
        for start, length in self._layout.paddings:
            self._sink.write(start, memoryview(bytes(length)))
        return [
            pool.submit(self._write_source, index, pieces, progress)
            for index, source in enumerate(self._sources)
            for pieces in (
                [_pieces(source)] if source.copies else [[first] for first in _pieces(source)]
            )
        ]

    def _write_source(self, index: int, pieces: Sequence[int], progress: Progress | None) -> None:
        source = self._sources[index]
        with self._budget.spent(source.size_bytes if source.copies else 0):
            data = source.data()
            for first in pieces:
                self._write_piece(index, data, first, progress)

    def _write_piece(
        self, index: int, data: memoryview, first: int, progress: Progress | None
    ) -> None:
        piece = data[first : first + _PIECE_BYTES]
        if self._checksum:
            self._checksums[index][first] = _native.crc32c_blocks(piece, BLOCK_BYTES)
        assert self._sink is not None
        self._sink.write(self._layout.starts[index] + first, piece)
        if progress is not None:
            progress(len(piece))

    def _write_in_order(self, progress: Progress | None) -> None:
        self._sink = self._transaction.create(self.name)
        self._sink.write(0, memoryview(self._layout.header))
        paddings = dict(self._layout.paddings)
        for index in sorted(range(len(self._sources)), key=self._layout.starts.__getitem__):
            source = self._sources[index]
            self._write_source(index, _pieces(source), progress)
            end = self._layout.starts[index] + source.size_bytes
            if source.size_bytes and end in paddings:
                self._sink.write(end, memoryview(bytes(paddings.pop(end))))

    def finish(self) -> None:
        """Wait until the file is durable."""
        if self._sink is not None:
            self._sink.close()

    def abort(self) -> None:
        if self._sink is not None:
            self._sink.abort()

    @property
    def chunks(self) -> list[tuple[Source, Chunk]]:
        return [
            (
                source,
                Chunk(
                    source.box,
                    self.name,
                    name,
                    start,
                    b"".join(checksums[first] for first in sorted(checksums)),
                ),
            )
            for source, name, start, checksums in zip(
                self._sources, self._names, self._layout.starts, self._checksums, strict=True
            )
        ]


def _pieces(source: Source) -> range:
    return range(0, source.size_bytes, _PIECE_BYTES)


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

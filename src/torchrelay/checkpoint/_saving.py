"""What every way to save does: write this rank's part, and on the coordinator assemble the manifest
from all parts, commit, and remove old checkpoints. Imports no torch.

The same code runs in the trainer (a synchronous save) and in the writer process (an asynchronous
one). In a data file, tensors that need no padding come first.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from torchrelay import _native
from torchrelay._progress import no_progress
from torchrelay.checkpoint import _manifest
from torchrelay.checkpoint._catalog import (
    Keep,
    check_keep,
    commit_time_ns,
    open_folder,
    open_transaction,
    retain,
)
from torchrelay.checkpoint._manifest import Head
from torchrelay.checkpoint._safetensors import ALIGNMENT, aligned, lay_out, unique
from torchrelay.checkpoint._storage import Path, Sink, split
from torchrelay.checkpoint._tasks import memory_at, no_collection, run_tasks, usable_threads
from torchrelay.checkpoint._types import (
    BLOCK_BYTES,
    MAX_HEADER_BYTES,
    Box,
    DataFile,
    Dtype,
    Sizes,
    StatePath,
    TensorDescription,
    check_count,
    tiling_fault,
)
from torchrelay.errors import ArgumentError, MismatchError, StorageError, TorchRelayError, to_json

__all__ = [
    "MAX_STAGING_BYTES",
    "ChunkRecord",
    "Data",
    "Description",
    "Part",
    "Plan",
    "PlannedChunk",
    "SaveOptions",
    "Saving",
    "StateLayout",
    "assemble",
    "described",
    "grouped",
]

_NAMES_RANK = re.compile(r"rank \d+: ")
_MAX_FILE_CHUNKS = 1 << 17  # so that readers take the header of a file
_PIECE_BYTES = 16 << 20  # of a chunk, written by one call; a multiple of BLOCK_BYTES
# Neighbours of together less than this, at most a block, are written from a copy that is still in
# the cache.
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
    memory; on the coordinator also the descriptions of all ranks.
    """

    chunks: Sequence[PlannedChunk]
    sizes: Sizes
    starts: Sizes
    everyone: Sequence[Description]

    @classmethod
    def of(cls, chunks: Sequence[PlannedChunk], everyone: Sequence[Description]) -> Plan:
        sizes = np.array([chunk.size_bytes for chunk in chunks], np.int64)
        return cls(chunks, sizes.astype(np.uint64), aligned(sizes).astype(np.uint64), everyone)


class Saving:
    """One save, as a rank takes part in it.

    Raises:
        ArgumentError: ``path`` cannot be the path of a checkpoint, or not of one with ``keep=``.
    """

    def __init__(self, path: Path, options: SaveOptions) -> None:
        self._options = options
        self._keep = check_keep(options.keep, path)
        self.transaction = open_transaction(path, fsync=options.fsync)
        self.path = self.transaction.location

    def check_shared(self, save_id: str) -> None:
        """Check that this rank finds the coordinator's save at its path.

        Raises:
            StorageError: it does not.
        """
        if not self.transaction.is_marked(save_id):
            raise StorageError(
                errno.ENOENT,
                f"this rank saves to {self.path}, but does not find the coordinator's save there: "
                "all ranks must save to the same path, on storage that they share",
            )

    def is_committed(self, save_id: str) -> bool | None:
        """Return whether the save was committed; None while the coordinator has not ended it, and
        lives, as far as can be seen.
        """
        is_marked = self.transaction.is_marked(save_id)  # asked first: removed after a commit
        is_committed = _manifest.is_of(partial(open_folder, self.path), save_id)
        return None if is_marked and not is_committed else is_committed

    def write(
        self,
        rank: int,
        chunks: Sequence[PlannedChunk],
        data: Sequence[Data],
        progress: Progress = no_progress,
    ) -> Part:
        """Write this rank's part, chunks and the data of each, to new files. Blocks until they are
        durable.

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
        copies = (self._options.max_staging_bytes or MAX_STAGING_BYTES) // max(copied, default=1)
        threads = min(usable_threads(self._options.threads), max(1, copies))
        writers: list[_FileWriter] = []
        try:
            with no_collection():
                limit_bytes = self.transaction.max_file_bytes
                least = limit_bytes // _MAX_FILE_CHUNKS
                sizes = (max(chunk.size_bytes, least) for chunk in chunks)
                pairs = zip(chunks, data, strict=True)
                for group in grouped(pairs, sizes, limit_bytes):
                    name = f"data-{rank:05d}-{len(writers):05d}.safetensors"
                    sink = self.transaction.create(name)
                    writers.append(_FileWriter(name, sink, group, self._options.checksum, progress))
            if self.transaction.sequential:
                # Until it is closed, an upload has its last part in memory.
                uploads = [chain(writer.tasks(), [writer.sink.close]) for writer in writers]
                run_tasks([partial(_run_in_order, tasks) for tasks in uploads], threads)
            else:
                run_tasks([task for writer in writers for task in writer.tasks()], threads)
                run_tasks([writer.sink.close for writer in writers], threads)
        except BaseException:
            for writer in writers:
                writer.sink.abort()
            raise
        files = {writer.name: writer.file for writer in writers}
        with no_collection():
            return Part(files, [record for writer in writers for record in writer.records()])

    def commit(self, everyone: Sequence[Description], parts: Sequence[Part]) -> None:
        """Commit the checkpoint, and remove what ``keep=`` does not keep. Coordinator only.
        Arguments as for :func:`assemble`.

        Raises:
            ArgumentError, MismatchError: as for :func:`assemble`.
            StorageError: it cannot be committed, or an older one not removed.
        """
        parent, name = split(self.path)
        head = Head(commit_time_ns(parent), self.transaction.save_id, name)
        self.transaction.commit(*assemble(everyone, parts, head))
        if self._keep is not None:
            retain(self.path, self._keep)


@no_collection()
def assemble(
    everyone: Sequence[Description], parts: Sequence[Part], head: Head
) -> tuple[bytes, dict[str, int]]:
    """Return the manifest of a checkpoint whose parts are written, and the sizes of its files.

    Args:
        everyone: the descriptions of the ranks; one description if it is the same for all.
        parts: what all ranks have written.
        head: what the first line of the manifest says.

    Raises:
        ArgumentError: no reader would take it: a tensor has too many dimensions, or a header or the
            manifest is too long.
        MismatchError: the parts do not make whole tensors.
    """
    chunks: dict[str, dict[Box, str]] = defaultdict(dict)
    files: dict[str, DataFile] = {}
    for part in parts:
        files.update(part.files)
        for keys, box, text in part.chunks:
            for key in keys:
                chunks[key].setdefault(box, text)
    tensors: dict[str, str] = {}
    objects: dict[str, Any] = {}
    paths: dict[str, StatePath] = {}
    for part in parts:
        objects.update(part.objects)
    for description in everyone:
        objects.update(description.objects)
        paths.update(description.layout.paths)
        for key, (dtype, shape, *_) in description.layout.tensors.items():
            if key not in tensors:
                if len(shape) > _manifest.MAX_DIMS:
                    raise ArgumentError(
                        f"{key}: a checkpoint holds tensors of at most {_manifest.MAX_DIMS} "
                        f"dimensions, and this one has {len(shape)}; reshape it"
                    )
                found = sorted(chunks[key].items())
                fault = tiling_fault(shape, [box for box, _ in found])
                if fault:
                    raise MismatchError(
                        f"the ranks together do not hold the whole tensor {key!r} of shape "
                        f"{list(shape)}: {fault}"
                    )
                tensors[key] = _manifest.tensor_text(dtype, shape, [text for _, text in found])
    data = _manifest.to_bytes(
        head,
        world_size=len(parts),
        files=files,
        tensors=tensors,
        objects=objects,
        paths=paths,
    )
    header_bytes = max((file.header_bytes for file in files.values()), default=0)
    for what, size_bytes, limit_bytes in (
        ("the manifest", len(data), _manifest.MAX_MANIFEST_BYTES),
        ("the header of a data file", header_bytes, MAX_HEADER_BYTES),
    ):
        if size_bytes > limit_bytes:
            raise ArgumentError(
                f"{head.name}: {what} would have {size_bytes} bytes, more than the {limit_bytes} "
                "that readers take; save fewer tensors and values, or shorten their keys"
            )
    return data, {name: file.size_bytes for name, file in files.items()}


def described(error: Exception, rank: int) -> dict[str, Any]:
    """Return an error as JSON values, with a message that names the rank it happened on."""
    found = to_json(error)
    if not _NAMES_RANK.match(found["message"]):
        found["message"] = f"rank {rank}: {found['message']}"
    if not isinstance(error, TorchRelayError):
        found["ranks"] = [rank]
    return found


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


class _FileWriter:
    """One data file: its layout, and the tasks that write it."""

    def __init__(
        self,
        name: str,
        sink: Sink,
        chunks: Sequence[tuple[PlannedChunk, Data]],
        checksum: bool,
        progress: Progress,
    ) -> None:
        self.name = name
        self.sink = sink
        self._progress = progress
        # What needs padding comes last.
        chunks = sorted(chunks, key=lambda one: one[0].size_bytes % ALIGNMENT != 0)
        self._chunks = [chunk for chunk, _ in chunks]
        self._data = [data for _, data in chunks]
        self._checksum = checksum
        self._names = unique([chunk.name for chunk in self._chunks])
        described = ((one.dtype, one.box.sizes, one.size_bytes) for one in self._chunks)
        self._header, self._starts, self._ends = lay_out(
            dict(zip(self._names, described, strict=True))
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
        columns = (self._chunks, self._names, self._starts.tolist(), pairwise(places))
        for chunk, name, start, (place, end) in zip(*columns, strict=True):
            found = self._checksums[place:end]
            text = _manifest.chunk_text(chunk.box, self.name, name, start, found, chunk.size_bytes)
            yield ChunkRecord(chunk.keys, chunk.box, text)


def _run_in_order(tasks: Iterable[Task]) -> None:
    for task in tasks:
        task()

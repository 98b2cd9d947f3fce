"""Reads byte ranges of chunks straight into tensors, in threads, after verification.

Verification is a pass of its own, before the first byte is written to a tensor, so that a damaged
checkpoint changes nothing; where that does not matter, what is contiguous in the file is verified
while it is read, in a core's cache. On a local file system the pass also brings what is read next
into the page cache. Ranges that lie side by side in a file are verified and read together.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from torchrelay import _native
from torchrelay._boxes import Box, contiguous_runs, intersection
from torchrelay._progress import no_progress
from torchrelay.checkpoint._tasks import (
    divided,
    memory_at,
    no_collection,
    run_tasks,
    usable_threads,
)
from torchrelay.checkpoint._types import (
    Chunk,
    FileChunks,
    Manifest,
    Sizes,
    TensorEntry,
    check_count,
)
from torchrelay.checkpoint.format._foreign import check_complete, open_checkpoint
from torchrelay.checkpoint.state._tensors import address_of, byte_view, in_stream_of
from torchrelay.checkpoint.storage._contract import Folder, Path
from torchrelay.errors import ArgumentError, CorruptionError

__all__ = [
    "MAX_BUFFER_BYTES",
    "Blocks",
    "ChunkReader",
    "ChunkSlice",
    "ReadOptions",
    "deal_blocks",
    "segments_of",
    "warn_without_checksums",
]

Blocks = dict[str, NDArray[np.bool_]]  # of each file, whether a block is meant
Progress = Callable[[int], None]
Task = Callable[[], None]

MAX_BUFFER_BYTES = 256 << 20
_VERIFY = ("data", "header", "none")
_PIECE_BYTES = 16 << 20
_RUN_BLOCKS = 16  # successive blocks that one rank verifies
_GAP_BYTES = 64 << 10  # less than this between two runs is read along: cheaper than another request


@dataclass(frozen=True)
class ReadOptions:
    """Arguments of every way to load; see :func:`torchrelay.checkpoint.load`.

    Raises:
        ArgumentError: one is out of range.
    """

    verify: str = "data"
    threads: int | None = None
    max_buffer_bytes: int = MAX_BUFFER_BYTES

    def __post_init__(self) -> None:
        if self.verify not in _VERIFY:
            raise ArgumentError(f"verify = {self.verify!r}: it must be one of {', '.join(_VERIFY)}")
        check_count("threads", self.threads)
        check_count("max_buffer_bytes", self.max_buffer_bytes)


class ChunkSlice(NamedTuple):
    """A box to read that lies in one chunk. ``inner`` is in coordinates of the whole tensor."""

    key: str
    entry: TensorEntry
    chunk: Chunk
    inner: Box

    @property
    def is_whole(self) -> bool:
        return self.inner == self.chunk.box

    @property
    def size_bytes(self) -> int:
        return self.inner.numel * self.entry.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Return whether its bytes lie in the file one after another, in row-major order."""
        if self.is_whole and self.chunk.strides is None:
            return True
        _, run, _ = contiguous_runs(self.inner, self.chunk.box, self.chunk.strides)
        return run == self.inner.numel

    def spans(self) -> Iterator[tuple[int, int]]:
        """Return the byte ranges of the chunk that a reader of ``inner`` touches, as [start,
        end).
        """
        if self.is_whole:
            yield 0, self.chunk.size_bytes
            return
        for part in _parts(self, _PIECE_BYTES):
            yield _span(self.entry, self.chunk, part)


def segments_of(key: str, entry: TensorEntry, box: Box) -> list[ChunkSlice]:
    """Return the segments that cover a box of a tensor exactly once. Pure."""
    if not box.numel:
        return []
    chunks: Sequence[Chunk] = entry.chunks
    if len(chunks) == 1:
        return [ChunkSlice(key, entry, chunks[0], box)]
    # Most chunks are told apart by the first dimension in which the box is a part of the tensor.
    cut = next((dim for dim, size in enumerate(entry.shape) if box.sizes[dim] < size), None)
    if cut is not None:
        start, end = box.offsets[cut], box.offsets[cut] + box.sizes[cut]
        chunks = [
            chunk
            for chunk in chunks
            for offsets, sizes in (chunk.box,)
            if offsets[cut] < end and offsets[cut] + sizes[cut] > start
        ]
    return [
        ChunkSlice(key, entry, chunk, inner)
        for chunk in chunks
        if chunk.size_bytes and (inner := intersection(chunk.box, box)) is not None
    ]


def _span(entry: TensorEntry, chunk: Chunk, part: Box) -> tuple[int, int]:
    first, _, strides = contiguous_runs(part, chunk.box, chunk.strides)
    last = first + sum(
        (size - 1) * stride for size, stride in zip(part.sizes, strides, strict=True)
    )
    return first * entry.dtype.itemsize, (last + 1) * entry.dtype.itemsize


def _parts(segment: ChunkSlice, limit_bytes: int) -> Iterator[Box]:
    """Yield boxes that make up the segment, one per request: dense, of at most ``limit_bytes``."""
    todo = [segment.inner]
    itemsize = segment.entry.dtype.itemsize
    while todo:
        part = todo.pop()
        start, end = _span(segment.entry, segment.chunk, part)
        needed = part.numel * itemsize
        _, run, _ = contiguous_runs(part, segment.chunk.box, segment.chunk.strides)
        runs = part.numel // run
        dense = end - start <= 2 * needed or (end - start - needed) <= (runs - 1) * _GAP_BYTES
        if (dense and end - start <= limit_bytes) or part.numel == 1:
            yield part
            continue
        dim = next(d for d, size in enumerate(part.sizes) if size > 1)
        half = part.sizes[dim] // 2
        first = Box(part.offsets, (*part.sizes[:dim], half, *part.sizes[dim + 1 :]))
        second = Box(
            (*part.offsets[:dim], part.offsets[dim] + half, *part.offsets[dim + 1 :]),
            (*part.sizes[:dim], part.sizes[dim] - half, *part.sizes[dim + 1 :]),
        )
        todo += [second, first]


class _FileBlocks:
    """The checksummed blocks of a file, numbered over all its chunks.

    ``chunk_of`` is the index of each block's chunk; ``starts`` and ``sizes`` are those of each
    block, in bytes of the file.
    """

    def __init__(self, file: FileChunks, block_bytes: int) -> None:
        checksums = [chunk.checksums for chunk in file.chunks]
        self.expected = np.frombuffer(b"".join(checksums), "<u4")
        verified = np.where([*map(bool, checksums)], file.sizes, np.uint64(0))
        self.chunk_of, offsets, self.sizes = divided(verified, block_bytes)
        self.starts: Sizes = file.starts[self.chunk_of] + offsets

    def touched(self, ranges: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
        """Return which blocks byte ranges of the file, as [start, end), have bytes of."""
        begins, ends = np.array(ranges, np.uint64).T
        edges = np.zeros(len(self.starts) + 1, np.intp)
        np.add.at(edges, np.searchsorted(self.starts, begins, "right") - 1, 1)
        np.add.at(edges, np.searchsorted(self.starts, ends, "left"), -1)
        found: NDArray[np.bool_] = np.cumsum(edges[:-1]) > 0
        return found

    def near(self, starts: Sizes, sizes: Sizes) -> NDArray[np.intp]:
        """Return the numbers of the blocks that byte ranges of the file have bytes of; these ascend
        and do not overlap. Only looks at what lies between the first and the last.
        """
        ends = starts + sizes
        first = np.searchsorted(self.starts, starts[0], "right") - 1
        numbers = np.arange(first, np.searchsorted(self.starts, ends[-1], "left"))
        before = np.searchsorted(starts, self.starts[numbers] + self.sizes[numbers], "left") - 1
        found: NDArray[np.intp] = numbers[(before >= 0) & (ends[before] > self.starts[numbers])]
        return found


def deal_blocks(touched: NDArray[np.bool_], rank: int) -> NDArray[np.bool_]:
    """Return the blocks that ``rank`` verifies: each block that ranks read is verified by one of
    them, in runs.

    Args:
        touched: ``(ranks, blocks)``, whether a rank reads a block.
        rank: a row of ``touched``.
    """
    ranks, blocks = touched.shape
    columns = np.arange(blocks)
    # Row i: the rank that is asked as the i-th whether it reads the block.
    asked = (columns // _RUN_BLOCKS + np.arange(ranks)[:, None]) % ranks
    first = touched[asked, columns].argmax(axis=0)
    mine: NDArray[np.bool_] = touched[rank] & (asked[first, columns] == rank)
    return mine


class ChunkReader:
    """Verifies and reads segments of one checkpoint.

    Args:
        folder: where its files are.
        manifest: what they hold.
        options: its threads together take ``max_buffer_bytes``.
    """

    def __init__(self, folder: Folder, manifest: Manifest, options: ReadOptions) -> None:
        self.folder = folder
        self.manifest = manifest
        self._threads = usable_threads(options.threads)
        limit_bytes = options.max_buffer_bytes // self._threads
        self._limit_bytes = max(1 << 16, min(_PIECE_BYTES, limit_bytes))
        self._blocks = cache(lambda name: _FileBlocks(manifest.by_file[name], manifest.block_bytes))

    @classmethod
    def open(
        cls,
        path: Path,
        options: ReadOptions,
        check: Callable[[ChunkReader], None] = lambda reader: None,
    ) -> ChunkReader:
        """Open a checkpoint of any format. ``check`` is called with the reader that is returned,
        and again with another if a save has replaced the checkpoint in the middle of it.

        Raises:
            As :func:`open_checkpoint`, and what ``check`` raises.
        """
        while True:
            folder, read = open_checkpoint(path)
            try:
                reader = cls(folder, read(), options)
                check(reader)
                return reader
            except BaseException as error:
                again = isinstance(error, CorruptionError) and folder.replaced
                folder.close()
                if not again:
                    raise

    def close(self) -> None:
        self.folder.close()

    def check_all(self) -> None:
        """Compare sizes and headers of all files with the manifest.

        Raises:
            CorruptionError: as for :meth:`check_files`, or a snapshot lacks a file.
        """
        check_complete(self.manifest)
        self.check_files(self.manifest.files)

    def check_files(self, names: Iterable[str]) -> None:
        """Compare sizes and headers of data files with the manifest.

        Raises:
            CorruptionError: a file is missing, truncated, damaged or of another checkpoint.
        """
        run_tasks([partial(self._check_file, name) for name in sorted(set(names))], self._threads)

    def _check_file(self, name: str) -> None:
        known, where = self.manifest.files[name], f"{self.folder.location}/{name}"
        size = self.folder.size_bytes(name)
        if size != known.size_bytes:
            raise CorruptionError(
                f"{where}: the file has {size} bytes, and {known.size_bytes} in the manifest; it "
                "was " + ("cut short" if size < known.size_bytes else "replaced or appended to")
            )
        if self.manifest.is_foreign:  # made up from this very header
            return
        header = bytearray(known.header_bytes)
        self.folder.read(name, 0, memoryview(header))
        if _native.crc32c(header) != known.header_crc32c:
            raise CorruptionError(
                f"{where}: the header, bytes 0 to {known.header_bytes}, is damaged"
            )

    def verify(self, segments: Iterable[ChunkSlice]) -> None:
        """Compare every block that a reader of ``segments`` touches with its checksum.

        Raises:
            CorruptionError: one does not match; the message names file, tensor and byte.
        """
        self.verify_blocks(self.blocks_of(segments))

    def verify_all(self, progress: Progress = no_progress) -> None:
        """Compare all blocks of all files, and check that bytes that belong to no tensor are zero.

        Raises:
            CorruptionError: as for :meth:`verify`.
        """
        names = self.manifest.files
        blocks = {name: np.ones(len(self._blocks(name).starts), np.bool_) for name in names}
        self.verify_blocks(blocks, progress)
        if not self.manifest.is_foreign:  # other writers may leave anything there
            run_tasks([partial(self._verify_gaps, name) for name in names], self._threads)

    @no_collection()
    def blocks_of(self, segments: Iterable[ChunkSlice]) -> Blocks:
        """Return the blocks that a reader of ``segments`` touches."""
        ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for segment in segments:
            chunk = segment.chunk
            if chunk.checksums:
                ranges[chunk.file] += [
                    (chunk.start + start, chunk.start + end) for start, end in segment.spans()
                ]
        return {name: self._blocks(name).touched(found) for name, found in ranges.items()}

    def verify_blocks(self, blocks: Blocks, progress: Progress = no_progress) -> None:
        """Compare ``blocks`` with their checksums.

        Raises:
            CorruptionError: one does not match; the message names file, tensor and byte.
        """
        tasks: list[Task] = []
        for name, wanted in blocks.items():
            file = self._blocks(name)
            numbers = np.flatnonzero(wanted)
            pieces = _pieces(file.starts[numbers], file.sizes[numbers], self._limit_bytes)
            tasks += [
                partial(self._verify_piece, name, numbers[piece], progress) for piece in pieces
            ]
        run_tasks(tasks, self._threads)

    def _verify_piece(self, name: str, numbers: NDArray[np.intp], progress: Progress) -> None:
        file = self._blocks(name)
        starts, sizes = file.starts[numbers], file.sizes[numbers]
        self._compare(name, numbers, self.folder.checksums(name, starts, sizes))
        progress(int(sizes.sum()))

    def _compare(self, name: str, numbers: NDArray[np.intp], checksums: bytes) -> None:
        """Compare the checksums of blocks with those in the manifest.

        Raises:
            CorruptionError: one does not match.
        """
        file = self._blocks(name)
        starts, sizes = file.starts[numbers], file.sizes[numbers]
        differs = np.frombuffer(checksums, "<u4") != file.expected[numbers]
        if differs.any():
            place = int(differs.argmax())
            chunks, index = self.manifest.by_file[name], file.chunk_of[numbers[place]]
            raise CorruptionError(
                f"{self.folder.location}/{name}: tensor {chunks.keys[index]!r} is damaged between "
                f"bytes {starts[place]} and {starts[place] + sizes[place]} (chunk at "
                f"{list(chunks.chunks[index].box.offsets)}): the checksum does not match"
            )

    def _verify_gaps(self, name: str) -> None:
        file, chunks = self.manifest.files[name], self.manifest.by_file[name]
        begins = [file.header_bytes, *(chunks.starts + chunks.sizes).tolist()]
        for begin, end in zip(begins, [*chunks.starts.tolist(), file.size_bytes], strict=True):
            for start in range(begin, end, self._limit_bytes):
                piece = bytearray(min(end - start, self._limit_bytes))
                self.folder.read(name, start, memoryview(piece))
                if any(piece):
                    raise CorruptionError(
                        f"{self.folder.location}/{name}: the padding between bytes {start} and "
                        f"{start + len(piece)} is damaged: it is not zero"
                    )

    def fill(
        self,
        targets: Iterable[tuple[ChunkSlice, torch.Tensor]],
        progress: Progress = no_progress,
        *,
        verify: bool = False,
    ) -> None:
        """Read each segment into its tensor, which has the segment's shape. Blocks.

        Args:
            targets: segments, and their tensors.
            progress: called with the bytes read since the last call, from several threads.
            verify: whether to compare what is read with its checksums: what is contiguous in the
                file while it is read, and the rest before anything is. Some tensors then have
                damaged values after an error.

        Raises:
            CorruptionError, StorageError: a file cannot be read, or is damaged. Some tensors may
                then have new values.
        """
        tasks, unverified = self._read_tasks(targets, progress, verify)
        self.verify(unverified)
        run_tasks(tasks, self._threads)

    @no_collection()
    def _read_tasks(
        self, targets: Iterable[tuple[ChunkSlice, torch.Tensor]], progress: Progress, verify: bool
    ) -> tuple[list[Task], list[ChunkSlice]]:
        """Return what fills the targets, and the segments that are to be verified before."""
        direct: dict[tuple[str, bool], list[tuple[int, int, int, int]]] = defaultdict(list)
        changed: list[torch.Tensor] = []
        unverified: list[ChunkSlice] = []
        tasks: list[Task] = []
        for segment, target in targets:
            chunk, address = segment.chunk, address_of(target)
            is_direct = address and segment.is_contiguous
            compares = bool(verify and is_direct and chunk.checksums)
            if verify and not compares:
                unverified.append(segment)
            if is_direct:
                skipped = 0 if segment.is_whole else _span(segment.entry, chunk, segment.inner)[0]
                row = chunk.start + skipped, target.nbytes, address, skipped
                direct[chunk.file, compares].append(row)
                changed.append(target)
            else:
                copy = in_stream_of(target, self._copy)
                tasks += [
                    partial(copy, segment, part, target, progress)
                    for part in _parts(segment, self._limit_bytes)
                ]
        # Tensors made in inference mode have no version.
        torch.autograd.graph.increment_version(
            [target for target in changed if not target.is_inference()]
        )
        block_bytes = self.manifest.block_bytes
        limit_bytes = min(self.folder.request_bytes, self._limit_bytes)
        for (name, compares), rows in direct.items():
            starts, sizes, addresses, places = (
                np.array(column, np.uint64) for column in zip(*rows, strict=True)
            )
            step = max(_PIECE_BYTES, self.folder.request_bytes)
            if compares:
                step = max(self._limit_bytes // block_bytes, 1) * block_bytes
            lead = places % np.uint64(step)  # so that pieces end where blocks do
            index, offsets, sizes = divided(sizes + lead, step)
            lead = lead[index]
            begins = np.maximum(offsets, lead)
            sizes -= begins - offsets
            begins -= lead
            ranges = np.stack([starts[index] + begins, sizes, addresses[index] + begins])
            ranges = ranges[:, np.argsort(ranges[0], kind="stable")]
            tasks += [
                partial(self._read, name, ranges[:, piece], compares, progress)
                for piece in _pieces(ranges[0], ranges[1], limit_bytes)
            ]
        return tasks, unverified

    def _read(self, name: str, ranges: Sizes, compares: bool, progress: Progress) -> None:
        """Read byte ranges that are close together to memory: one straight, several through a
        buffer. ``ranges`` has rows of starts, sizes and addresses.
        """
        ranges = np.ascontiguousarray(ranges)
        starts, sizes, addresses = ranges
        if compares:
            file = self._blocks(name)
            numbers = file.near(starts, sizes)
            blocks = file.starts[numbers], file.sizes[numbers]
            self._compare(name, numbers, self.folder.checksums(name, *blocks, ranges))
        elif len(starts) == 1:
            target = memory_at(int(addresses[0]), int(sizes[0]))
            self.folder.read(name, int(starts[0]), target)
        else:
            buffer = np.empty(int((starts + sizes).max() - starts[0]), np.uint8)
            self.folder.read(name, int(starts[0]), memoryview(buffer.data))
            base = np.uint64(buffer.ctypes.data) - starts[:1]  # modulo 2^64, as what is added to it
            _native.copy_memory(addresses, starts + base, sizes)
        progress(int(sizes.sum()))

    def _copy(
        self, segment: ChunkSlice, part: Box, target: torch.Tensor, progress: Progress
    ) -> None:
        """Copy the elements of ``part`` out of its span."""
        chunk = segment.chunk
        start, end = _span(segment.entry, chunk, part)
        data = self._bytes(chunk.file, chunk.start + start, end - start, target.element_size())
        _, _, strides = contiguous_runs(part, chunk.box, chunk.strides)
        found = data.view(target.dtype).as_strided(part.sizes, strides)
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            target[part.within(segment.inner)].copy_(found)
        progress(part.numel * segment.entry.dtype.itemsize)

    def _bytes(self, name: str, offset: int, size: int, itemsize: int) -> torch.Tensor:
        """Return bytes of a file, mapped from the page cache or, where that is impossible, read."""
        if offset % itemsize == 0:
            mapped = self.folder.map(name, offset, size)
            if mapped is not None:
                return torch.frombuffer(mapped, dtype=torch.uint8)
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        self.folder.read(name, offset, byte_view(buffer))
        return buffer


def _pieces(starts: Sizes, sizes: Sizes, limit_bytes: int) -> Iterator[slice]:
    """Yield slices of ascending byte ranges that are close together, of at most ``limit_bytes``, or
    of one range.
    """
    if not len(starts):
        return
    ends = np.maximum.accumulate(starts + sizes)
    apart = (starts[1:] < ends[:-1]) | (starts[1:] - ends[:-1] > _GAP_BYTES)
    for begin, end in pairwise([0, *(np.flatnonzero(apart) + 1).tolist(), len(starts)]):
        first = begin
        while first < end:
            reach = int(
                np.searchsorted(ends[:end], starts[first] + np.uint64(limit_bytes), "right")
            )
            stop = min(max(reach, first + 1), end)
            yield slice(first, stop)
            first = stop


def warn_without_checksums(manifest: Manifest, location: str) -> None:
    """Warn about a checkpoint of ours whose data ``verify="data"`` cannot verify."""
    if not manifest.is_foreign and not manifest.has_checksums:
        warnings.warn(
            f"{location}: saved with checksum=False, so verify='data' checks sizes and headers "
            "only; to silence this warning, load it with verify='header'",
            stacklevel=9,  # the caller of load()
        )

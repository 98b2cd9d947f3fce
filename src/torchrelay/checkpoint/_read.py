"""Reads byte ranges of chunks straight into tensors, in threads, after verification.

Verification is a pass of its own, before the first byte is written to a tensor, so that a damaged
checkpoint changes nothing. On a local file system it also brings what is read next into the page
cache.
"""

from __future__ import annotations

import threading
import warnings
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from torchrelay import _native
from torchrelay.checkpoint._boxes import BoxIndex, contiguous_runs
from torchrelay.checkpoint._data_file import header_size, parse_header
from torchrelay.checkpoint._storage import Folder
from torchrelay.checkpoint._tensors import byte_view
from torchrelay.checkpoint._types import Box, Chunk, Manifest, TensorEntry
from torchrelay.errors import CorruptionError

__all__ = [
    "VERIFY",
    "Blocks",
    "ChunkReader",
    "Segment",
    "segments_of",
    "warn_without_checksums",
    "whole_segments",
]

Blocks = dict[str, NDArray[np.bool_]]  # of each file, whether a block is meant
Task = tuple[Callable[..., None], tuple[object, ...]]

VERIFY = ("data", "header", "none")
_PIECE_BYTES = 16 << 20
_CHECKSUM_BYTES = 4
_GAP_BYTES = 64 << 10  # less than this between two runs is read along: cheaper than another request


@dataclass(frozen=True)
class Segment:
    """A box to read that lies in one chunk. ``inner`` is in coordinates of the whole tensor."""

    key: str
    entry: TensorEntry
    chunk: Chunk
    inner: Box

    def spans(self) -> Iterator[tuple[int, int]]:
        """Return the byte ranges of the chunk that a reader of ``inner`` touches, as [start,
        end).
        """
        for part in _parts(self, _PIECE_BYTES):
            yield _span(self.entry, self.chunk, part)


def segments_of(
    key: str, entry: TensorEntry, box: Box, index: BoxIndex | None = None
) -> list[Segment]:
    """Return the segments that cover a box of a tensor exactly once. Pure."""
    index = index or BoxIndex([chunk.box for chunk in entry.chunks])
    return [Segment(key, entry, entry.chunks[i], common) for i, common in index.meeting(box)]


def _span(entry: TensorEntry, chunk: Chunk, part: Box) -> tuple[int, int]:
    first, _, strides = contiguous_runs(part, chunk.box, chunk.strides)
    last = first + sum(
        (size - 1) * stride for size, stride in zip(part.sizes, strides, strict=True)
    )
    return first * entry.dtype.itemsize, (last + 1) * entry.dtype.itemsize


def _parts(segment: Segment, limit_bytes: int) -> Iterator[Box]:
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


@dataclass(frozen=True)
class _FileBlocks:
    """The checksummed blocks of a file, numbered over all its chunks."""

    chunks: list[tuple[str, Chunk, int]]  # key, chunk and its size, in the order of the file
    starts: list[int]  # where each chunk begins
    firsts: list[int]  # the number of each chunk's first block, and at the end how many there are

    @classmethod
    def of(cls, chunks: list[tuple[str, Chunk, int]]) -> _FileBlocks:
        chunks = sorted(chunks, key=lambda found: found[1].start)
        counts = (len(chunk.checksums) // _CHECKSUM_BYTES for _, chunk, _ in chunks)
        return cls(chunks, [chunk.start for _, chunk, _ in chunks], [0, *accumulate(counts)])


class ChunkReader:
    """Verifies and reads segments of one checkpoint.

    Args:
        folder: where its files are.
        manifest: what they hold.
        threads: how many read at once.
        max_buffer_bytes: memory of all threads together, for what cannot be read straight into its
            tensor.
    """

    def __init__(
        self, folder: Folder, manifest: Manifest, *, threads: int, max_buffer_bytes: int
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._threads = threads
        self._limit_bytes = max(1 << 16, min(_PIECE_BYTES, max_buffer_bytes // threads))
        self._local = threading.local()
        self._files: dict[str, _FileBlocks] = {}

    def check_files(self, names: Iterable[str]) -> None:
        """Compare sizes and headers of data files with the manifest.

        Raises:
            CorruptionError: a file is missing, truncated, damaged or of another checkpoint.
        """
        self._run([(self._check_file, (name,)) for name in sorted(set(names))])

    def _check_file(self, name: str) -> None:
        known, where = self._manifest.files[name], f"{self._folder.location}/{name}"
        size = self._folder.size_bytes(name)
        if size != known.size_bytes:
            raise CorruptionError(
                f"{where}: the file has {size} bytes, and {known.size_bytes} in the manifest; it "
                "was " + ("cut short" if size < known.size_bytes else "replaced or appended to")
            )
        if not self._manifest.id:  # made up from this very header
            return
        header = bytearray(known.header_bytes)
        self._folder.read(name, 0, memoryview(header))
        if _native.crc32c(header) != known.header_crc32c:
            raise CorruptionError(
                f"{where}: the header, bytes 0 to {known.header_bytes}, is damaged"
            )
        if header_size(bytes(header[:8]), size, where) != len(header):
            raise CorruptionError(
                f"{where}: the header is not {known.header_bytes} bytes long, as in the manifest"
            )
        parse_header(bytes(header), size, where)

    def verify(
        self, segments: Iterable[Segment], progress: Callable[[int], None] | None = None
    ) -> None:
        """Compare every block that a reader of ``segments`` touches with its checksum.

        Raises:
            CorruptionError: one does not match; the message names file, tensor and byte.
        """
        self.verify_blocks(self.blocks_of(segments), progress)

    def blocks_of(self, segments: Iterable[Segment]) -> Blocks:
        """Return the blocks that a reader of ``segments`` touches."""
        block_bytes = self._manifest.block_bytes
        spans: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for segment in segments:
            if segment.chunk.checksums:
                spans[segment.chunk.file] += (
                    (segment.chunk.start, start // block_bytes, -(-end // block_bytes))
                    for start, end in segment.spans()
                )
        touched = {}
        for name, ranges in spans.items():
            file = self._file_blocks(name)
            touched[name] = np.zeros(file.firsts[-1], dtype=np.bool_)
            for start, first, last in ranges:
                number = file.firsts[bisect_left(file.starts, start)]
                touched[name][number + first : number + last] = True
        return touched

    def verify_blocks(self, blocks: Blocks, progress: Callable[[int], None] | None = None) -> None:
        """Compare ``blocks`` with their checksums.

        Raises:
            CorruptionError: one does not match; the message names file, tensor and byte.
        """
        longest = max(1, self._limit_bytes // self._manifest.block_bytes)
        tasks: list[Task] = []
        for name, wanted in blocks.items():
            file = self._file_blocks(name)
            bounds = pairwise(file.firsts)
            for (key, chunk, size), (first, end) in zip(file.chunks, bounds, strict=True):
                numbers = np.flatnonzero(wanted[first:end]).tolist()
                tasks += [
                    (self._verify_range, (key, chunk, *run, size, progress))
                    for run in _ranges(numbers, longest)
                ]
        self._run(tasks)

    def _file_blocks(self, name: str) -> _FileBlocks:
        if not self._files:
            chunks: dict[str, list[tuple[str, Chunk, int]]] = defaultdict(list)
            for key, entry in self._manifest.tensors.items():
                for chunk in entry.chunks:
                    chunks[chunk.file].append((key, chunk, entry.chunk_bytes(chunk)))
            self._files = {file: _FileBlocks.of(found) for file, found in chunks.items()}
        return self._files.get(name) or _FileBlocks.of([])

    def _verify_range(
        self,
        key: str,
        chunk: Chunk,
        first: int,
        last: int,
        size: int,
        progress: Callable[[int], None] | None,
    ) -> None:
        """Verify the blocks [first, last) of a chunk of ``size`` bytes."""
        block_bytes = self._manifest.block_bytes
        start, end = first * block_bytes, min(last * block_bytes, size)
        found = self._folder.checksums(chunk.file, chunk.start + start, end - start, block_bytes)
        expected = chunk.checksums[_CHECKSUM_BYTES * first : _CHECKSUM_BYTES * last]
        if found != expected:
            differ = (np.frombuffer(found, "<u4") != np.frombuffer(expected, "<u4")).argmax()
            start += int(differ) * block_bytes
            end = min(start + block_bytes, size)
            raise CorruptionError(
                f"{self._folder.location}/{chunk.file}: tensor {key!r} is damaged between "
                f"bytes {chunk.start + start} and {chunk.start + end} (chunk at "
                f"{list(chunk.box.offsets)}): the checksum does not match"
            )
        if progress is not None:
            progress(end - start)

    def verify_padding(self) -> None:
        """Check that all bytes of the data files that belong to no tensor are zero.

        Raises:
            CorruptionError: some are not; the message names file and bytes.
        """
        if self._manifest.id:  # other writers may leave anything there
            self._run([(self._verify_gaps, (name,)) for name in self._manifest.files])

    def _verify_gaps(self, name: str) -> None:
        file = self._manifest.files[name]
        end = file.header_bytes
        for _, chunk, size in self._file_blocks(name).chunks:
            self._verify_zeros(name, end, chunk.start)
            end = max(end, chunk.start + size)
        self._verify_zeros(name, end, file.size_bytes)

    def _verify_zeros(self, name: str, start: int, end: int) -> None:
        while start < end:
            size = min(end - start, self._limit_bytes)
            piece = bytearray(size)
            self._folder.read(name, start, memoryview(piece))
            if any(piece):
                raise CorruptionError(
                    f"{self._folder.location}/{name}: the padding between bytes {start} and "
                    f"{start + size} is damaged: it is not zero"
                )
            start += size

    def _buffer(self, size: int) -> memoryview:
        """Return the reused buffer of this thread."""
        held = getattr(self._local, "buffer", None)
        if held is None or held.numel() < size:
            held = self._local.buffer = torch.empty(size, dtype=torch.uint8)
        return byte_view(held)[:size]

    def fill(
        self,
        targets: Sequence[tuple[Segment, torch.Tensor]],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Read each segment into its tensor, which has the segment's shape. Blocks.

        Raises:
            CorruptionError, StorageError: a file cannot be read. Some tensors may then have new
                values.
        """
        tasks: list[Task] = []
        for segment, target in targets:
            if _is_direct(segment, target):
                if not target.is_inference():  # such tensors have no version
                    torch.autograd.graph.increment_version(target)
                view, chunk = byte_view(target), segment.chunk
                start = chunk.start + _span(segment.entry, chunk, segment.inner)[0]
                tasks += [
                    (
                        self._read,
                        (chunk.file, start + first, view[first : first + _PIECE_BYTES], progress),
                    )
                    for first in range(0, len(view), _PIECE_BYTES)
                ]
            else:
                tasks += [
                    (self._copy, (segment, part, target, progress))
                    for part in _parts(segment, self._limit_bytes)
                ]
        self._run(tasks)

    def _read(
        self, name: str, offset: int, into: memoryview, progress: Callable[[int], None] | None
    ) -> None:
        self._folder.read(name, offset, into)
        if progress is not None:
            progress(len(into))

    def _copy(
        self,
        segment: Segment,
        part: Box,
        target: torch.Tensor,
        progress: Callable[[int], None] | None,
    ) -> None:
        """Copy the elements of ``part`` out of its span."""
        chunk = segment.chunk
        start, end = _span(segment.entry, chunk, part)
        data = self._bytes(chunk.file, chunk.start + start, end - start, target.element_size())
        _, _, strides = contiguous_runs(part, chunk.box, chunk.strides)
        found = data.view(target.dtype).as_strided(part.sizes, strides)
        within = tuple(
            slice(a - b, a - b + size)
            for a, b, size in zip(part.offsets, segment.inner.offsets, part.sizes, strict=True)
        )
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            target[within].copy_(found)
        if progress is not None:
            progress(part.numel * segment.entry.dtype.itemsize)

    def _bytes(self, name: str, offset: int, size: int, itemsize: int) -> torch.Tensor:
        """Return bytes of a file: mapped from the page cache or, where that is impossible, read
        into this thread's buffer.
        """
        if offset % itemsize == 0:
            mapped = self._folder.map(name, offset, size)
            if mapped is not None:
                return torch.frombuffer(mapped, dtype=torch.uint8)
        self._folder.read(name, offset, self._buffer(size))
        buffer: torch.Tensor = self._local.buffer
        return buffer[:size]

    def _run(self, tasks: Sequence[Task]) -> None:
        """Run all tasks; the first error, in their order, cancels the rest."""
        if len(tasks) == 1:
            tasks[0][0](*tasks[0][1])
            return
        with ThreadPoolExecutor(self._threads, "torchrelay-checkpoint") as pool:
            futures = [pool.submit(function, *arguments) for function, arguments in tasks]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _is_direct(segment: Segment, target: torch.Tensor) -> bool:
    """Return whether the bytes of the file are those of the tensor, contiguously."""
    _, run, _ = contiguous_runs(segment.inner, segment.chunk.box, segment.chunk.strides)
    return (
        run == segment.inner.numel
        and target.device.type == "cpu"
        and target.is_contiguous()
        and not (target.is_conj() or target.is_neg())
    )


def _ranges(numbers: Sequence[int], longest: int) -> Iterator[tuple[int, int]]:
    """Yield runs of consecutive numbers as [first, end), each of at most ``longest``."""
    first = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1 or i - first == longest:
            yield numbers[first], numbers[i - 1] + 1
            first = i


def warn_without_checksums(manifest: Manifest, location: str) -> None:
    """Warn about a checkpoint of ours whose data ``verify="data"`` cannot verify."""
    if manifest.id and not manifest.has_checksums:
        warnings.warn(
            f"{location}: saved with checksum=False, so verify='data' checks sizes and headers "
            "only; to silence this warning, load it with verify='header'",
            stacklevel=4,
        )


def whole_segments(manifest: Manifest) -> Iterator[Segment]:
    """Return segments for all tensors of a checkpoint."""
    for key, entry in manifest.tensors.items():
        for chunk in entry.chunks:
            if chunk.box.numel:
                yield Segment(key, entry, chunk, chunk.box)

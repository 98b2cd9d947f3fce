"""The storage layer for ``torch.distributed.checkpoint`` (DCP): its planners, our files.

DCP gathers plans on rank 0 and removes duplicates; what follows is ours. Values that are not
tensors are stored as JSON, so nothing is pickled into the checkpoint and nothing from it is
unpickled.
"""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from torchrelay import _torch
from torchrelay.checkpoint._assemble import (
    ChunkRecord,
    Description,
    PartRecord,
    TensorDescription,
    assemble,
)
from torchrelay.checkpoint._catalog import Keep, check_keep, retain
from torchrelay.checkpoint._choice import check_same
from torchrelay.checkpoint._foreign import open_checkpoint
from torchrelay.checkpoint._load import MAX_BUFFER_BYTES, check_verify
from torchrelay.checkpoint._manifest import chunk_text
from torchrelay.checkpoint._progress import Progress, tracking
from torchrelay.checkpoint._read import ChunkReader, Segment, warn_without_checksums
from torchrelay.checkpoint._save import check_count
from torchrelay.checkpoint._storage import (
    Folder,
    Path,
    Transaction,
    open_transaction,
    split,
    text_of,
)
from torchrelay.checkpoint._tensors import (
    check_memory,
    check_target,
    dtype_of,
    memory_of,
    source_data,
)
from torchrelay.checkpoint._types import Box, DataFile, Manifest
from torchrelay.checkpoint._values import decode, encode
from torchrelay.checkpoint._write import MAX_STAGING_BYTES, Source, default_threads, write_part
from torchrelay.errors import ArgumentError, MismatchError, UnsupportedError

__all__ = ["Reader", "Writer"]


class Writer(StorageWriter):
    """Storage writer for DCP, ``dcp.save(state, storage_writer=Writer(path))``: writes safetensors
    files that are committed in one step.

    Args:
        path: the folder or fsspec URL; ``checkpoint_id`` of ``dcp.save`` takes its place.
        threads: how many write at once; by default the usable cores, at most 4.
        fsync: whether the checkpoint must be on the disk when the save returns.
        checksum: whether to store CRC32C checksums.
        keep: which older checkpoints of its series to keep, as for :func:`save`.
        max_staging_bytes: host memory for copies of tensors that are not contiguous in host memory.
        progress: True for a progress bar on the coordinator, or a function (bytes done, bytes in
            all).

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        threads: int | None = None,
        fsync: bool = True,
        checksum: bool = True,
        keep: int | Keep | None = None,
        max_staging_bytes: int = MAX_STAGING_BYTES,
        progress: Progress = False,
    ) -> None:
        super().__init__()
        self._path = None if path is None else text_of(path)
        self._threads = check_count("threads", threads, default_threads())
        self._fsync = fsync
        self._checksum = checksum
        self._keep = keep
        if keep is not None and path is not None:
            check_keep(keep, path)
        self._max_staging_bytes = check_count("max_staging_bytes", max_staging_bytes, 1)
        self._progress = progress
        self._transaction: Transaction | None = None
        self._is_coordinator = False
        self._rank = 0

    @property
    def checkpoint_id(self) -> str | None:
        """Return the path, for DCP's log."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Return whether ``checkpoint_id`` can be the path of a checkpoint."""
        try:
            split(checkpoint_id)
        except ArgumentError:
            return False
        return True

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """Start a save. Discards one that failed before its commit."""
        if checkpoint_id is not None:
            self._path = text_of(checkpoint_id)
        self._discard()

    def _discard(self) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is not None and self._is_coordinator:
            transaction.discard()

    def __del__(self) -> None:
        if getattr(self, "_transaction", None) is not None:
            self._discard()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note this rank's part in the save.

        Raises:
            ArgumentError: there is no path.
            UnsupportedError: ``use_collectives=False``: no rank would write the manifest.
        """
        if self._path is None:
            raise ArgumentError("Writer() has no path: give it one, or dcp.save() a checkpoint_id")
        self._rule = check_keep(self._keep, self._path)
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "a Writer needs use_collectives=True: rank 0 commits for all ranks"
            )
        self._is_coordinator = is_coordinator
        self._rank = kwargs.get("rank", 0)
        self._transaction = open_transaction(self._path, fsync=self._fsync)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the folder to write to."""
        assert self._transaction is not None
        self._transaction.begin()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items; blocks.

        Raises:
            ArgumentError: a value that JSON cannot hold; the message names its key.
            StorageError: a file cannot be written.
        """
        assert self._transaction is not None
        values = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        results = [self._value(item, planner) for item in values]
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        sources = _sources(tensors, planner)
        with tracking(
            self._progress,
            sum(source.size_bytes for source, _ in sources),
            "saving",
            shown=self._is_coordinator,
        ) as advance:
            part = write_part(
                self._transaction,
                self._rank,
                [source for source, _ in sources],
                threads=self._threads,
                checksum=self._checksum,
                max_staging_bytes=self._max_staging_bytes,
                progress=advance,
            )
        items = dict(sources)
        for source, chunk in part.chunks:
            text = chunk_text(chunk, source.size_bytes)
            for item in items[source]:
                record = ChunkRecord((item.index.fqn,), chunk.box, text)
                written = _Written(chunk.file, part.files[chunk.file], record)
                results.append(WriteResult(item.index, source.size_bytes, written))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _value(self, item: WriteItem, planner: SavePlanner) -> WriteResult:
        key = item.index.fqn
        if not hasattr(planner, "lookup_object"):
            raise UnsupportedError(
                f"{key}: {type(planner).__name__} gives values as pickled bytes, which this "
                "checkpoint does not hold; derive the planner from DefaultSavePlanner"
            )
        return WriteResult(item.index, 0, encode(key, planner.lookup_object(item.index)))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint."""
        assert self._transaction is not None and self._path is not None
        objects, records = {}, []
        for rank_results in results:
            record = PartRecord({}, [])
            for result in rank_results:
                data = result.storage_data
                if isinstance(data, _Written):
                    record.files[data.name] = data.file
                    record.chunks.append(data.record)
                else:
                    objects[result.index.fqn] = data
            records.append(record)
        tensors = {
            key: TensorDescription(
                str(found.properties.dtype).removeprefix("torch."), tuple(found.size)
            )
            for key, found in metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }
        description = Description(tensors, objects, dict(metadata.planner_data or {}))
        try:
            _, name = split(self._path)
            self._transaction.commit(*assemble([description], records, name=name))
        finally:
            self._discard()
        if self._rule is not None:
            retain(self._path, self._rule)


class _Written(NamedTuple):
    """A chunk that was written, and its file."""

    name: str
    file: DataFile
    record: ChunkRecord


def _sources(items: list[WriteItem], planner: SavePlanner) -> list[tuple[Source, list[WriteItem]]]:
    """Return what to write, and the items that each source serves: several for tied tensors."""
    by_memory: dict[object, tuple[list[WriteItem], torch.Tensor]] = {}
    for number, item in enumerate(items):
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor) and item.tensor_data is not None
        dtype_of(item.index.fqn, tensor)
        check_memory(item.index.fqn, tensor)
        at = memory_of(tensor)
        place = (tuple(item.tensor_data.size), tuple(item.tensor_data.chunk.offsets))
        memory = (at, *place) if at is not None else number
        by_memory.setdefault(memory, ([], tensor))[0].append(item)
    found = []
    for same, tensor in by_memory.values():
        data = same[0].tensor_data
        assert data is not None
        if not tensor.numel():
            continue
        source = Source(
            tuple(item.index.fqn for item in same),
            dtype_of(same[0].index.fqn, tensor),
            tuple(data.size),
            Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)),
            *source_data(tensor),
        )
        found.append((source, same))
    return found


class _Opened(NamedTuple):
    """The open checkpoint of a :class:`Reader`, for one load."""

    folder: Folder
    manifest: Manifest
    chunks: ChunkReader


class Reader(StorageReader):
    """Storage reader for DCP, ``dcp.load(state, storage_reader=Reader(path))``: reads our
    checkpoints, DCP's and safetensors files.

    What a rank needs is verified before any rank's state is changed.

    Args:
        path: the folder or fsspec URL; ``checkpoint_id`` of ``dcp.load`` takes its place.
        verify: ``"data"``: the checksums of all that is read; ``"header"``: the headers of the
            files; ``"none"``.
        threads: how many read at once; by default the usable cores, at most 4.
        max_buffer_bytes: memory for what cannot be read straight into its tensor.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        verify: str = "data",
        threads: int | None = None,
        max_buffer_bytes: int = MAX_BUFFER_BYTES,
    ) -> None:
        super().__init__()
        check_verify(verify)
        self._path = None if path is None else text_of(path)
        self._verify = verify
        self._threads = check_count("threads", threads, default_threads())
        self._max_buffer_bytes = check_count("max_buffer_bytes", max_buffer_bytes, 1)
        self._opened: _Opened | None = None
        self._failure: Exception | None = None

    @property
    def checkpoint_id(self) -> str | None:
        """Return the path, for DCP's log."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Return whether ``checkpoint_id`` can be the path of a checkpoint."""
        return Writer.validate_checkpoint_id(checkpoint_id)

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """Start a load."""
        if checkpoint_id is not None:
            self._path = text_of(checkpoint_id)
        self._close()
        self._failure = None

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.folder.close()
            self._opened = None

    def _open(self) -> _Opened:
        if self._opened is None:
            if self._path is None:
                raise ArgumentError(
                    "Reader() has no path: give it one, or dcp.load() a checkpoint_id"
                )
            folder, manifest = open_checkpoint(self._path)
            chunks = ChunkReader(
                folder, manifest, threads=self._threads, max_buffer_bytes=self._max_buffer_bytes
            )
            self._opened = _Opened(folder, manifest, chunks)
        return self._opened

    def read_metadata(self, *args: Any) -> Metadata:
        """Return the manifest as DCP metadata.

        Raises:
            CorruptionError, UnsupportedError, StorageError: it cannot be read.
        """
        try:
            return _metadata(self._open().manifest)
        except Exception as error:
            if not _torch.is_dcp_loading(sys._getframe(1)):
                raise
            # DCP would turn the error into an AssertionError; set_up_storage_reader() raises it
            # instead.
            self._failure = error
            return Metadata({})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Open the checkpoint.

        Raises:
            CorruptionError, UnsupportedError, StorageError: it cannot be read.
        """
        if self._failure is not None:
            raise self._failure
        self._open()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Verify what this rank will read, before any rank reads it.

        Raises:
            CorruptionError: it is damaged; the message names file, tensor and byte.
        """
        segments = [self._segment(item) for item in plan.items if item.type == LoadItemType.TENSOR]
        chunks = self._open().chunks
        if self._verify != "none":
            chunks.check_files(segment.chunk.file for segment in segments)
        if self._verify == "data":
            warn_without_checksums(self._open().manifest, str(self._path))
            chunks.verify(segments)
        opened = (str(self._path), self._open().manifest.fingerprint)
        return replace(plan, storage_data=opened)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks have opened the same checkpoint; return the plans unchanged.

        Raises:
            MismatchError: they have not.
        """
        opened = [plan.storage_data for plan in plans]
        if all(opened):  # a custom planner may have replaced them
            check_same(tuple(range(len(plans))), opened)
        return plans

    def _segment(self, item: ReadItem) -> Segment:
        key = item.storage_index.fqn
        entry = self._open().manifest.tensors[key]
        offsets = tuple(item.storage_index.offset or ())
        hint = item.storage_index.index
        if hint is None or entry.chunks[hint].box.offsets != offsets:
            hint = next(i for i, chunk in enumerate(entry.chunks) if chunk.box.offsets == offsets)
        inner = tuple(a + b for a, b in zip(offsets, item.storage_offsets, strict=True))
        return Segment(key, entry, entry.chunks[hint], Box(inner, tuple(item.lengths)))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items into the planner's tensors; blocks.

        Raises:
            MismatchError: a tensor has another dtype than the checkpoint's; nothing has been
                changed.
        """
        manifest = self._open().manifest
        targets: list[tuple[ReadItem, Segment, torch.Tensor]] = []
        for item in plan.items:
            if item.type == LoadItemType.TENSOR:
                segment, target = self._segment(item), planner.resolve_tensor(item).detach()
                if dtype_of(segment.key, target) != segment.entry.dtype:
                    raise MismatchError(
                        f"{self._path}: tensor {segment.key!r} is {segment.entry.dtype.name} in "
                        f"the checkpoint and {target.dtype} here"
                    )
                check_target(segment.key, target)
                if segment.inner.numel:
                    targets.append((item, segment, target))
        self._open().chunks.fill([(segment, target) for _, segment, target in targets])
        for item, _, target in targets:
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                key = item.storage_index.fqn
                planner.load_bytes(item, _pickled(decode(key, manifest.objects[key])))
        self._close()
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _pickled(value: Any) -> io.BytesIO:
    """Pickle a value for DCP's planner, which unpickles only what this process pickles here."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def _metadata(manifest: Manifest) -> Metadata:
    found: dict[str, Any] = {key: BytesStorageMetadata() for key in manifest.objects}
    for key, entry in manifest.tensors.items():
        chunks = [
            ChunkStorageMetadata(torch.Size(chunk.box.offsets), torch.Size(chunk.box.sizes))
            for chunk in entry.chunks
        ]
        if not chunks:  # an empty tensor, which DCP wants a chunk of
            whole = Box.whole(entry.shape)
            chunks = [ChunkStorageMetadata(torch.Size(whole.offsets), torch.Size(whole.sizes))]
        properties = TensorProperties(dtype=getattr(torch, entry.dtype.name))
        found[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
    paths = {
        key: tuple(
            str(item[0]) if isinstance(item, tuple) else item
            for item in manifest.paths.get(key, (key,))
        )
        for key in found
    }
    return Metadata(found, planner_data=paths)

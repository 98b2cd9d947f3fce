"""The storage layer for ``torch.distributed.checkpoint`` (DCP): its planners, our files.

DCP gathers plans on rank 0 and removes duplicates; what follows is ours. Values that are not
tensors are stored as JSON, so nothing is pickled into the checkpoint and nothing from it is
unpickled.
"""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
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
from torchrelay._boxes import Box
from torchrelay._names import names_options
from torchrelay._progress import Progress, tracking
from torchrelay.checkpoint._types import Manifest, TensorDescription, is_metadata
from torchrelay.checkpoint.engine._engine import MAX_STAGING_BYTES, Save, SaveOptions
from torchrelay.checkpoint.engine._group import check_same
from torchrelay.checkpoint.engine._overlap import finish_copies
from torchrelay.checkpoint.engine._read import (
    MAX_BUFFER_BYTES,
    ChunkReader,
    ChunkSlice,
    ReadOptions,
    warn_without_checksums,
)
from torchrelay.checkpoint.format._values import decode, encode
from torchrelay.checkpoint.plan._plan import Description, PlannedChunk, StateLayout
from torchrelay.checkpoint.state._state import Index, leaf_path
from torchrelay.checkpoint.state._tensors import (
    check_memory,
    check_target,
    data_of,
    dtype_of,
    memory_of,
)
from torchrelay.checkpoint.storage._catalog import Keep, check_keep
from torchrelay.checkpoint.storage._contract import Path, split, text_of
from torchrelay.errors import ArgumentError, MismatchError, UnsupportedError

__all__ = ["Reader", "Writer"]


class _AtPath:
    """A path, which DCP may give later, and what is under way there."""

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self._path = None if path is None else text_of(path)

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """Start a save or a load. Ends one that failed."""
        if checkpoint_id is not None:
            self._path = text_of(checkpoint_id)
        self._end()

    def _end(self) -> None:
        raise NotImplementedError

    def __del__(self) -> None:
        self._end()

    @property
    def _location(self) -> str:
        if self._path is None:
            raise ArgumentError(
                f"{type(self).__name__}() has no path: give it one, or DCP a checkpoint_id"
            )
        return self._path

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


class Writer(_AtPath, StorageWriter):
    """Storage writer for DCP, ``dcp.save(state, storage_writer=Writer(path))``: writes safetensors
    files that are committed in one step.

    Args:
        path: the folder or fsspec URL; ``checkpoint_id`` of ``dcp.save`` takes its place.
        threads: how many write at once; by default the usable cores, at most 4.
        fsync: whether the checkpoint must be on the disk when the save returns.
        checksum: whether to store CRC32C checksums.
        keep: how many checkpoints of its series to keep, as for :func:`save`.
        max_staging_bytes: host memory for copies of tensors that are not contiguous in host memory.
        progress: True for a progress bar on the coordinator, or a function (bytes done, bytes in
            all).

    Raises:
        ArgumentError: an argument is out of range.
    """

    _save: Save | None = None  # also of one whose arguments were wrong

    @names_options()
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
        super().__init__(path)
        self._options = SaveOptions(threads, fsync, checksum, keep, max_staging_bytes)
        check_keep(keep, path)
        self._progress = progress
        self._is_coordinator = False
        self._rank = 0

    def _end(self) -> None:
        save, self._save = self._save, None
        if save is not None and self._is_coordinator:
            save.transaction.discard()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note this rank's part in the save.

        Raises:
            ArgumentError: there is no path.
            UnsupportedError: ``use_collectives=False``: no rank would write the manifest.
        """
        save = Save(self._location, self._options)
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "a Writer needs use_collectives=True: rank 0 commits for all ranks"
            )
        self._is_coordinator = is_coordinator
        self._rank = kwargs.get("rank", 0)
        self._save = save

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the folder to write to."""
        assert self._save is not None
        self._save.transaction.begin()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items; blocks.

        Raises:
            ArgumentError: a value that JSON cannot hold; the message names its key.
            MismatchError: a tensor is not as the plan describes it.
            StorageError: a file cannot be written.
        """
        assert self._save is not None
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        values = [item.index for item in plan.items if item.type == WriteItemType.BYTE_IO]
        lookup: Any = getattr(planner, "lookup_object", None)
        if values and lookup is None:
            raise UnsupportedError(
                f"{values[0].fqn}: {type(planner).__name__} gives values as pickled bytes, which "
                "this checkpoint does not hold; derive the planner from DefaultSavePlanner"
            )
        objects = {index.fqn: encode(index.fqn, lookup(index)) for index in values}
        found = _chunks(tensors, planner)
        chunks = [chunk for chunk, _ in found]
        size_bytes = sum(chunk.size_bytes for chunk in chunks)
        data = [data_of(tensor) for _, tensor in found]
        with tracking(self._progress, size_bytes, "saving", shown=self._is_coordinator) as advance:
            part = self._save.write(self._rank, chunks, data, advance)
        part.objects = objects
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(""), size_bytes, part)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint.

        Raises:
            StorageError: a rank has written elsewhere, or the checkpoint cannot be committed.
        """
        assert self._save is not None
        save, parts = self._save, [part.storage_data for (part,) in results]
        tensors = {
            key: TensorDescription(
                str(found.properties.dtype).removeprefix("torch."), tuple(found.size)
            )
            for key, found in metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }
        try:
            layout = StateLayout(tensors, dict(metadata.planner_data or {}))
            save.commit([Description(layout, {})], parts)
        finally:
            self._end()


def _chunks(
    items: list[WriteItem], planner: SavePlanner
) -> list[tuple[PlannedChunk, torch.Tensor]]:
    """Return what to write; items of tied tensors share a chunk."""
    found: dict[object, tuple[PlannedChunk, torch.Tensor]] = {}
    for number, item in enumerate(items):
        key, tensor, data = item.index.fqn, planner.resolve_data(item), item.tensor_data
        assert isinstance(tensor, torch.Tensor) and data is not None
        dtype = dtype_of(key, tensor)
        check_memory(key, tensor)
        planned = data.properties.dtype, tuple(data.chunk.sizes)
        if (tensor.dtype, tuple(tensor.shape)) != planned:
            raise MismatchError(
                f"{key}: {type(planner).__name__} plans a tensor of {planned[0]} and shape "
                f"{list(planned[1])}, and resolve_data() gives one of {tensor.dtype} and shape "
                f"{list(tensor.shape)}; let create_local_plan() change the item's tensor_data too"
            )
        if tensor.numel():
            box, shape = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)), tuple(data.size)
            memory = memory_of(tensor)
            place = number if memory is None else (memory, shape, box.offsets)
            chunk, tensor = found.get(place) or (
                PlannedChunk((), dtype, shape, box, box.numel * dtype.itemsize),
                tensor,
            )
            found[place] = chunk._replace(keys=(*chunk.keys, key)), tensor
    return list(found.values())


class Reader(_AtPath, StorageReader):
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

    _opened: ChunkReader | None = None

    @names_options()
    def __init__(
        self,
        path: Path | None = None,
        *,
        verify: str = "data",
        threads: int | None = None,
        max_buffer_bytes: int = MAX_BUFFER_BYTES,
    ) -> None:
        super().__init__(path)
        self._options = ReadOptions(verify, threads, max_buffer_bytes)
        self._failure: Exception | None = None

    def _end(self) -> None:
        opened, self._opened, self._failure = self._opened, None, None
        if opened is not None:
            opened.close()

    def _open(self) -> ChunkReader:
        if self._opened is None:
            self._opened = ChunkReader.open(self._location, self._options)
        return self._opened

    def read_metadata(self, *args: Any) -> Metadata:
        """Return the manifest as DCP metadata.

        Raises:
            CorruptionError, UnsupportedError, StorageError: it cannot be read.
        """
        try:
            return _metadata(self._open().manifest.without_exports())
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
        reader = self._open()
        if self._options.verify != "none":
            reader.check_files(segment.chunk.file for segment in segments)
        if self._options.verify == "data":
            warn_without_checksums(reader.manifest, str(self._path))
            reader.verify(segments)
        opened = (str(self._path), reader.manifest.fingerprint)
        return replace(plan, storage_data=opened)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks have opened the same checkpoint; return the plans unchanged.

        Raises:
            MismatchError: they have not.
        """
        opened = [plan.storage_data for plan in plans]
        if all(opened):  # a custom planner may have replaced them
            check_same(range(len(plans)), opened)
        return plans

    def _segment(self, item: ReadItem) -> ChunkSlice:
        key = item.storage_index.fqn
        entry = self._open().manifest.tensors[key]
        entry.check_known(key, self._location)
        offsets = tuple(item.storage_index.offset or ())
        hint = item.storage_index.index
        if hint is None or entry.chunks[hint].box.offsets != offsets:
            hint = next(i for i, chunk in enumerate(entry.chunks) if chunk.box.offsets == offsets)
        inner = tuple(a + b for a, b in zip(offsets, item.storage_offsets, strict=True))
        return ChunkSlice(key, entry, entry.chunks[hint], Box(inner, tuple(item.lengths)))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items into the planner's tensors; blocks.

        Raises:
            MismatchError: a tensor has another dtype than the checkpoint's; nothing has been
                changed.
        """
        manifest = self._open().manifest
        targets: list[tuple[ReadItem, ChunkSlice, torch.Tensor]] = []
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
        # Of tied tensors, the last one, as in load().
        filled = {memory_of(target): (segment, target) for _, segment, target in targets}
        finish_copies()  # of what this changes
        self._open().fill(filled.values())
        for item, _, target in targets:
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                key = item.storage_index.fqn
                planner.load_bytes(item, _pickled(decode(key, manifest.objects[key])))
        self._end()
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
    found: dict[str, Any] = {
        key: BytesStorageMetadata() for key in manifest.objects if not is_metadata(key)
    }
    for key, entry in manifest.tensors.items():
        chunks = [
            ChunkStorageMetadata(torch.Size(chunk.box.offsets), torch.Size(chunk.box.sizes))
            for chunk in entry.chunks
        ]
        if not chunks:  # an empty tensor, which DCP wants a chunk of
            whole = Box.whole(entry.shape)
            chunks = [ChunkStorageMetadata(torch.Size(whole.offsets), torch.Size(whole.sizes))]
        properties = TensorProperties(dtype=getattr(torch, entry.dtype.name, torch.uint8))
        found[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
    paths = {
        key: tuple(
            int(step) if isinstance(step, Index) else str(step)
            for step in leaf_path(manifest.paths.get(key, (key,)))
        )
        for key in found
    }
    return Metadata(found, planner_data=paths)

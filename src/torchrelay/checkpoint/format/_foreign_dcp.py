"""Checkpoints that ``torch.distributed.checkpoint`` wrote with its own writer, described by a
manifest.

Its ``.metadata`` is a pickle, and each chunk a file of ``torch.save`` inside a larger file. Both
are read without running what a pickle asks to run: of the first, only the classes that such files
need are known; of the others, torch reads no more than where the data lie.
"""

from __future__ import annotations

import io
import os
import pickle
from typing import Any

import torch

from torchrelay import _torch
from torchrelay._boxes import Box
from torchrelay.checkpoint._types import DTYPES, Chunk, DataFile, Dtype, Manifest, TensorEntry
from torchrelay.checkpoint.format._pickles import load_pickled
from torchrelay.checkpoint.format._values import PICKLE, encode
from torchrelay.checkpoint.storage._local import LocalFolder
from torchrelay.errors import ArgumentError, CorruptionError, UnsupportedError

__all__ = ["manifest_of_dcp"]

_METADATA = ".metadata"
_MAX_METADATA_BYTES = 1 << 30

_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that knows the classes of DCP's metadata, and nothing that could do harm."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name not in _KNOWN.get(module, ()) and not is_dtype:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def manifest_of_dcp(folder: LocalFolder) -> Manifest:
    """Return a manifest for a checkpoint of DCP's ``FileSystemWriter``.

    Raises:
        CorruptionError: it is damaged, or its pickles need classes that such files never contain.
        UnsupportedError: its chunks are compressed.
    """
    where = f"{folder.location}/{_METADATA}"
    size = folder.size_bytes(_METADATA)
    if size > _MAX_METADATA_BYTES:
        raise CorruptionError(f"{where}: {size} bytes are more than metadata may have")
    data = bytearray(size)
    folder.read(_METADATA, 0, memoryview(data))
    try:
        return _manifest(folder, _MetadataUnpickler(io.BytesIO(data)).load())
    except (CorruptionError, UnsupportedError):
        raise
    except Exception as error:  # whatever damaged input makes it raise
        raise CorruptionError(f"{where}: not the metadata of a DCP checkpoint ({error})") from error


def _manifest(folder: LocalFolder, metadata: Any) -> Manifest:
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, Any] = {}
    files: dict[str, DataFile] = {}
    places = {(index.fqn, index.offset): info for index, info in metadata.storage_data.items()}
    for name in {info.relative_path for info in places.values()}:
        if os.path.basename(name) != name:
            raise CorruptionError(
                f"{folder.location}: {name!r} is not a file inside the checkpoint"
            )
    for key, found in metadata.state_dict_metadata.items():
        if not hasattr(found, "chunks"):
            objects[key] = _value(folder, key, places[key, None])
            continue
        name = str(found.properties.dtype).removeprefix("torch.")
        dtype = DTYPES.get(name) or Dtype.unknown(name)
        chunks = []
        for stored in found.chunks:
            box, info = Box(tuple(stored.offsets), tuple(stored.sizes)), places[key, stored.offsets]
            if box.numel:
                chunks.append(_chunk(folder, key, dtype, box, info))
                files[info.relative_path] = DataFile(folder.size_bytes(info.relative_path), 0, 0)
        tensors[key] = TensorEntry(dtype, tuple(found.size), tuple(chunks))
    paths = {key: tuple(path) for key, path in (metadata.planner_data or {}).items()}
    return Manifest("", 1, files, tensors, objects, paths)


def _chunk(folder: LocalFolder, key: str, dtype: Dtype, box: Box, info: Any) -> Chunk:
    """Find the elements of a chunk in its file."""
    if not dtype.itemsize:
        return Chunk(box, info.relative_path, info.offset, info.length)
    if getattr(info, "transform_descriptors", None):
        raise UnsupportedError(
            f"{folder.location}: tensor {key!r} is compressed; load it with DCP's own reader"
        )
    with folder.open(info.relative_path) as file:
        stored, storage = _torch.saved_tensor(file, info.offset, info.length)
    if (tuple(stored.shape), stored.dtype) != (box.sizes, getattr(torch, dtype.name)):
        raise CorruptionError(
            f"{folder.location}/{info.relative_path}: tensor {key!r} is stored as {stored.dtype} "
            f"of shape {list(stored.shape)}, and its metadata have {dtype.name} of shape "
            f"{list(box.sizes)}"
        )
    if storage + stored.untyped_storage().nbytes() > info.length:
        raise CorruptionError(
            f"{folder.location}/{info.relative_path}: tensor {key!r} is cut short"
        )
    start = info.offset + storage + stored.storage_offset() * dtype.itemsize
    strides = None if stored.is_contiguous() else stored.stride()
    size_bytes = box.numel * dtype.itemsize
    return Chunk(box, info.relative_path, start, size_bytes, strides=strides)


def _value(folder: LocalFolder, key: str, info: Any) -> Any:
    """Return an encoded value that is not a tensor; unsafe ones raise only when they are needed."""
    data = bytearray(info.length)
    folder.read(info.relative_path, info.offset, memoryview(data))
    try:
        return encode(key, load_pickled(io.BytesIO(data)))
    except (pickle.UnpicklingError, ArgumentError, UnsupportedError) as error:
        return {PICKLE: str(error)[:200].partition(", which is not run")[0]}

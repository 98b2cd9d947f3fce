"""Checkpoints that ``torch.distributed.checkpoint`` wrote with its own writer, described by a
manifest.

Its ``.metadata`` is a pickle, and each chunk a file of ``torch.save`` inside a larger file: a zip
archive whose tensor data are stored as they are. Both are read without running what a pickle asks
to run: only the classes that such files need are known, and in a chunk they only record where the
data lie.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from torchrelay.checkpoint._boxes import row_major_strides
from torchrelay.checkpoint._local import LocalFolder
from torchrelay.checkpoint._types import DTYPES, Box, Chunk, DataFile, Dtype, Manifest, TensorEntry
from torchrelay.checkpoint._values import encode
from torchrelay.errors import ArgumentError, CorruptionError, UnsupportedError

__all__ = ["METADATA", "manifest_of_dcp"]

METADATA = ".metadata"
_MAX_METADATA_BYTES = 1 << 30
T = TypeVar("T")
_ZIP_HEADER = struct.Struct("<26xHH")  # of a member: lengths of its name and of its extra field

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
    "torch": {"Size", "device", *DTYPES},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that knows the classes of DCP's metadata, and nothing that could do harm."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


@dataclass(frozen=True)
class _Stored:
    """A tensor in a ``torch.save`` file: the name of its storage, its offset, shape and strides."""

    storage: str
    first: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class _TensorUnpickler(pickle.Unpickler):
    """Unpickler that returns a :class:`_Stored` for a tensor and creates nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        # The second is for dtypes without a storage class of their own, such as float8_e4m3fn.
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return lambda storage, first, sizes, strides, *_: _Stored(
                storage, first, tuple(sizes), tuple(strides)
            )
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return name
        if module == "torch" and name in DTYPES:
            return name
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid[2]


class _Slice(io.RawIOBase):
    """A range of a file, as a file object."""

    def __init__(self, folder: LocalFolder, name: str, start: int, size: int) -> None:
        self._folder, self._name, self._start, self._size = folder, name, start, size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._position)
        data = bytearray(left if size < 0 else min(size, left))
        self._folder.read(self._name, self._start + self._position, memoryview(data))
        self._position += len(data)
        return bytes(data)


def manifest_of_dcp(folder: LocalFolder) -> Manifest:
    """Return a manifest for a checkpoint of DCP's ``FileSystemWriter``.

    Raises:
        CorruptionError: it is damaged, or its pickles need classes that such files never contain.
        UnsupportedError: its chunks are compressed.
    """
    where = f"{folder.location}/{METADATA}"
    size = folder.size_bytes(METADATA)
    if size > _MAX_METADATA_BYTES:
        raise CorruptionError(f"{where}: {size} bytes are more than metadata may have")
    data = bytearray(size)
    folder.read(METADATA, 0, memoryview(data))
    metadata = _guarded(where, lambda: _MetadataUnpickler(io.BytesIO(data)).load())
    return _guarded(where, lambda: _manifest(folder, metadata))


def _guarded(where: str, read: Callable[[], T]) -> T:
    """Call ``read``; convert whatever damaged input makes it raise."""
    try:
        return read()
    except (CorruptionError, UnsupportedError):
        raise
    except Exception as error:
        raise CorruptionError(f"{where}: not the metadata of a DCP checkpoint ({error})") from error


def _manifest(folder: LocalFolder, metadata: Any) -> Manifest:
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, Any] = {}
    files: dict[str, DataFile] = {}
    places = {(index.fqn, index.offset): info for index, info in metadata.storage_data.items()}
    for key, found in metadata.state_dict_metadata.items():
        if not hasattr(found, "chunks"):
            objects[key] = _value(folder, key, places[key, None])
            continue
        dtype = DTYPES[str(found.properties.dtype).removeprefix("torch.")]
        chunks = []
        for stored in found.chunks:
            box, info = Box(tuple(stored.offsets), tuple(stored.sizes)), places[key, stored.offsets]
            if box.numel:
                chunks.append(_chunk(folder, key, dtype, box, info))
                files[info.relative_path] = DataFile(folder.size_bytes(info.relative_path), 0, 0)
        tensors[key] = TensorEntry(dtype, tuple(found.size), tuple(chunks))
    paths = {key: tuple(path) for key, path in (metadata.planner_data or {}).items()}
    return Manifest("", 0, 1, files, tensors, objects, paths)


def _chunk(folder: LocalFolder, key: str, dtype: Dtype, box: Box, info: Any) -> Chunk:
    """Find the elements of a chunk in its file."""
    if os.path.basename(info.relative_path) != info.relative_path:
        raise CorruptionError(
            f"{folder.location}: {info.relative_path!r} is not a file inside the checkpoint"
        )
    if getattr(info, "transform_descriptors", None):
        raise UnsupportedError(
            f"{folder.location}: tensor {key!r} is compressed; load it with DCP's own reader"
        )
    part = _Slice(folder, info.relative_path, info.offset, info.length)
    with zipfile.ZipFile(part) as archive:
        pickled = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        stored = _TensorUnpickler(io.BytesIO(archive.read(pickled))).load()
        member = archive.getinfo(f"{pickled.removesuffix('data.pkl')}data/{stored.storage}")
    if member.compress_type != zipfile.ZIP_STORED:
        raise UnsupportedError(
            f"{folder.location}: tensor {key!r} is compressed; load it with DCP's own reader"
        )
    part.seek(member.header_offset)
    name_bytes, extra_bytes = _ZIP_HEADER.unpack(part.read(_ZIP_HEADER.size))
    storage = member.header_offset + _ZIP_HEADER.size + name_bytes + extra_bytes
    last = stored.first + sum(
        (size - 1) * stride for size, stride in zip(box.sizes, stored.strides, strict=True)
    )
    if stored.sizes != box.sizes or min(stored.first, *stored.strides, 0) < 0:
        raise CorruptionError(
            f"{folder.location}/{info.relative_path}: tensor {key!r} is stored with shape "
            f"{list(stored.sizes)}, strides {list(stored.strides)} and offset {stored.first}, and "
            f"its metadata have shape {list(box.sizes)}"
        )
    if (last + 1) * dtype.itemsize > member.file_size or storage + member.file_size > info.length:
        raise CorruptionError(
            f"{folder.location}/{info.relative_path}: tensor {key!r} is cut short"
        )
    start = info.offset + storage + stored.first * dtype.itemsize
    strides = None if stored.strides == row_major_strides(box.sizes) else stored.strides
    return Chunk(box, info.relative_path, key, start, strides=strides)


def _value(folder: LocalFolder, key: str, info: Any) -> Any:
    """Return an encoded value that is not a tensor; unsafe ones raise only when they are needed."""
    part = _Slice(folder, info.relative_path, info.offset, info.length)
    try:
        return encode(key, torch.load(io.BytesIO(part.read()), weights_only=True))
    except (pickle.UnpicklingError, ArgumentError) as error:
        return {"$pickle": str(error)[:200]}

"""Checkpoints of any format: ours, DCP's, and safetensors files, described by a manifest that is
made here.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrelay.checkpoint import _catalog
from torchrelay.checkpoint._boxes import tiling_fault
from torchrelay.checkpoint._data_file import StoredTensor, header_size, parse_header
from torchrelay.checkpoint._local import LocalFolder
from torchrelay.checkpoint._manifest import from_folder
from torchrelay.checkpoint._storage import Folder, Path, local_path
from torchrelay.checkpoint._types import (
    DTYPES,
    MANIFEST,
    Box,
    Chunk,
    DataFile,
    Dtype,
    Manifest,
    TensorEntry,
)
from torchrelay.errors import CorruptionError, StorageError

__all__ = ["find_checkpoint"]

_BY_CODE: Mapping[str, Dtype] = {
    dtype.code: dtype for dtype in reversed(list(DTYPES.values())) if dtype.width == 1
}
_SHARDING = "DCP_SHARDING_INFO"  # in the metadata of files of DCP's Hugging Face writer


def find_checkpoint(path: Path) -> tuple[Folder, Callable[[], Manifest]]:
    """Return the folder of a checkpoint, and a function that reads its manifest, or makes one from
    the headers of safetensors files.

    Args:
        path: the folder, a fsspec URL, or one safetensors file.

    Raises:
        StorageError: there is nothing of the kind at ``path``.
        CorruptionError, UnsupportedError: from the function, as for reading a manifest.
    """
    local = local_path(path)
    if local is None:
        remote = _catalog.open_folder(path)
        return remote, lambda: from_folder(remote)
    if os.path.isfile(local):
        single = LocalFolder(os.path.dirname(local) or ".", follow_links=True)
        return single, lambda: _manifest_of(single, [os.path.basename(local)])
    if not os.path.isdir(local):
        newest = _catalog.newest_inside(os.path.dirname(os.path.abspath(local)))
        hint = f"; retention (keep=) may have removed it: the newest is {newest}" if newest else ""
        raise StorageError(errno.ENOENT, f"{local}: there is no checkpoint here{hint}")
    folder = LocalFolder(local)
    names = folder.names()
    if MANIFEST in names or folder.replaced:
        # Then its files are being removed, and reading is tried again.
        return folder, lambda: from_folder(folder)
    if ".metadata" in names:
        from torchrelay.checkpoint._foreign_dcp import manifest_of_dcp  # noqa: PLC0415 - needs torch

        return folder, lambda: manifest_of_dcp(folder)
    folder.close()
    return _find_foreign(local, [name for name in names if name.endswith(".safetensors")])


def _find_foreign(local: str, names: list[str]) -> tuple[Folder, Callable[[], Manifest]]:
    if not names:
        newest = _catalog.newest_inside(local)
        if newest:
            raise StorageError(
                errno.ENOENT,
                f"{local}: not a checkpoint, but a folder of checkpoints; the newest is "
                f"{os.path.join(local, newest)}",
            )
        raise StorageError(
            errno.ENOENT,
            f"{local}: not a checkpoint: there is neither {MANIFEST}, which a save writes last, "
            "nor a safetensors file",
        )
    if any(name.startswith("data-") for name in names):
        raise CorruptionError(
            f"{local}: {MANIFEST} is missing, without which the data files are no checkpoint"
        )
    folder = LocalFolder(local, follow_links=True)  # as Hugging Face's cache has them
    return folder, lambda: _manifest_of(folder, names)


def _manifest_of(folder: Folder, names: list[str]) -> Manifest:
    files: dict[str, DataFile] = {}
    found: dict[str, list[tuple[str, Chunk]]] = {}  # dtypes and chunks of each tensor
    for name in names:
        where = f"{folder.location}/{name}"
        size = folder.size_bytes(name)
        first = bytearray(min(8, size))
        folder.read(name, 0, memoryview(first))
        header = bytearray(header_size(bytes(first), size, where))
        folder.read(name, 0, memoryview(header))
        files[name] = DataFile(size, len(header), 0)
        tensors, metadata = parse_header(bytes(header), size, where)
        offsets = _saved_offsets(metadata, tensors, where)
        for key, stored in tensors.items():
            if key in found and key not in offsets:
                other = found[key][0][1].file
                raise CorruptionError(
                    f"{folder.location}: tensor {key!r} is in {other} and in {name}"
                )
            box = Box(offsets.get(key, (0,) * len(stored.shape)), stored.shape)
            chunk = Chunk(box, name, stored.start, stored.size_bytes)
            found.setdefault(key, []).append((stored.code, chunk))
    return Manifest("", 1, files, {key: _join(key, parts, folder) for key, parts in found.items()})


def _saved_offsets(
    metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor], where: str
) -> dict[str, tuple[int, ...]]:
    """Return where each tensor of a file begins in the whole one.

    DCP's ``HuggingFaceStorageWriter(save_distributed=True)`` says so; other writers store whole
    tensors, and the result is empty.

    Raises:
        CorruptionError: what the file says cannot be.
    """
    if _SHARDING not in metadata:
        return {}
    try:
        sharding = json.loads(metadata[_SHARDING])
        offsets = {
            key: tuple(int(offset) for offset in sharding[key]["saved_offsets"]) for key in tensors
        }
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptionError(f"{where}: {_SHARDING} is damaged ({error!r})") from None
    for key, begin in offsets.items():
        if len(begin) != len(tensors[key].shape) or any(o < 0 or o >= 1 << 62 for o in begin):
            raise CorruptionError(f"{where}: tensor {key!r} cannot begin at {begin}")
    return offsets


def _join(key: str, parts: Sequence[tuple[str, Chunk]], folder: Folder) -> TensorEntry:
    """Return the tensor of which files have ``parts``, their dtypes and chunks."""
    codes, chunks = {code for code, _ in parts}, tuple(chunk for _, chunk in parts)
    ends = [[begin + size for begin, size in zip(*chunk.box, strict=True)] for chunk in chunks]
    shape = tuple(map(max, zip(*ends, strict=False)))
    fault = tiling_fault(shape, [chunk.box for chunk in chunks])
    if fault or len(codes) > 1:
        raise CorruptionError(
            f"{folder.location}: tensor {key!r}: {fault or 'its parts have different dtypes'}; the "
            "files of all ranks must be there, of one checkpoint"
        )
    return TensorEntry(_BY_CODE[codes.pop()], shape, chunks)

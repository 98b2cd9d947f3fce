"""Checkpoints of any format: ours, DCP's, and safetensors files, described by a manifest that is
made here.
"""

from __future__ import annotations

import errno
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torchrelay.checkpoint import _catalog
from torchrelay.checkpoint._boxes import tiling_fault
from torchrelay.checkpoint._data_file import StoredTensor, header_size, parse_header
from torchrelay.checkpoint._local import LocalFolder
from torchrelay.checkpoint._manifest import from_folder
from torchrelay.checkpoint._storage import Folder, Path, local_path, open_folder
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
        remote = open_folder(path)
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
    found: dict[str, list[_Piece]] = defaultdict(list)
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
            found[key].append(_Piece(name, stored, offsets.get(key)))
    return Manifest(
        "", 0, 1, files, {key: _join(key, pieces, folder) for key, pieces in found.items()}
    )


class _Piece(NamedTuple):
    """A tensor of a file; with ``offsets``, a block of a tensor that several files share."""

    file: str
    stored: StoredTensor
    offsets: tuple[int, ...] | None


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


def _join(key: str, pieces: Sequence[_Piece], folder: Folder) -> TensorEntry:
    first = pieces[0]
    for other in pieces[1:]:
        if first.offsets is None or other.offsets is None:
            raise CorruptionError(
                f"{folder.location}: tensor {key!r} is in {first.file} and in {other.file}"
            )
        if (other.stored.code, len(other.offsets)) != (first.stored.code, len(first.offsets)):
            raise CorruptionError(
                f"{folder.location}: tensor {key!r} has another dtype or number of dimensions in "
                f"{other.file} than in {first.file}"
            )
    boxes = [
        Box(piece.offsets or (0,) * len(piece.stored.shape), piece.stored.shape) for piece in pieces
    ]
    shape = tuple(
        max(box.offsets[dim] + box.sizes[dim] for box in boxes)
        for dim in range(len(boxes[0].sizes))
    )
    if fault := tiling_fault(shape, boxes):
        raise CorruptionError(
            f"{folder.location}: tensor {key!r}: {fault}; the files of all ranks must be there"
        )
    chunks = tuple(
        Chunk(box, piece.file, key, piece.stored.start, piece.stored.size_bytes)
        for box, piece in zip(boxes, pieces, strict=True)
    )
    return TensorEntry(_BY_CODE[first.stored.code], shape, chunks)

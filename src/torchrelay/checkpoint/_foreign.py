"""Checkpoints of any format: ours, DCP's, and safetensors files, described by a manifest that is
made here.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrelay.checkpoint import _catalog
from torchrelay.checkpoint._boxes import tiling_fault
from torchrelay.checkpoint._local import LocalFolder
from torchrelay.checkpoint._manifest import from_folder
from torchrelay.checkpoint._storage import Folder, Path, local_path
from torchrelay.checkpoint._types import (
    DTYPES,
    MANIFEST,
    MAX_HEADER_BYTES,
    PADDING,
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
_WRITER = {"writer": "torchrelay"}  # in the metadata of a file that has padding
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
        header = bytearray(min(8, size))
        folder.read(name, 0, memoryview(header))
        header = bytearray(_header_size(bytes(header), size, where))
        folder.read(name, 0, memoryview(header))
        files[name] = DataFile(size, len(header), 0)
        chunks, metadata = _parse_header(bytes(header), files[name], name, where)
        offsets = _saved_offsets(metadata, chunks, where)
        for key, (code, chunk) in chunks.items():
            if key in found and key not in offsets:
                other = found[key][0][1].file
                raise CorruptionError(
                    f"{folder.location}: tensor {key!r} is in {other} and in {name}"
                )
            box = Box(offsets.get(key, chunk.box.offsets), chunk.box.sizes)
            found.setdefault(key, []).append((code, chunk._replace(box=box)))
    return Manifest("", 1, files, {key: _join(key, parts, folder) for key, parts in found.items()})


def _saved_offsets(
    metadata: Mapping[str, Any], chunks: Mapping[str, tuple[str, Chunk]], where: str
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
            key: tuple(int(offset) for offset in sharding[key]["saved_offsets"]) for key in chunks
        }
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptionError(f"{where}: {_SHARDING} is damaged ({error!r})") from None
    for key, begin in offsets.items():
        if len(begin) != len(chunks[key][1].box.sizes) or any(o < 0 or o >= 1 << 62 for o in begin):
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


def _header_size(first_bytes: bytes, file_bytes: int, where: str) -> int:
    """Return the length of the header that begins with these 8 bytes, including them.

    Raises:
        CorruptionError: the length is impossible.
    """
    if len(first_bytes) < 8:
        raise CorruptionError(f"{where}: {file_bytes} bytes are too few for a safetensors file")
    size = int(struct.unpack("<Q", first_bytes[:8])[0])
    if size + 8 > MAX_HEADER_BYTES or size + 8 > file_bytes:
        if first_bytes.startswith(b"PK\x03\x04"):
            raise CorruptionError(
                f"{where}: a zip archive, as torch.save writes; convert it with 'torchrelay "
                f"checkpoint convert {where} FOLDER --to torchrelay', and load FOLDER"
            )
        raise CorruptionError(
            f"{where}: not a safetensors file (it claims a header of {size} bytes)"
        )
    return size + 8


def _parse_header(
    header: bytes, file: DataFile, name: str, where: str
) -> tuple[dict[str, tuple[str, Chunk]], dict[str, Any]]:
    """Return the dtype and chunk of each tensor that a header describes, without padding, and the
    file's metadata.

    Raises:
        CorruptionError: it is damaged or describes what the file cannot hold.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise CorruptionError(f"{where}: the header names a tensor twice")
        return dict(pairs)

    try:
        entries = json.loads(header[8:], object_pairs_hook=unique)
        metadata = entries.pop("__metadata__", None) or {}
        is_ours = _WRITER.items() <= metadata.items()
        found = {
            key: (entry["dtype"], _chunk(entry, name, len(header)))
            for key, entry in entries.items()
            if not (is_ours and key.startswith(PADDING))
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptionError(f"{where}: the safetensors header is damaged ({error})") from None
    for key, (_, chunk) in found.items():
        if chunk.start + chunk.size_bytes > file.size_bytes:
            raise CorruptionError(
                f"{where}: tensor {key!r} ends at byte {chunk.start + chunk.size_bytes} of a file "
                f"of {file.size_bytes} bytes; the file is cut short"
            )
    return found, metadata


def _chunk(entry: Any, name: str, base: int) -> Chunk:
    shape = tuple(int(size) for size in entry["shape"])
    start, end = (int(position) for position in entry["data_offsets"])
    if start < 0 or any(size < 0 for size in shape):
        raise ValueError("a negative size")
    if end - start != math.prod(shape) * _BY_CODE[entry["dtype"]].itemsize:
        raise ValueError(f"{shape} of {entry['dtype']} does not have {end - start} bytes")
    return Chunk(Box.whole(shape), name, base + start, end - start)

"""Checkpoints of any format: ours, DCP's, and safetensors files, described by a manifest that is
made here.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from operator import add
from typing import Any

from torchrelay.checkpoint import _catalog
from torchrelay.checkpoint._local import LocalFolder
from torchrelay.checkpoint._manifest import PARSING_ERRORS, Parser, from_folder, parse
from torchrelay.checkpoint._safetensors import read_header
from torchrelay.checkpoint._storage import Folder, Path, local_path
from torchrelay.checkpoint._types import (
    BLOCK_BYTES,
    DATA_NAME,
    INDEX,
    MANIFEST,
    MAX_HEADER_BYTES,
    DataFile,
    Manifest,
)
from torchrelay.errors import CorruptionError, StorageError

__all__ = ["find_checkpoint"]

_SINGLE = "model.safetensors"  # Hugging Face's, of a model in one file
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
        single = LocalFolder(os.path.dirname(local) or ".")
        return single, lambda: _manifest_of(single, [os.path.basename(local)])
    folder = LocalFolder(local)
    names = folder.names()
    if MANIFEST in names or folder.replaced:
        # Then its files are being removed, and reading is tried again.
        return folder, lambda: from_folder(folder)
    if ".metadata" in names:
        from torchrelay.checkpoint._foreign_dcp import manifest_of_dcp  # noqa: PLC0415 - needs torch

        return folder, lambda: manifest_of_dcp(folder)
    files = sorted(name for name in names if name.endswith(".safetensors"))
    if files and not any(map(DATA_NAME.fullmatch, files)):
        return folder, lambda: _manifest_of_folder(folder, files, INDEX in names)
    folder.close()
    if files:
        raise CorruptionError(
            f"{local}: {MANIFEST} is missing, without which the data files are no checkpoint"
        )
    what = f"not a checkpoint: neither {MANIFEST}, which a save writes last, nor safetensors files"
    if newest := _catalog.newest_inside(local):
        what = (
            f"not a checkpoint, but a folder of them; the newest is {os.path.join(local, newest)}"
        )
    elif not os.path.isdir(local):
        what = "there is no checkpoint here"
        if newest := _catalog.newest_inside(os.path.dirname(os.path.abspath(local))):
            what += f"; retention (keep=) may have removed it: the newest is {newest}"
    raise StorageError(errno.ENOENT, f"{local}: {what}")


class _RepeatedError(CorruptionError):
    """A tensor is in two files."""


def _manifest_of_folder(folder: Folder, files: list[str], has_index: bool) -> Manifest:
    """Describe all safetensors files of a folder; of a Hugging Face snapshot that holds the weights
    several times, those that transformers reads.
    """
    if _SINGLE in files:
        try:
            return _manifest_of(folder, files)
        except _RepeatedError:
            return _manifest_of(folder, [_SINGLE])
    if has_index:
        where = f"{folder.location}/{INDEX}"
        index = parse(folder.content(INDEX, MAX_HEADER_BYTES), where, "the index")
        try:
            listed = {*index["weight_map"].values()}
        except PARSING_ERRORS as error:
            raise CorruptionError(f"{where}: the index is damaged ({error})") from None
        files = [name for name in files if name in listed]  # perhaps a part of the snapshot
        if not files:
            raise CorruptionError(f"{where}: none of the files that it lists is in the folder")
    return _manifest_of(folder, files)


def _manifest_of(folder: Folder, names: list[str]) -> Manifest:
    """Describe safetensors files as the manifest of a checkpoint does, so that they are checked
    like one.
    """
    files: dict[str, DataFile] = {}
    records: dict[str, dict[str, Any]] = {}
    parser = Parser(folder.location)
    for name in names:
        where = f"{folder.location}/{name}"
        header = read_header(folder, name)
        files[name] = header.file
        try:
            # DCP's HuggingFaceStorageWriter(save_distributed=True) says where each tensor begins in
            # the whole one; other writers store whole tensors.
            begins = json.loads(header.metadata.get(_SHARDING, "null"))
            for key, (dtype, shape, start, end) in header.tensors.items():
                begin = begins[key]["saved_offsets"] if begins else [0] * len(shape)
                record = records.setdefault(
                    key, {"dtype": dtype.name, "shape": [0] * len(shape), "chunks": []}
                )
                if record["chunks"] and not begins:
                    other = record["chunks"][0]["file"]
                    text = f"tensor {key!r} is in {other} and in {name}"
                    raise _RepeatedError(f"{folder.location}: {text}")
                if record["dtype"] != dtype.name:
                    parser.fail(f"tensor {key!r}: its parts have different dtypes")
                record["shape"] = [*map(max, record["shape"], map(add, begin, shape))]
                record["chunks"].append(
                    {
                        "offsets": begin,
                        "sizes": shape,
                        "file": name,
                        "bytes": [start, end],
                        "crc32c": "",
                    }
                )
        except (*PARSING_ERRORS, RecursionError) as error:
            raise CorruptionError(f"{where}: the safetensors header is damaged ({error})") from None
        if begins:
            parser.advice = "; the files of all ranks must be there, of one checkpoint"
    return Manifest("", 1, files, parser.tensors(records, files, BLOCK_BYTES))

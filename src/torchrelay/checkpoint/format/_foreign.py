"""Checkpoints of any format: ours, DCP's, and safetensors files, described by a manifest that is
made here.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any

from torchrelay.checkpoint._types import (
    BLOCK_BYTES,
    DATA_NAME,
    INDEX,
    MANIFEST,
    MAX_HEADER_BYTES,
    DataFile,
    Manifest,
)
from torchrelay.checkpoint.format._manifest import (
    PARSING_ERRORS,
    Parser,
    from_folder,
    is_ours,
    parse,
)
from torchrelay.checkpoint.format._safetensors import read_header
from torchrelay.checkpoint.storage import _catalog
from torchrelay.checkpoint.storage._contract import Folder, Path, local_path
from torchrelay.checkpoint.storage._local import LocalFolder
from torchrelay.errors import ArgumentError, CorruptionError, StorageError

__all__ = ["Snapshot", "check_complete", "open_checkpoint"]

_SINGLE = "model.safetensors"  # Hugging Face's, of a model in one file
_SHARDING = "DCP_SHARDING_INFO"  # in the metadata of files of DCP's Hugging Face writer
_CONFIG = "config.json"
_PICKLES = (".bin", ".ckpt", ".pt", ".pth")  # of files that torch.save may have written
_ADAPTER = "adapter_model"  # what the files of peft begin with
_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True)
class Snapshot(Manifest):
    """The manifest of safetensors files of others, in a folder or alone.

    Attributes:
        location: the folder.
        absent: the tensors that its index names and whose file is not there, with this file.
        absent_files: files that are not there, by the names of the others, if there is no index.
        is_adapter: whether it holds what peft adds to a model, without the model.
        is_converted: whether transformers may have saved it in another layout than the module's.
    """

    location: str = ""
    absent: Mapping[str, str] = field(default_factory=dict)
    absent_files: tuple[str, ...] = ()
    is_adapter: bool = False
    is_converted: bool = False

    def check_present(self, keys: Collection[str]) -> None:
        """Raise :class:`CorruptionError` if one of ``keys`` is in a file that is not there."""
        for key, name in self.absent.items():
            if key in keys:
                self._fail(name, f"the index says that it holds {key!r}")
        if self.absent_files:
            for key in keys:
                if key not in self.tensors:
                    self._fail(self.absent_files[0], f"it may hold {key!r}, which no other does")

    def check_complete(self) -> None:
        """Raise :class:`CorruptionError` if a file is not there."""
        for name in (*self.absent.values(), *self.absent_files):
            self._fail(name, "the snapshot has such a file")

    def _fail(self, name: str, why: str) -> None:
        raise CorruptionError(f"{self.location}: {name} is not there, and {why}; download it again")


def check_complete(manifest: Manifest) -> None:
    """Raise :class:`CorruptionError` if a file of a snapshot is not there."""
    if isinstance(manifest, Snapshot):
        manifest.check_complete()


def open_checkpoint(path: Path) -> tuple[Folder, Callable[[], Manifest]]:
    """Return the folder of a checkpoint, and a function that reads its manifest, or makes one from
    the headers of safetensors files.

    Args:
        path: the folder, a fsspec URL, or one safetensors file.

    Raises:
        ArgumentError: it is a folder of several series of checkpoints.
        StorageError: there is nothing of the kind at ``path``.
        CorruptionError, UnsupportedError: from the function, as for reading a manifest.
    """
    local = local_path(path)
    if local is None:
        remote = _catalog.open_folder(path)
        return remote, lambda: from_folder(remote)
    if os.path.isfile(local):
        single = LocalFolder(os.path.dirname(local) or ".")
        return single, lambda: _manifest_of_file(single, os.path.basename(local))
    folder = LocalFolder(local)
    names = folder.names()
    files = sorted(name for name in names if name.endswith(".safetensors"))
    has_data = any(map(DATA_NAME.fullmatch, files))
    others = ".metadata" in names or (files and not has_data)
    # If it is replaced, its files are being removed, and reading is tried again.
    if folder.replaced or (MANIFEST in names and (not others or is_ours(folder))):
        return folder, lambda: from_folder(folder)
    if ".metadata" in names:
        from torchrelay.checkpoint.format._foreign_dcp import manifest_of_dcp  # noqa: PLC0415 - needs torch

        return folder, lambda: manifest_of_dcp(folder)
    if files and not has_data:
        return folder, lambda: _snapshot_of(folder, names)
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
    elif pickles := [name for name in sorted(names) if name.endswith(_PICKLES)]:
        what += (
            f"; if {pickles[0]} is a file of torch.save, convert it with 'torchrelay checkpoint "
            f"convert {os.path.join(local, pickles[0])} FOLDER --to torchrelay', and load FOLDER"
        )
    elif not os.path.isdir(local):
        what = "there is no checkpoint here"
        with suppress(ArgumentError):  # several series: none of them is meant
            if newest := _catalog.newest_inside(os.path.dirname(os.path.abspath(local))):
                what += f"; retention (keep=) may have removed it: the newest is {newest}"
    raise StorageError(errno.ENOENT, f"{local}: {what}")


class _RepeatedError(CorruptionError):
    """A tensor is in two files."""


def _snapshot_of(folder: LocalFolder, names: Collection[str]) -> Snapshot:
    """Describe the safetensors files of a folder; of a Hugging Face snapshot that holds the weights
    several times, those that transformers reads; not an adapter beside its model.
    """
    files = sorted(name for name in names if name.endswith(".safetensors"))
    model = [name for name in files if not name.startswith(_ADAPTER)]
    absent: dict[str, str] = {}
    if _SINGLE not in files and INDEX in names:
        weights = _weights(folder)
        present = {*files} & {*weights.values()}
        absent = {key: name for key, name in weights.items() if name not in present}
        if not present:
            raise CorruptionError(
                f"{folder.location}/{INDEX}: none of the files that it lists is in the folder"
            )
        manifest = _manifest_of(folder, sorted(present))
    else:
        try:
            manifest = _manifest_of(folder, model or files)
        except _RepeatedError:
            if _SINGLE not in files:
                raise
            manifest = _manifest_of(folder, [_SINGLE])
    has_names = _SINGLE in files or INDEX in names
    return replace(
        manifest,
        absent=absent,
        absent_files=() if has_names else _unnumbered(files),
        is_adapter=not model,
        is_converted=_CONFIG in names,
    )


def _manifest_of_file(folder: LocalFolder, name: str) -> Snapshot:
    is_model = not name.startswith(_ADAPTER)
    is_converted = is_model and _CONFIG in folder.names()
    manifest = _manifest_of(folder, [name])
    return replace(manifest, is_adapter=not is_model, is_converted=is_converted)


def _weights(folder: LocalFolder) -> dict[str, str]:
    """Return the file of each tensor, from the index of a snapshot."""
    where = f"{folder.location}/{INDEX}"
    index = parse(folder.content(INDEX, MAX_HEADER_BYTES), where, "the index")
    try:
        weights = {str(key): name for key, name in index["weight_map"].items()}
        if not all(isinstance(name, str) for name in weights.values()):
            raise TypeError("a file name is not text")
    except PARSING_ERRORS as error:
        raise CorruptionError(f"{where}: the index is damaged ({error})") from None
    return weights


def _unnumbered(files: list[str]) -> tuple[str, ...]:
    """Return the files that are lacking between ``files``, which say how many they are."""
    numbered = [match for match in map(_NUMBERED.fullmatch, files) if match]
    expected = {
        f"{match[1]}-{number:05d}-of-{match[3]}.safetensors"
        for match in numbered
        for number in range(1, int(match[3]) + 1)
    }
    return tuple(sorted(expected - {*files}))


def _manifest_of(folder: Folder, names: list[str]) -> Snapshot:
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
    tensors = parser.tensors(records, files, BLOCK_BYTES)
    return Snapshot("", 1, files, tensors, location=folder.location)

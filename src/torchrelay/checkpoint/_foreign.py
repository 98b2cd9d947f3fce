"""Checkpoints of any format: ours, DCP's, and safetensors files, described by a manifest that is
made here.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Callable, Mapping

from torchrelay.checkpoint import _catalog
from torchrelay.checkpoint._data_file import StoredTensor, header_size, parse_header
from torchrelay.checkpoint._local import LocalFolder
from torchrelay.checkpoint._storage import Folder, local_path, open_folder
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

__all__ = ["open_checkpoint"]

_BY_CODE: Mapping[str, Dtype] = {
    dtype.code: dtype for dtype in reversed(list(DTYPES.values())) if dtype.width == 1
}


_ATTEMPTS = 10  # for a reader of a checkpoint that savers replace again and again


def open_checkpoint(
    path: str | os.PathLike[str],
    check: Callable[[Folder, Manifest], None] = lambda folder, manifest: None,
) -> tuple[Folder, Manifest]:
    """Return the folder of a checkpoint and its manifest, made from headers for safetensors files.

    Args:
        path: the folder, a fsspec URL, or one safetensors file.
        check: called with what is returned. If a save has replaced the checkpoint in the middle of
            it, the new one is opened instead.

    Raises:
        StorageError: there is nothing of the kind at ``path``.
        CorruptionError, UnsupportedError: as for reading a manifest, or from ``check``.
    """
    for attempt in range(_ATTEMPTS):
        folder, read = _find(path)
        try:
            manifest = read()
            check(folder, manifest)
        except CorruptionError:
            replaced = folder.replaced
            folder.close()
            if not replaced or attempt == _ATTEMPTS - 1:
                raise
        except BaseException:
            folder.close()
            raise
        else:
            return folder, manifest
    raise AssertionError("unreachable")


def _find(path: str | os.PathLike[str]) -> tuple[Folder, Callable[[], Manifest]]:
    """Return the folder at ``path``, and a function that reads or makes its manifest."""
    local = local_path(path)
    if local is None:
        remote = open_folder(path)
        return remote, lambda: _catalog.read_manifest(remote)
    if os.path.isfile(local):
        single = LocalFolder(os.path.dirname(local) or ".", follow_links=True)
        return single, lambda: _manifest_of(single, [os.path.basename(local)])
    if not os.path.isdir(local):
        raise StorageError(errno.ENOENT, f"{local}: there is no checkpoint here")
    folder = LocalFolder(local)
    names = folder.names()
    if (
        MANIFEST in names or folder.replaced
    ):  # then its files are being removed, and reading is tried again
        return folder, lambda: _catalog.read_manifest(folder)
    if ".metadata" in names:
        from torchrelay.checkpoint._foreign_dcp import manifest_of_dcp  # noqa: PLC0415 - needs torch

        return folder, lambda: manifest_of_dcp(folder)
    folder.close()
    return _find_foreign(local, [name for name in names if name.endswith(".safetensors")])


def _find_foreign(local: str, names: list[str]) -> tuple[Folder, Callable[[], Manifest]]:
    if not names:
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
    found: dict[str, list[tuple[str, StoredTensor]]] = defaultdict(list)
    for name in names:
        where = f"{folder.location}/{name}"
        size = folder.size_bytes(name)
        first = bytearray(min(8, size))
        folder.read(name, 0, memoryview(first))
        header = bytearray(header_size(bytes(first), size, where))
        folder.read(name, 0, memoryview(header))
        files[name] = DataFile(size, len(header), 0)
        for key, stored in parse_header(bytes(header), size, where).items():
            found[key].append((name, stored))
    tensors = {}
    for key, places in found.items():
        if len(places) > 1:
            raise CorruptionError(
                f"{folder.location}: tensor {key!r} is in {places[0][0]} and in {places[1][0]}"
            )
        ((name, stored),) = places
        chunk = Chunk(Box.whole(stored.shape), name, key, stored.start)
        tensors[key] = TensorEntry(_BY_CODE[stored.code], stored.shape, (chunk,))
    return Manifest("", 0, 1, files, tensors)

"""The checkpoints in a folder: which are committed, which is the newest, which to remove. Imports
no torch.
"""

from __future__ import annotations

import os

from torchrelay.checkpoint import _manifest
from torchrelay.checkpoint._storage import Folder, local_path, open_folder, split
from torchrelay.checkpoint._types import MANIFEST, Manifest
from torchrelay.errors import CorruptionError, StorageError

__all__ = ["committed", "latest", "read_manifest", "retain"]


def read_manifest(folder: Folder) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CorruptionError: it is missing, damaged or contradicts itself.
        UnsupportedError: another version of the format.
    """
    return _manifest.from_bytes(_manifest_bytes(folder), f"{folder.location}/{MANIFEST}")


def _manifest_bytes(folder: Folder) -> bytes:
    size = folder.size_bytes(MANIFEST)
    if size > _manifest.MAX_MANIFEST_BYTES:
        raise CorruptionError(
            f"{folder.location}/{MANIFEST}: {size} bytes, more than a manifest may have "
            f"({_manifest.MAX_MANIFEST_BYTES})"
        )
    data = bytearray(size)
    folder.read(MANIFEST, 0, memoryview(data))
    return bytes(data)


def committed(parent: str | os.PathLike[str]) -> list[str]:
    """Return the paths of the committed checkpoints directly inside ``parent``, oldest first."""
    times = {path: _committed_at_ns(path) for path in _children(parent)}
    found = [(time, path) for path, time in times.items() if time is not None]
    return [path for _, path in sorted(found)]


def _committed_at_ns(path: str) -> int | None:
    """Return when the checkpoint at ``path`` was committed; None if there is no complete one."""
    while True:
        folder = open_folder(path)
        try:
            return _manifest.saved_at_ns(_manifest_bytes(folder), f"{folder.location}/{MANIFEST}")
        except (CorruptionError, StorageError):
            if not folder.replaced:
                return None
        finally:
            folder.close()


def _children(parent: str | os.PathLike[str]) -> list[str]:
    local = local_path(parent)
    if local is None:
        from torchrelay.checkpoint import _remote  # noqa: PLC0415

        return _remote.children(os.fspath(parent))
    try:
        names = os.listdir(local)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(error.errno or 0, f"{local}: {error.strerror}") from error
    return [os.path.join(local, name) for name in names if not name.startswith(".")]


def latest(parent: str | os.PathLike[str]) -> str:
    """Return the path of the checkpoint in ``parent`` that was committed last; interrupted saves do
    not count.

    Raises:
        StorageError: there is none.
    """
    found = committed(parent)
    if not found:
        raise StorageError(f"{os.fspath(parent)}: there is no committed checkpoint in this folder")
    return found[-1]


def retain(path: str | os.PathLike[str], keep: int) -> None:
    """Remove all but the newest ``keep`` committed checkpoints beside ``path``; never ``path``
    itself.
    """
    parent, name = split(path)
    for old in committed(parent)[:-keep]:
        if os.path.basename(old) == name:
            continue
        if local_path(old) is None:
            from torchrelay.checkpoint import _remote  # noqa: PLC0415

            _remote.remove(old)
        else:
            from torchrelay.checkpoint import _local  # noqa: PLC0415

            _local.remove(old)

"""The storage contract, which local folders and fsspec URLs implement."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torchrelay.checkpoint._types import Sizes
from torchrelay.errors import ArgumentError, StorageError

__all__ = [
    "Folder",
    "Path",
    "Sink",
    "Transaction",
    "local_path",
    "removed_error",
    "split",
    "text_of",
]

Path = str | bytes | os.PathLike[str]


class Folder(Protocol):
    """A checkpoint that can be read, by several threads at once."""

    location: str
    request_bytes: int  # up to which ranges that are close together are better read by one request

    @property
    def replaced(self) -> bool:
        """Return whether another checkpoint has replaced it since it was first read."""

    @property
    def removed(self) -> bool:
        """Return whether it was removed since it was first read."""

    @property
    def identity(self) -> str:
        """Return a string that is equal for ranks that read through one page cache; empty if none
        do.
        """

    def size_bytes(self, name: str) -> int:
        """Return the size of a file.

        Raises:
            CorruptionError: it is missing, or is not a regular file.
            StorageError: the checkpoint was removed meanwhile.
        """

    def read(self, name: str, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``offset``. Blocks.

        Raises:
            CorruptionError: the file ends before.
            StorageError: it cannot be read.
        """

    def checksums(self, name: str, starts: Sizes, sizes: Sizes) -> bytes:
        """Return the CRC32C of byte ranges, in ascending order, 4 little-endian bytes each. Blocks.

        Raises:
            As :meth:`read`.
        """

    def map(self, name: str, offset: int, size_bytes: int) -> memoryview | None:
        """Return a read-only mapping of bytes of a file; None if it cannot be mapped.

        Raises:
            CorruptionError: the file ends before.
        """

    def close(self) -> None: ...


class Sink(Protocol):
    """A data file that is being written."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of ``data``. Blocks. Bytes that are never written are zero. Offsets ascend
        where ``Transaction.sequential``.
        """

    def close(self) -> None:
        """Wait until the file is as durable as the storage makes it (``fsync``, the end of an
        upload).
        """

    def abort(self) -> None:
        """Close without waiting; what was written may be lost."""


class Transaction(Protocol):
    """One save. The coordinator starts and ends it; every rank creates files in between."""

    location: str
    sequential: bool  # whether a file is written from its first byte to its last
    max_file_bytes: int

    def begin(self) -> str:
        """Create the folder, and remove what an interrupted save has left. Coordinator only.

        Returns the id of the save.

        Raises:
            StorageError: another save to this path is in progress, or the path cannot be written.
        """

    def is_marked(self, save_id: str) -> bool:
        """Return whether the path is marked as that of a save with this id. False where this rank's
        path is another than the coordinator's, or on a file system of its own.
        """

    def create(self, name: str) -> Sink: ...

    def commit(self, manifest: bytes, files: Mapping[str, int]) -> None:
        """Make the checkpoint valid, in one step. Coordinator only.

        Raises:
            StorageError: one of ``files`` (sizes by name) is not there, or not so long; or what a
                write raises.
        """

    def discard(self) -> None:
        """Remove what was written. Coordinator only; does nothing after :meth:`commit`."""

    def hand_over(self) -> tuple[int, ...]:
        """Leave the save to another process. Returns the file descriptors that it needs, which the
        caller closes. Coordinator only.
        """

    def take_over(self, save_id: str, fds: Sequence[int]) -> None:
        """Continue a save that another process has started. Takes ownership of the descriptors."""

    def open_note(self, name: str) -> Callable[[bytes], None]:
        """Start a note, a message to the coordinator's writer in the folder that is being written;
        return what finishes it with its content.

        The coordinator can see whether the writer of an unfinished note lives.
        """

    def read_note(self, name: str) -> bytes | None:
        """Return a finished note; None if it does not exist yet.

        Raises:
            PeerLostError: its writer has died.
        """

    def is_committed(self, save_id: str) -> bool | None:
        """Return whether the save was committed; None while the coordinator lives and has not
        ended it.
        """


def text_of(path: Path) -> str:
    """Return a path or URL as text.

    Raises:
        ArgumentError: it is empty, or not a path.
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise ArgumentError(
            f"the path of a checkpoint is a string or a path, not {type(path).__name__}"
        ) from None
    if not text:
        raise ArgumentError("the path of a checkpoint is empty")
    return text


def local_path(path: Path) -> str | None:
    """Return ``path`` as a local path, or None if it is a URL of another kind.

    Raises:
        ArgumentError: it is empty, or not a path.
    """
    text = text_of(path)
    if text.startswith("file://"):
        return text[len("file://") :]
    return None if "://" in text else text


def split(path: Path) -> tuple[str, str]:
    """Return the parent folder of ``path``, and its last part.

    Raises:
        ArgumentError: it is not a path inside a folder.
    """
    local = local_path(path)
    text = text_of(path).rstrip("/") if local is None else os.path.abspath(local)
    parent, _, name = text.rpartition("/")
    if not name or parent.endswith((":", ":/")) or not parent:
        raise ArgumentError(f"{text}: a checkpoint needs a name inside a folder")
    return parent, name


def removed_error(location: str) -> StorageError:
    """Return the error for a checkpoint that was removed while it was read."""
    return StorageError(
        errno.ENOENT,
        f"{location}: the checkpoint was removed by retention (keep=) while it was read; load a "
        "newer one",
    )

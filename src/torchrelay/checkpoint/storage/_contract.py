"""The storage contract, which local folders and fsspec URLs implement."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Protocol, TypeVar

import numpy as np

from torchrelay import _native
from torchrelay.checkpoint._tasks import memory_at
from torchrelay.checkpoint._types import Sizes
from torchrelay.errors import ArgumentError, CorruptionError, StorageError, TorchRelayError

__all__ = [
    "Folder",
    "Path",
    "Sink",
    "Transaction",
    "check_files",
    "local_path",
    "read_again",
    "removed_error",
    "split",
    "storage_errors",
    "text_of",
]

Path = str | bytes | os.PathLike[str]
F = TypeVar("F", bound="Folder")
T = TypeVar("T")

_ADVICE = {
    errno.ENOSPC: "; free some space, or save elsewhere",
    errno.EDQUOT: "; the quota is used up",
    errno.EROFS: "; the file system is read-only",
    errno.EACCES: "; check its owner and mode",
    errno.EMFILE: "; raise the limit of open files (ulimit -n)",
}


class Folder(Protocol):
    """A checkpoint that can be read, by several threads at once; or a folder of checkpoints."""

    location: str
    request_bytes: int  # up to which ranges that are close together are better read by one request

    @property
    def replaced(self) -> bool:
        """Return whether another checkpoint has replaced it since it was first read."""
        return False

    @property
    def removed(self) -> bool:
        """Return whether it was removed since it was first read."""

    @property
    def identity(self) -> str:
        """Return a string that is equal for ranks that read through one page cache; empty if none
        do.
        """
        return ""

    def names(self) -> list[str]:
        """Return the names of what is in the folder; none if it does not exist."""

    def folders(self) -> list[str]:
        """Return the paths of the folders inside; symbolic links to some come last."""

    def linked(self) -> frozenset[str]:
        """Return the paths of the symbolic links inside, and of what they point to there."""
        return frozenset()

    def content(self, name: str, most: int) -> bytes:
        """Return the first bytes of a file.

        Raises:
            As :meth:`size_bytes` and :meth:`read`.
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

    def checksums(self, name: str, starts: Sizes, sizes: Sizes, into: Sizes | None = None) -> bytes:
        """Return the CRC32C of byte ranges, in ascending order, 4 little-endian bytes each. Blocks.

        Args:
            into: what of these bytes is also copied to memory: ascending rows of starts, sizes and
                addresses, ``(3, n)``.

        Raises:
            As :meth:`read`.
        """
        first, size_bytes = int(starts[0]), int(starts[-1] + sizes[-1] - starts[0])
        is_direct = into is not None and into[:2].ravel().tolist() == [first, size_bytes]
        buffer = np.empty(0 if is_direct else size_bytes, np.uint8)
        address = int(into[2, 0]) if into is not None and is_direct else buffer.ctypes.data
        self.read(name, first, memory_at(address, size_bytes))
        base = np.uint64(address) - starts[:1]  # modulo 2^64, as what is added to it
        if into is not None and not is_direct:
            _native.copy_memory(into[2], into[0] + base, into[1])
        return _native.crc32c_of_memory(starts + base, sizes)

    def map(self, name: str, offset: int, size_bytes: int) -> memoryview | None:
        """Return a read-only mapping of bytes of a file; None if it cannot be mapped.

        Raises:
            CorruptionError: the file ends before.
        """
        return None

    def close(self) -> None:
        return None


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
    save_id: str  # empty before the save begins
    sequential: bool  # whether a file is written from its first byte to its last
    max_file_bytes: int
    can_rename: bool  # whether files can get other names in a commit

    def begin(self) -> str:
        """Create the folder, and remove what an interrupted save has left. Coordinator only.

        Returns the id of the save.

        Raises:
            StorageError: another save to this path is in progress, or the path cannot be written.
        """

    def is_marked(self, save_id: str) -> bool:
        """Return whether the path is marked as that of a save with this id that is in progress.
        False where this rank's path is another than the coordinator's, or on a file system of its
        own.
        """

    def create(self, name: str) -> Sink: ...

    def commit(self, manifest: bytes, files: Mapping[str, int], names: Mapping[str, str]) -> None:
        """Make the checkpoint valid, in one step. Coordinator only. ``names`` are those that files
        get, by those under which they were written; ``files`` has the new ones.

        Raises:
            StorageError: one of ``files`` (sizes by name) is not there, or not so long; or what a
                write raises.
        """

    def discard(self) -> None:
        """Remove what was written. Coordinator only; does nothing after :meth:`commit`."""

    def remove(self, save_id: str) -> None:
        """Remove the checkpoint at the path, instead of a save to it, if it is still the one of
        this id and nobody else is at it. Others see it whole or not at all. Files of others in it
        stay.

        Raises:
            CorruptionError, UnsupportedError: it is not a checkpoint of ours.
            StorageError: it cannot be removed.
        """

    def sweep(self) -> None:
        """Finish the removals beside the path whose processes were killed."""

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


@contextmanager
def storage_errors(what: str, kind: type[Exception] = OSError) -> Iterator[None]:
    """Convert errors of a ``kind`` to :class:`StorageError`, with ``what`` was done."""
    try:
        yield
    except TorchRelayError:
        raise
    except kind as error:
        denied = isinstance(error, PermissionError)
        code = getattr(error, "errno", None) or (errno.EACCES if denied else errno.EIO)
        text = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise StorageError(code, f"{what}: {text}{_ADVICE.get(code, '')}") from error


def read_again(open_folder: Callable[[], F], read: Callable[[F], T]) -> T:
    """Return what ``read`` finds in a folder; again if another has replaced it meanwhile."""
    while True:
        with closing(open_folder()) as folder:
            try:
                return read(folder)
            except (CorruptionError, StorageError):
                if not folder.replaced:
                    raise


def check_files(folder: Folder, files: Mapping[str, int]) -> None:
    """Check that files have these sizes.

    Raises:
        StorageError: one has not.
    """
    for name, size_bytes in files.items():
        try:
            found = str(folder.size_bytes(name))
        except CorruptionError:
            found = "none"
        if found != str(size_bytes):
            raise StorageError(
                errno.EIO,
                f"{folder.location}/{name}: a rank wrote {size_bytes} bytes, and the coordinator "
                f"finds {found}; is the path on a file system that all ranks share?",
            )


def text_of(path: Path) -> str:
    """Return a path or URL as text.

    Raises:
        ArgumentError: it is empty, has a null character, or is not a path.
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise ArgumentError(
            f"the path of a checkpoint is a string or a path, not {type(path).__name__}"
        ) from None
    if not text:
        raise ArgumentError("the path of a checkpoint is empty")
    if "\0" in text:
        raise ArgumentError(f"the path of a checkpoint has a null character: {text!r}")
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

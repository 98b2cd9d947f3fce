"""Checkpoints at fsspec URLs: object stores without rename, where putting one object is atomic.

The manifest is the commit marker: it is put last. A marker object named ``saving.json`` holds the
id of the save in progress, so that of two savers at most one commits.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torchrelay import _native
from torchrelay.checkpoint import _manifest
from torchrelay.checkpoint._types import MANIFEST
from torchrelay.errors import CorruptionError, StorageError, TorchRelayError, UnavailableError

__all__ = ["RemoteFolder", "RemoteTransaction", "children", "remove"]

_MARKER = "saving.json"


def open_url(url: str) -> tuple[Any, str]:
    """Return the file system of an fsspec URL, and the path in it.

    Raises:
        UnavailableError: a package that the URL's protocol needs is missing.
    """
    try:
        import fsspec  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra
    except ImportError:
        raise UnavailableError(
            f"{url}: needs fsspec; pip install 'torchrelay[checkpoint]'"
        ) from None
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UnavailableError(f"{url}: {error}") from None
    return fs, root.rstrip("/")


@contextmanager
def remote_errors(what: str) -> Iterator[None]:
    """Convert whatever a file system of fsspec raises to :class:`StorageError`."""
    try:
        yield
    except TorchRelayError:
        raise
    except FileNotFoundError as error:
        raise CorruptionError(f"{what}: the file is missing") from error
    except Exception as error:
        code = getattr(error, "errno", None) or errno.EIO
        raise StorageError(code, f"{what}: {type(error).__name__}: {error}") from error


class RemoteFolder:
    """Reads byte ranges of objects."""

    replaced = False  # a save never takes another's place
    identity = ""  # each rank transfers what it reads

    def __init__(self, url: str) -> None:
        self.location = url.rstrip("/")
        self._fs, self._root = open_url(url)

    def size_bytes(self, name: str) -> int:
        with remote_errors(f"{self.location}/{name}"):
            return int(self._fs.info(f"{self._root}/{name}")["size"])

    def read(self, name: str, offset: int, into: memoryview) -> None:
        if not len(into):
            return
        where = f"{self.location}/{name}"
        with remote_errors(f"reading {where} at byte {offset}"):
            data = self._fs.cat_file(f"{self._root}/{name}", start=offset, end=offset + len(into))
        if len(data) != len(into):
            raise CorruptionError(
                f"{where}: the file ends at byte {offset + len(data)}, before it should"
            )
        into[:] = data

    def checksums(self, name: str, offset: int, size_bytes: int, block_bytes: int) -> bytes:
        data = bytearray(size_bytes)
        self.read(name, offset, memoryview(data))
        return _native.crc32c_blocks(data, block_bytes)

    def map(self, name: str, offset: int, size_bytes: int) -> None:
        return None

    def close(self) -> None:
        pass


class _RemoteSink:
    """An upload whose parts are sent as they fill."""

    def __init__(self, fs: Any, path: str, where: str) -> None:
        self._where = where
        with remote_errors(f"creating {where}"):
            self._file = fs.open(path, "wb")
        self._done = 0

    def write(self, offset: int, data: memoryview) -> None:
        assert offset == self._done, "objects are written from their first byte to their last"
        with remote_errors(f"writing {self._where} at byte {offset}"):
            self._file.write(data)
        self._done += len(data)

    def close(self) -> None:
        with remote_errors(f"writing {self._where}"):
            self._file.close()

    def abort(self) -> None:
        if hasattr(self._file, "discard"):
            with remote_errors(f"giving up {self._where}"):
                self._file.discard()


class RemoteTransaction:
    """A save to an object store."""

    sequential = True
    max_file_bytes = 256 << 20  # files are uploaded side by side

    def __init__(self, url: str) -> None:
        self.location = url.rstrip("/")
        self._fs, self._root = open_url(url)
        self._id = ""

    def begin(self) -> None:
        with remote_errors(f"beginning to save {self.location}"):
            self._fs.invalidate_cache()
            if self._fs.exists(f"{self._root}/{MANIFEST}"):
                raise StorageError(
                    errno.EEXIST,
                    f"{self.location}: there is a checkpoint already, and an object store cannot "
                    "replace it in one step; save under another name",
                )
            if self._fs.exists(self._root):
                self._fs.rm(self._root, recursive=True)
            self._fs.makedirs(self._root, exist_ok=True)
            self._id = secrets.token_hex(8)
            self._fs.pipe_file(f"{self._root}/{_MARKER}", self._id.encode())

    def create(self, name: str) -> _RemoteSink:
        return _RemoteSink(self._fs, f"{self._root}/{name}", f"{self.location}/{name}")

    def commit(self, manifest: bytes, files: Mapping[str, int]) -> None:
        folder = RemoteFolder(self.location)
        for name, size_bytes in files.items():
            if folder.size_bytes(name) != size_bytes:
                raise StorageError(
                    errno.EIO, f"{self.location}/{name}: not the {size_bytes} bytes written"
                )
        with remote_errors(f"committing {self.location}"):
            marker = f"{self._root}/{_MARKER}"
            if not self._fs.exists(marker) or self._fs.cat_file(marker) != self._id.encode():
                self._id = ""
                raise StorageError(
                    errno.EBUSY, f"{self.location}: another save to this path has begun meanwhile"
                )
            self._fs.pipe_file(f"{self._root}/{MANIFEST}", manifest)
            self._id = ""
            for name in self._fs.ls(self._root, detail=False):
                if name.endswith(f"/{_MARKER}") or "/part-" in name:
                    self._fs.rm_file(name)

    def discard(self) -> None:
        if self._id:
            self._id = ""
            with remote_errors(f"discarding {self.location}"):
                if self._fs.exists(self._root):
                    self._fs.rm(self._root, recursive=True)

    def hand_over(self) -> tuple[str, tuple[int, ...]]:
        return self._id, ()

    def release(self) -> None:
        self._id = ""

    def take_over(self, token: str, fds: Sequence[int]) -> None:
        self._id = token

    def open_note(self, name: str) -> _RemoteNote:
        return _RemoteNote(self._fs, f"{self._root}/{name}", f"{self.location}/{name}")

    def read_note(self, name: str) -> bytes | None:
        with remote_errors(f"reading {self.location}/{name}"):
            self._fs.invalidate_cache()
            path = f"{self._root}/{name}"
            return self._fs.cat_file(path) if self._fs.exists(path) else None

    def under_way(self, note: str) -> bool:
        return self.read_note(note) is not None and self.committed_id() is None

    def committed_id(self) -> str | None:
        with remote_errors(f"reading {self.location}/{MANIFEST}"):
            self._fs.invalidate_cache()
            path = f"{self._root}/{MANIFEST}"
            if not self._fs.exists(path):
                return None
            first = self._fs.cat_file(path, start=0, end=4096).partition(b"\n")[0]
            return _manifest.id_of(first, f"{self.location}/{MANIFEST}")


class _RemoteNote:
    """A note that exists once it is finished."""

    def __init__(self, fs: Any, path: str, where: str) -> None:
        self._fs, self._path, self._where = fs, path, where

    def finish(self, content: bytes) -> None:
        with remote_errors(f"writing {self._where}"):
            self._fs.pipe_file(self._path, content)


def children(url: str) -> list[str]:
    """Return the URLs of the entries directly inside ``url``."""
    fs, root = open_url(url)
    with remote_errors(f"listing {url}"):
        fs.invalidate_cache()
        if not fs.exists(root):
            return []
        names = [entry["name"].rstrip("/").rpartition("/")[2] for entry in fs.ls(root, detail=True)]
    return [f"{url.rstrip('/')}/{name}" for name in names]


def remove(url: str) -> None:
    """Remove a checkpoint: its manifest first, so that the rest is not a checkpoint."""
    fs, root = open_url(url)
    with remote_errors(f"removing {url}"):
        fs.rm_file(f"{root}/{MANIFEST}")
        fs.rm(root, recursive=True)

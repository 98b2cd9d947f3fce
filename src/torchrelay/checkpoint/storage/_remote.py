"""Checkpoints at fsspec URLs: object stores without rename, where putting one object is atomic.

The manifest is the commit marker: it is put last. A marker object named ``torchrelay-saving.json``
holds the id of the save in progress, so that of two savers at most one commits; while a checkpoint
is being removed, the marker records that instead. Objects are removed one by one: those that a
manifest of ours lists, and beside a marker of ours those whose names a save uses. Whatever else is
there is somebody else's.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

from torchrelay.checkpoint._tasks import in_threads
from torchrelay.checkpoint._types import DATA_NAME, MANIFEST, NOTE_NAME
from torchrelay.checkpoint.format._manifest import claims_of, head_at, is_of
from torchrelay.checkpoint.storage._contract import (
    Folder,
    check_files,
    removed_error,
    storage_errors,
)
from torchrelay.errors import CorruptionError, StorageError, UnavailableError

__all__ = ["RemoteFolder", "RemoteTransaction"]

_MARKER = "torchrelay-saving.json"
_REMOVING, _ENDED = b"removing", b"ended"  # in a marker, instead of the id of a save
_REQUESTS = 8  # at once


def remote_errors(what: str) -> AbstractContextManager[None]:
    """Convert whatever a file system of fsspec raises to :class:`StorageError`."""
    return storage_errors(what, Exception)


class _Store:
    """A folder of an object store."""

    def __init__(self, url: str) -> None:
        """Find the file system of an fsspec URL.

        Raises:
            UnavailableError: a package that the URL's protocol needs is missing.
        """
        self.location = url.rstrip("/")
        try:
            import fsspec  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra
        except ImportError:
            raise UnavailableError(f"{url}: needs fsspec; pip install fsspec") from None
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UnavailableError(f"{url}: {error}") from None
        self._root = root.rstrip("/")
        self._fs.invalidate_cache()  # what other processes wrote

    def find(self, name: str, most: int | None = None) -> bytes | None:
        """Return the first bytes of an object; None if there is none. Asks the server."""
        path, end = f"{self._root}/{name}", {} if most is None else {"start": 0, "end": most}
        with remote_errors(f"reading {self.location}/{name}"):
            try:
                content: bytes = self._fs.cat_file(path, **end)
            except FileNotFoundError:
                return None
            except OSError:
                if not end or self._fs.info(path)["size"]:
                    raise
                return b""  # which has no range
        return content

    def put(self, name: str, content: bytes) -> None:
        """Write an object in one step."""
        with remote_errors(f"writing {self.location}/{name}"):
            self._fs.pipe_file(f"{self._root}/{name}", content)

    def names(self, kinds: Collection[str] = ("file", "directory")) -> list[str]:
        """Return the names directly inside the folder, as the server has them now."""
        with remote_errors(f"listing {self.location}"):
            self._fs.invalidate_cache()
            try:
                entries = self._fs.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
        found = [(one["name"].rstrip("/"), one) for one in entries if one["type"] in kinds]
        # The folder itself may be listed too, where an empty object marks it.
        return [
            name.rpartition("/")[2] for name, one in found if name != self._root or one.get("size")
        ]

    def folders(self) -> list[str]:
        return [f"{self.location}/{name}" for name in sorted(self.names(["directory"]))]

    def delete(self, names: Collection[str]) -> None:
        """Remove objects, the marker last, and the folder if it is empty then."""

        def remove_object(name: str) -> None:
            with suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._root}/{name}")

        with remote_errors(f"removing objects of {self.location}"):
            in_threads(remove_object, [name for name in names if name != _MARKER], _REQUESTS)
            if _MARKER in names:
                remove_object(_MARKER)
            with suppress(OSError, NotImplementedError):  # not empty, or the store has no folders
                self._fs.rmdir(self._root)


class RemoteFolder(_Store, Folder):
    """Reads byte ranges of objects. A save never replaces them, and each rank transfers what it
    reads.
    """

    request_bytes = 16 << 20  # a request takes long

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._was_read = False

    @property
    def removed(self) -> bool:
        return self._was_read and self.find(MANIFEST, 1) is None

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            with remote_errors(what):
                yield
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            if self.removed:
                raise removed_error(self.location) from None
            raise CorruptionError(f"{what}: the file is missing") from error
        self._was_read = True

    def content(self, name: str, most: int) -> bytes:
        with self._errors(f"{self.location}/{name}"):
            found = self.find(name, most)
            if found is None:
                raise FileNotFoundError
            return found

    def size_bytes(self, name: str) -> int:
        with self._errors(f"{self.location}/{name}"):
            return int(self._fs.info(f"{self._root}/{name}")["size"])

    def read(self, name: str, offset: int, into: memoryview) -> None:
        if not into:
            return
        where, end = f"{self.location}/{name}", offset + len(into)
        with self._errors(f"reading {where} at byte {offset}"):
            data = self._fs.cat_file(f"{self._root}/{name}", start=offset, end=end)
        if len(data) != len(into):
            raise CorruptionError(
                f"{where}: the file ends at byte {offset + len(data)}, before it should"
            )
        into[:] = data


class _RemoteSink:
    """An upload whose parts are sent as they fill."""

    def __init__(self, fs: Any, path: str, where: str) -> None:
        self._where = where
        with remote_errors(f"creating {where}"):
            self._file: Any = fs.open(path, "wb")
        self._done = 0

    def write(self, offset: int, data: memoryview) -> None:
        assert offset >= self._done, "objects are written from their first byte to their last"
        with remote_errors(f"writing {self._where} at byte {offset}"):
            self._file.write(bytes(offset - self._done))
            self._file.write(data)
        self._done = offset + len(data)

    def close(self) -> None:
        with remote_errors(f"writing {self._where}"):
            self._file.close()
        self._file = None

    def abort(self) -> None:
        if hasattr(self._file, "discard"):
            self._file.forced = True  # or its destructor uploads what is left
            with suppress(Exception):  # what failed before is raised
                self._file.discard()


class RemoteTransaction(_Store):
    """A save to an object store."""

    sequential = True
    max_file_bytes = 256 << 20  # files are uploaded side by side
    can_rename = False
    save_id = ""  # also after the end of the save

    def _folder(self) -> RemoteFolder:
        return RemoteFolder(self.location)

    def begin(self) -> str:
        names = self.names()
        self._check_target(names)
        self.delete(names)
        with remote_errors(f"beginning to save {self.location}"):
            self._fs.makedirs(self._root, exist_ok=True)
        self.save_id = secrets.token_hex(8)
        self.put(_MARKER, self.save_id.encode())
        return self.save_id

    def _check_target(self, names: list[str]) -> None:
        """Check that there is nothing, or what an interrupted save has left.

        Raises:
            StorageError: there is something else.
        """
        if MANIFEST in names and head_at(self._folder) is not None:
            raise StorageError(
                errno.EEXIST,
                f"{self.location}: there is a checkpoint already, and an object store cannot "
                "replace it in one step; save under another name",
            )
        ours = _of_a_save(names) if _MARKER in names else []
        foreign = [name for name in names if name not in ours]
        if foreign:
            raise StorageError(
                errno.EEXIST,
                f"{self.location}: there are objects that are not of a TorchRelay checkpoint, "
                f"such as {min(foreign)!r}; they are left alone: save elsewhere",
            )

    def is_marked(self, save_id: str) -> bool:
        return self.find(_MARKER) == save_id.encode()

    def create(self, name: str) -> _RemoteSink:
        return _RemoteSink(self._fs, f"{self._root}/{name}", f"{self.location}/{name}")

    def commit(self, manifest: bytes, files: Mapping[str, int], names: Mapping[str, str]) -> None:
        check_files(self._folder(), files)
        if not self.is_marked(self.save_id):
            self.save_id = ""
            raise StorageError(
                errno.EBUSY, f"{self.location}: another save to this path has begun meanwhile"
            )
        self.save_id = ""  # nothing is discarded if it is not known whether the manifest arrived
        try:
            self.put(MANIFEST, manifest)
        except StorageError:
            with suppress(StorageError):
                self.put(_MARKER, _ENDED)  # other ranks do not wait for it; the next save cleans up
            raise
        with suppress(StorageError):  # it is committed; they go with it
            self.delete([name for name in self.names() if _is_working(name)])

    def discard(self) -> None:
        if self.save_id:
            with suppress(StorageError):  # the next save tries again
                if self.is_marked(self.save_id):
                    self.delete(_of_a_save(self.names()))
            self.save_id = ""

    def hand_over(self) -> tuple[int, ...]:
        self.save_id = ""
        return ()

    def take_over(self, save_id: str, fds: Sequence[int]) -> None:
        self.save_id = save_id

    def open_note(self, name: str) -> Callable[[bytes], None]:
        return partial(self.put, name)

    def read_note(self, name: str) -> bytes | None:
        return self.find(name)

    def remove(self, save_id: str) -> None:
        """Remove the manifest first, so that the rest is not a checkpoint."""
        files = claims_of(self._folder())
        if not is_of(self._folder, save_id):
            return
        self.put(_MARKER, _REMOVING)  # if this process is killed, another one goes on
        self.delete([MANIFEST])
        self.delete([name for name in self.names() if name in files or _is_working(name)])

    def sweep(self) -> None:
        for url in _Store(self.location.rpartition("/")[0]).folders():
            store = _Store(url)
            if store.find(_MARKER) == _REMOVING:
                names = store.names()
                if MANIFEST not in names:
                    store.delete(_of_a_save(names))


def _is_working(name: str) -> bool:
    """Return whether an object is one that a saver needs beside the checkpoint's own."""
    return name == _MARKER or NOTE_NAME.fullmatch(name) is not None


def _of_a_save(names: list[str]) -> list[str]:
    """Return the names that a save uses before its commit."""
    return [name for name in names if DATA_NAME.fullmatch(name) or _is_working(name)]

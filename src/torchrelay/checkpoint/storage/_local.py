"""Checkpoints in local folders and on mounted file systems: locks, atomic renames, cleanup.

A save to ``ckpt/step-1`` writes into ``ckpt/.step-1.torchrelay-saving``, which becomes ``step-1``
by one rename. Meanwhile the saver has locked ``ckpt/.step-1.torchrelay-lock``. A removal
takes the same lock, and begins with the reverse rename. Whatever kills the process, its lock is
gone with it, and the next save into ``ckpt`` removes what is left.

Files are removed one by one: those that a manifest of ours lists, and those whose names only we
use, in folders whose names only we use. Whatever else is there is somebody else's and stays.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import mmap
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from torchrelay import _native
from torchrelay._platform import boot_id, exchange, flush, populate, start_writeback
from torchrelay.checkpoint._types import DATA_NAME, EXPORT_NAME, MANIFEST, NOTE_NAME, Sizes
from torchrelay.checkpoint.format._manifest import claims_of, is_of
from torchrelay.checkpoint.storage._contract import (
    check_files,
    read_again,
    removed_error,
    storage_errors,
)
from torchrelay.errors import CorruptionError, PeerLostError, StorageError, UnsupportedError

__all__ = ["LocalFolder", "LocalTransaction"]

_LOCK, _SAVING = "torchrelay-lock", "torchrelay-saving"
_UNFINISHED = re.compile(rf"\.(.+)\.(?:{_LOCK}|{_SAVING})", re.DOTALL)
_NOTE = re.compile(rf"{NOTE_NAME.pattern}(\.new)?|{EXPORT_NAME.pattern}")
_NOTE_END = b"\n"
_MAX_OPEN_FILES = 512  # of a checkpoint; half of the usual limit of a process
# The clean-up of a save beside this one holds the lock of this one for a moment.
_CLEANUP_S, _POLL_S = 1.0, 0.01

_CALL_BYTES = 1 << 30  # some systems refuse to read or write 2 GiB by one call


class LocalFolder:
    """A folder on a mounted file system. Files are opened once, unless there are hundreds; they may
    be symbolic links, as in the cache of a hub.

    It stays the same folder from the first use on, even if its name is given to another.
    """

    request_bytes = 1 << 20  # a copy from memory that is in the cache costs less than a request

    def __init__(self, path: str) -> None:
        self.location = path
        self._folder_fd = -1
        self._fds: dict[str, int] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def _file(self, name: str) -> Iterator[int]:
        """Open a file, and keep it open unless too many are."""
        with self._lock:
            fd = self._fds[name] if name in self._fds else self._open(name)
            if len(self._fds) < _MAX_OPEN_FILES:
                self._fds[name] = fd
            is_kept = name in self._fds
        try:
            yield fd
        finally:
            if not is_kept:
                os.close(fd)

    def _open(self, name: str) -> int:
        path = os.path.join(self.location, name)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not wait for its writer
        try:
            fd = os.open(name, flags, dir_fd=self._here())
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                if self.removed:
                    raise removed_error(self.location) from None
                what = "the file"
                if os.path.islink(path):
                    what = f"a symbolic link, and what it points to ({os.path.realpath(path)})"
                raise CorruptionError(f"{path}: {what} is missing") from None
            raise StorageError(error.errno or errno.EIO, f"{path}: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise CorruptionError(f"{path}: not a regular file")
        return fd

    def _here(self) -> int:
        if self._folder_fd < 0:
            self._folder_fd = os.open(self.location, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return self._folder_fd

    def names(self) -> list[str]:
        with self._lock, storage_errors(f"listing {self.location}"):
            try:
                return sorted(os.listdir(self._here()))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def folders(self) -> list[str]:
        shown = [name for name in self.names() if not name.startswith(".")]
        return sorted((os.path.join(self.location, name) for name in shown), key=os.path.islink)

    def linked(self) -> frozenset[str]:
        paths = [os.path.join(self.location, name) for name in self.names()]
        links = [path for path in paths if os.path.islink(path)]
        real = os.path.realpath(self.location)
        targets = [os.path.split(os.path.realpath(link)) for link in links]
        there = [os.path.join(self.location, name) for folder, name in targets if folder == real]
        return frozenset([*links, *there])

    def content(self, name: str, most: int) -> bytes:
        data = bytearray(min(self.size_bytes(name), most))
        self.read(name, 0, memoryview(data))
        return bytes(data)

    def open(self, name: str) -> io.FileIO:
        """Return a file object, which the caller closes."""
        with self._file(name) as fd:
            return io.FileIO(os.dup(fd))

    @property
    def replaced(self) -> bool:
        """Return whether the name is now that of another folder."""
        try:
            return not os.path.samestat(os.fstat(self._folder_fd), os.stat(self.location))
        except OSError:
            return False

    @property
    def removed(self) -> bool:
        """Return whether the folder existed and has been removed."""
        return self._folder_fd >= 0 and not os.path.lexists(self.location)

    @property
    def identity(self) -> str:
        with self._lock:
            found = os.fstat(self._here())
        try:
            host = boot_id()
        except OSError:
            host = secrets.token_hex(8)  # not known: each rank is as alone
        return f"{host}/{found.st_dev}/{found.st_ino}"

    def size_bytes(self, name: str) -> int:
        with self._file(name) as fd:
            return os.fstat(fd).st_size

    def read(self, name: str, offset: int, into: memoryview) -> None:
        end, where = offset + len(into), f"{self.location}/{name} at byte {offset}"
        with self._file(name) as fd, storage_errors(f"reading {where}"):
            while into and (count := os.preadv(fd, [into[:_CALL_BYTES]], offset)):
                offset, into = offset + count, into[count:]
        self._check_end(name, offset, end)

    def checksums(self, name: str, starts: Sizes, sizes: Sizes, into: Sizes | None = None) -> bytes:
        where = f"{self.location}/{name} at byte {starts[0]}"
        with self._file(name) as fd, storage_errors(f"reading {where}"):
            found, end = _native.crc32c_of_file(fd, starts, sizes, into)
        self._check_end(name, end, int(starts[-1] + sizes[-1]))
        return found

    def _check_end(self, name: str, end: int, expected: int) -> None:
        if end < expected:
            raise CorruptionError(
                f"{self.location}/{name}: the file ends at byte {end}, {expected - end} bytes "
                "before it should"
            )

    def map(self, name: str, offset: int, size_bytes: int) -> memoryview | None:
        first, where = offset // mmap.PAGESIZE * mmap.PAGESIZE, f"{self.location}/{name}"
        with self._file(name) as fd, storage_errors(f"mapping {where} at byte {offset}"):
            if os.fstat(fd).st_size < offset + size_bytes:
                raise CorruptionError(f"{where}: the file ends before byte {offset + size_bytes}")
            # Writable for torch's sake, but private: nothing that is written there reaches the
            # file.
            mapped = mmap.mmap(
                fd, offset - first + size_bytes, access=mmap.ACCESS_COPY, offset=first
            )
            if not populate(mapped):
                return None
        return memoryview(mapped)[offset - first :]

    def close(self) -> None:
        with self._lock:
            while self._fds:
                os.close(self._fds.popitem()[1])
            if self._folder_fd >= 0:
                os.close(self._folder_fd)
                self._folder_fd = -1


class _LocalSink:
    """Writes at any offset, from several threads; errors name the file."""

    def __init__(self, path: str, fsync: bool) -> None:
        self._path, self._fsync = path, fsync
        with storage_errors(
            f"creating {path} (is the path on a file system that all ranks share?)"
        ):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, offset: int, data: memoryview) -> None:
        done = 0
        with storage_errors(f"writing {self._path} at byte {offset}"):
            while done < len(data):
                done += os.pwrite(self._fd, data[done : done + _CALL_BYTES], offset + done)
        if self._fsync:
            start_writeback(self._fd, offset, done)

    def close(self) -> None:
        try:
            if self._fsync:
                with storage_errors(f"writing {self._path} to the disk"):
                    flush(self._fd)
        finally:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def abort(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # a full disk then takes the note of the error
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


class LocalTransaction:
    """A save into a local folder."""

    sequential = False
    max_file_bytes = 16 << 30
    can_rename = True

    def __init__(self, path: str, *, fsync: bool = True) -> None:
        self._final = Path(os.path.abspath(path))
        self.location, self.save_id = str(self._final), ""
        self._lock = self._final.with_name(f".{self._final.name}.{_LOCK}")
        self._unfinished = self._final.with_name(f".{self._final.name}.{_SAVING}")
        self._fsync = fsync
        self._lock_fd = -1

    def hand_over(self) -> tuple[int, ...]:
        fd, self._lock_fd = self._lock_fd, -1
        return (fd,)

    def take_over(self, save_id: str, fds: Sequence[int]) -> None:
        self.save_id, (self._lock_fd,) = save_id, fds

    def open_note(self, name: str) -> Callable[[bytes], None]:
        path = self._unfinished / name
        with storage_errors(
            f"creating {path} (is the path on a file system that all ranks share?)"
        ):
            file = open(f"{path}.new", "xb")  # noqa: SIM115 - open until it is finished
            fcntl.flock(file, fcntl.LOCK_EX)
            os.rename(f"{path}.new", path)  # never visible without its lock

        def finish(content: bytes) -> None:
            with storage_errors(f"writing {path}"), file:
                file.write(content + _NOTE_END)

        return finish

    def read_note(self, name: str) -> bytes | None:
        try:
            with open(self._unfinished / name, "rb") as file:
                if _is_locked(file.fileno()):
                    return None
                content = file.read()
        except FileNotFoundError:
            return None
        if not content.endswith(_NOTE_END):
            raise PeerLostError(
                f"{self._final}: a writer process died, or found the disk full, while it noted "
                f"what it has written ({name})"
            )
        return content

    def is_marked(self, save_id: str) -> bool:
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            open(self._lock, "rb") as file,
        ):
            return file.read() == save_id.encode() and _is_locked(file.fileno())
        return False

    def begin(self) -> str:
        with storage_errors(f"beginning to save {self._final}"):
            self._check_target()
            self._final.parent.mkdir(parents=True, exist_ok=True)
            self.sweep()
            deadline = time.monotonic() + _CLEANUP_S
            while not self._takes_lock():
                if time.monotonic() > deadline:
                    what = "another save to this path is in progress; wait for it to end"
                    raise StorageError(errno.EBUSY, f"{self._final}: {what}")
                time.sleep(_POLL_S)
            try:
                self.save_id = secrets.token_hex(8)
                os.pwrite(self._lock_fd, self.save_id.encode(), 0)
                self._unfinished.mkdir()
            except BaseException:
                self.discard()
                raise
            return self.save_id

    def _takes_lock(self) -> bool:
        """Lock the path, unless another process has."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        while True:
            fd = os.open(self._lock, flags, 0o666)
            with contextlib.suppress(FileNotFoundError):
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(fd)
                    return False
                if os.path.samestat(os.fstat(fd), os.stat(self._lock)):
                    self._lock_fd = fd
                    return True
            os.close(fd)  # its last owner has removed it meanwhile

    def _check_target(self) -> bool:
        """Return whether there is a checkpoint of ours, which may be replaced.

        Raises:
            StorageError: there is something else, or something else beside it.
        """
        if not self._final.exists() and not self._final.is_symlink():
            return False
        if not self._final.is_dir() or self._final.is_symlink():
            raise StorageError(
                errno.EEXIST, f"{self._final}: there is something that is not a folder"
            )
        if not os.listdir(self._final):
            return False
        try:
            files, names = _claims(self._final)
        except (CorruptionError, UnsupportedError, StorageError) as error:
            raise StorageError(
                errno.EEXIST,
                f"{self._final}: the folder holds files that are not a TorchRelay checkpoint, or "
                f"not a whole one ({error}); it is left alone: save elsewhere",
            ) from None
        foreign = {*names} - files - {MANIFEST}
        if foreign:
            raise StorageError(
                errno.EEXIST,
                f"{self._final}: the checkpoint is not replaced, because {min(foreign)!r} in its "
                "folder is not part of it; move that, or save elsewhere",
            )
        return True

    def create(self, name: str) -> _LocalSink:
        return _LocalSink(str(self._unfinished / name), self._fsync)

    def commit(self, manifest: bytes, files: Mapping[str, int], names: Mapping[str, str]) -> None:
        before = {new: old for old, new in names.items()}
        try:
            with contextlib.closing(LocalFolder(str(self._unfinished))) as written:
                check_files(written, {before.get(name, name): files[name] for name in files})
            with contextlib.closing(self.create(MANIFEST)) as sink:
                sink.write(0, memoryview(manifest))
            with storage_errors(f"committing {self._final}"):
                for old, new in names.items():  # from here on, the manifest claims them
                    os.rename(self._unfinished / old, self._unfinished / new)
                for name in filter(_NOTE.fullmatch, os.listdir(self._unfinished)):
                    _unlink(self._unfinished / name)
                self._sync_folder(self._unfinished)
                self._publish()
        finally:
            self.discard()  # or what was replaced

    def _publish(self) -> None:
        """Give the folder its name; if a checkpoint has it, exchange the two atomically."""
        if not self._check_target():
            os.rename(self._unfinished, self._final)
        else:
            try:
                exchange(os.fsencode(self._unfinished), os.fsencode(self._final))
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
                    raise
                raise StorageError(
                    errno.EEXIST,
                    f"{self._final}: there is a checkpoint already, and this system or file system "
                    "cannot replace a folder in one step; save under another name",
                ) from None
        self._sync_folder(self._final.parent)

    def _sync_folder(self, path: Path) -> None:
        if self._fsync:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                flush(fd)
            finally:
                os.close(fd)

    def discard(self) -> None:
        """Remove the folder of a save or a removal, and the lock if this process has it.

        If files of others are in the folder, it gets its name back.
        """
        fd, self._lock_fd = self._lock_fd, -1
        if fd < 0:
            return
        with contextlib.suppress(OSError):  # the next save tries again
            try:
                _clear(self._unfinished)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
                os.rename(self._unfinished, self._final)
            _unlink(self._lock)
        os.close(fd)

    def remove(self, save_id: str) -> None:
        with storage_errors(f"removing {self._final}"):
            if self._takes_lock():  # from here on, no save replaces it
                try:
                    _claims(self._final)
                    if is_of(partial(LocalFolder, str(self._final)), save_id):
                        os.rename(self._final, self._unfinished)
                finally:
                    self.discard()

    def sweep(self) -> None:
        with os.scandir(self._final.parent) as entries:
            names = [entry.name for entry in entries if not entry.is_symlink()]
        for name in {match[1] for match in map(_UNFINISHED.fullmatch, names) if match}:
            left = LocalTransaction(str(self._final.with_name(name)))
            with contextlib.suppress(OSError):  # another user's: that user's next save can
                if left._takes_lock():
                    left.discard()


def _claims(path: Path) -> tuple[frozenset[str], list[str]]:
    """Return the data files of a checkpoint of ours, and the names of all files in its folder.

    Raises:
        CorruptionError, UnsupportedError, StorageError: there is no whole one.
    """
    return read_again(
        partial(LocalFolder, str(path)), lambda folder: (claims_of(folder), folder.names())
    )


def _unlink(path: Path) -> None:
    # a folder of that name is not ours
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        os.unlink(path)


def _clear(folder: Path) -> None:
    """Remove a folder whose name is ours, and our files in it.

    Raises:
        OSError: one cannot be removed, or there are files of others.
    """
    if not folder.is_dir() or folder.is_symlink():
        return
    try:
        files, _ = _claims(folder)
    except (CorruptionError, UnsupportedError, StorageError):
        files = frozenset(filter(DATA_NAME.fullmatch, os.listdir(folder)))
    names = os.listdir(folder)
    ours = [name for name in names if name in files or name == MANIFEST or _NOTE.fullmatch(name)]
    for name in sorted(ours, key=MANIFEST.__eq__):  # it lists our files, so it goes last
        _unlink(folder / name)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(folder)

"""Checkpoints in local folders and on mounted file systems: locks, atomic renames, cleanup.

A save to ``ckpt/step-1`` writes into ``ckpt/.step-1.torchrelay-saving``, which holds a locked file
while the saver lives, and becomes ``step-1`` by one rename. Whatever kills the saver, its lock is
gone with it, and the next save into ``ckpt`` removes what is left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torchrelay import _native
from torchrelay.checkpoint import _linux, _manifest
from torchrelay.checkpoint._types import MANIFEST
from torchrelay.errors import CorruptionError, PeerLostError, StorageError

__all__ = ["LocalFolder", "LocalTransaction", "remove", "sweep"]

LOCK = ".lock"
_SAVING, _NEW, _TRASH = "torchrelay-saving", "torchrelay-new", "torchrelay-trash"
_TEMPORARY = re.compile(rf"\..+\.({_SAVING}|{_NEW}|{_TRASH})")
_NOTE_END = b"\n"
_ATTEMPTS = 100  # a save that starts while others are cleaned up tries again


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Convert errors of the operating system to :class:`StorageError`, with ``what`` was done."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError | CorruptionError):
            raise
        advice = {
            errno.ENOSPC: "; free some space, or save elsewhere",
            errno.EDQUOT: "; the quota is used up",
            errno.EROFS: "; the file system is read-only",
            errno.EACCES: "; check its owner and mode",
        }.get(error.errno or 0, "")
        raise StorageError(
            error.errno or errno.EIO, f"{what}: {error.strerror or error}{advice}"
        ) from error


class LocalFolder:
    """A folder that is read with ``preadv``. Files are opened once, never through symbolic links.

    It stays the same folder from the first use on, even if its name is given to another.
    """

    def __init__(self, path: str, *, follow_links: bool = False) -> None:
        self.location = path
        self._flags = os.O_RDONLY | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
        self._folder_fd = -1
        self._fds: dict[str, int] = {}
        self._lock = threading.Lock()

    def _fd(self, name: str) -> int:
        with self._lock:
            if name not in self._fds:
                self._fds[name] = self._open(name)
            return self._fds[name]

    def _open(self, name: str) -> int:
        path = os.path.join(self.location, name)
        try:
            fd = os.open(name, self._flags, dir_fd=self._here())
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CorruptionError(
                    f"{path}: a symbolic link, which a checkpoint never holds"
                ) from None
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                raise CorruptionError(f"{path}: the file is missing") from None
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
        """Return the names of the files in the folder."""
        with self._lock, storage_errors(f"listing {self.location}"):
            return sorted(os.listdir(self._here()))

    @property
    def replaced(self) -> bool:
        """Return whether the name is now that of another folder."""
        try:
            return not os.path.samestat(os.fstat(self._folder_fd), os.stat(self.location))
        except OSError:
            return False

    @property
    def identity(self) -> str:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        with self._lock:
            found = os.fstat(self._here())
        return f"{boot_id}/{found.st_dev}/{found.st_ino}"

    def size_bytes(self, name: str) -> int:
        return os.fstat(self._fd(name)).st_size

    def read(self, name: str, offset: int, into: memoryview) -> None:
        fd, done = self._fd(name), 0
        with storage_errors(f"reading {self.location}/{name} at byte {offset}"):
            while done < len(into):
                count = os.preadv(fd, [into[done:]], offset + done)
                if count == 0:
                    raise self._too_short(name, offset, done, len(into))
                done += count

    def checksums(self, name: str, offset: int, size_bytes: int, block_bytes: int) -> bytes:
        with storage_errors(f"reading {self.location}/{name} at byte {offset}"):
            found, done = _native.crc32c_of_file(self._fd(name), offset, size_bytes, block_bytes)
        if done < size_bytes:
            raise self._too_short(name, offset, done, size_bytes)
        return found

    def _too_short(self, name: str, offset: int, done: int, size_bytes: int) -> CorruptionError:
        return CorruptionError(
            f"{self.location}/{name}: the file ends at byte {offset + done}, "
            f"{size_bytes - done} bytes before it should"
        )

    def map(self, name: str, offset: int, size_bytes: int) -> memoryview | None:
        fd, first = self._fd(name), offset // mmap.PAGESIZE * mmap.PAGESIZE
        with storage_errors(f"mapping {self.location}/{name} at byte {offset}"):
            if os.fstat(fd).st_size < offset + size_bytes:
                raise CorruptionError(
                    f"{self.location}/{name}: the file ends before byte {offset + size_bytes}"
                )
            # Writable for torch's sake, but private: nothing that is written there reaches the
            # file.
            mapped = mmap.mmap(
                fd, offset - first + size_bytes, access=mmap.ACCESS_COPY, offset=first
            )
            try:
                _linux.populate(mapped)
            except OSError:  # read() reports the error; the mapping would raise SIGBUS
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
                done += os.pwrite(self._fd, data[done:], offset + done)
        if self._fsync:
            _linux.start_writeback(self._fd, offset, len(data))

    def close(self) -> None:
        try:
            if self._fsync:
                with storage_errors(f"writing {self._path} to the disk"):
                    os.fsync(self._fd)
        finally:
            self.abort()

    def abort(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _LocalNote:
    """A file that is locked until it is finished, or until its writer dies."""

    def __init__(self, path: str) -> None:
        with storage_errors(
            f"creating {path} (is the path on a file system that all ranks share?)"
        ):
            self._file = open(f"{path}.new", "xb")  # noqa: SIM115 - open until finish()
            fcntl.flock(self._file, fcntl.LOCK_EX)
            os.rename(f"{path}.new", path)  # never visible without its lock

    def finish(self, content: bytes) -> None:
        with storage_errors(f"writing {self._file.name}"), self._file:
            self._file.write(content + _NOTE_END)


def _lockable(fd: int) -> bool:
    """Return whether no process has locked the file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


class LocalTransaction:
    """A save into a local folder."""

    sequential = False
    max_file_bytes = 16 << 30

    def __init__(self, path: str, *, fsync: bool = True) -> None:
        self._final = Path(os.path.abspath(path))
        self.location = str(self._final)
        self._saving = self._final.parent / f".{self._final.name}.{_SAVING}"
        self._fsync = fsync
        self._lock_fd = -1

    def hand_over(self) -> tuple[str, tuple[int, ...]]:
        return "", (self._lock_fd,)

    def release(self) -> None:
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def take_over(self, token: str, fds: Sequence[int]) -> None:
        (self._lock_fd,) = fds

    def open_note(self, name: str) -> _LocalNote:
        return _LocalNote(str(self._saving / name))

    def read_note(self, name: str) -> bytes | None:
        try:
            with open(self._saving / name, "rb") as file:
                if not _lockable(file.fileno()):
                    return None
                content = file.read()
        except FileNotFoundError:
            return None
        if not content.endswith(_NOTE_END):
            raise PeerLostError(
                f"{self._final}: a writer process died while it wrote its part ({name})"
            )
        return content

    def under_way(self, note: str) -> bool:
        if not (self._saving / note).exists():
            return False
        try:
            with open(self._saving / LOCK, "rb+") as lock:
                return not _lockable(lock.fileno())
        except FileNotFoundError:
            return False

    def committed_id(self) -> str | None:
        try:
            with open(self._final / MANIFEST, "rb") as file:
                return _manifest.id_of(file.readline(4096), str(self._final / MANIFEST))
        except (FileNotFoundError, NotADirectoryError, CorruptionError):
            return None

    def begin(self) -> None:
        with storage_errors(f"beginning to save {self._final}"):
            self._check_target()
            self._final.parent.mkdir(parents=True, exist_ok=True)
            sweep(str(self._final.parent), spare=self._saving.name)
            for _ in range(_ATTEMPTS):
                if self._claim():
                    return
        raise StorageError(
            errno.EBUSY, f"{self._saving}: other processes remove it again and again"
        )

    def _check_target(self) -> None:
        if not self._final.exists() and not self._final.is_symlink():
            return
        if not self._final.is_dir() or self._final.is_symlink():
            raise StorageError(
                errno.EEXIST, f"{self._final}: there is something that is not a folder"
            )
        if any(self._final.iterdir()) and not (self._final / MANIFEST).exists():
            raise StorageError(
                errno.EEXIST,
                f"{self._final}: the folder holds files that are not a TorchRelay checkpoint; save "
                "elsewhere",
            )

    def _claim(self) -> bool:
        """Return whether the folder for saving is now ours; False: try again."""
        new = self._saving.with_name(f".{self._final.name}.{secrets.token_hex(4)}.{_NEW}")
        new.mkdir()
        try:
            lock_fd = os.open(new / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # another process took it for something left behind
            return False
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(new, self._saving)
        except (FileNotFoundError, BlockingIOError):
            os.close(lock_fd)
            return False
        except OSError as error:
            os.close(lock_fd)
            shutil.rmtree(new, ignore_errors=True)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if not _remove_if_abandoned(self._saving):
                raise StorageError(
                    errno.EBUSY,
                    f"{self._final}: another save to this path is in progress; wait for it to end",
                ) from None
            return False
        self._lock_fd = lock_fd
        return True

    def create(self, name: str) -> _LocalSink:
        return _LocalSink(str(self._saving / name), self._fsync)

    def commit(self, manifest: bytes, files: Mapping[str, int]) -> None:
        try:
            self._check_files(files)
            sink = self.create(MANIFEST)
            sink.write(0, memoryview(manifest))
            sink.close()
            with storage_errors(f"committing {self._final}"):
                self._sync_folder(self._saving)
                self._publish()
        except BaseException:
            self.discard()
            raise
        self.release()

    def _check_files(self, files: Mapping[str, int]) -> None:
        for name, size_bytes in files.items():
            path = self._saving / name
            found = path.stat().st_size if path.exists() else None
            if found != size_bytes:
                raise StorageError(
                    errno.EIO,
                    f"{path}: a rank wrote {size_bytes} bytes, and the coordinator finds {found}; "
                    "is the path on a file system that all ranks share?",
                )

    def _publish(self) -> None:
        if (self._final / MANIFEST).exists():
            self._replace()
            return
        os.rename(self._saving, self._final)
        self._sync_folder(self._final.parent)
        # only now: without its lock, the folder for saving would look abandoned
        self._unlock_final()

    def _replace(self) -> None:
        """Replace the old checkpoint by the new one atomically.

        Both have our lock, so that the folder for saving stays ours until the old one is removed.
        """
        self._lock_final()
        try:
            _linux.exchange(str(self._saving), str(self._final))
        except OSError as error:
            self._unlock_final()
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
                raise
            raise StorageError(
                errno.EEXIST,
                f"{self._final}: there is a checkpoint already, and this file system cannot "
                "replace a folder in one step; save under another name",
            ) from error
        self._sync_folder(self._final.parent)
        self._unlock_final()
        _throw_away(self._saving)

    def _lock_final(self) -> None:
        while True:
            link = self._final / f"{LOCK}.{secrets.token_hex(4)}"
            os.link(self._saving / LOCK, link)
            try:
                os.rename(link, self._final / LOCK)
                return
            except FileNotFoundError:  # another process has tidied up
                continue

    def _unlock_final(self) -> None:
        _tidy(self._final)

    def _sync_folder(self, path: Path) -> None:
        if self._fsync:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def discard(self) -> None:
        if self._lock_fd >= 0:
            with contextlib.suppress(OSError):  # what cannot be removed now, the next save removes
                _throw_away(self._saving)
            self.release()


def remove(path: str) -> None:
    """Remove a checkpoint; others see it whole or not at all."""
    with storage_errors(f"removing {path}"):
        _throw_away(Path(path))


def sweep(parent: str, spare: str = "") -> None:
    """Remove what killed savers have left in ``parent``, except the name ``spare``."""
    for name in os.listdir(parent):
        path = Path(parent, name)
        if _TEMPORARY.fullmatch(name):
            if name != spare:
                _remove_if_abandoned(path)
        elif (path / MANIFEST).exists():
            # Its saver may have been killed right before or after the commit.
            _tidy(path)


def _tidy(path: Path) -> None:
    """Remove what its saver needed from a committed checkpoint. Others may do so at the same
    time.
    """
    for pattern in (f"{LOCK}*", "part-*.json*"):
        for left in path.glob(pattern):
            left.unlink(missing_ok=True)


def _remove_if_abandoned(path: Path) -> bool:
    """Remove a temporary folder; return False if its owner lives.

    A folder for saving always holds its owner's lock: only the holder of the lock may rename it.
    """
    try:
        fd = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        if not path.name.endswith(_SAVING):
            _throw_away(path)
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path / LOCK)):
                _throw_away(path)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def _throw_away(path: Path) -> None:
    """Rename a folder, so that no process sees half of it, and remove it."""
    trash = path
    if not path.name.endswith(_TRASH):
        trash = path.with_name(f".{path.name.lstrip('.')}.{secrets.token_hex(4)}.{_TRASH}")
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)

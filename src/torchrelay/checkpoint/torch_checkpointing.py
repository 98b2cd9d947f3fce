"""A storage for torch_checkpointing that verifies what it reads; needs that package."""

from __future__ import annotations

import io
import json
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch_checkpointing.storage import filesystem

from torchrelay import _native
from torchrelay.errors import CorruptionError

__all__ = ["VerifiedStorageConfig"]

_logger = logging.getLogger("torchrelay.checkpoint")
_END = ".crc32c"


def _sums_of(path: str | Path) -> Path:
    """Return the path of the file with the size and the checksum of another."""
    return Path(path).with_name(f".{Path(path).name}{_END}")


@dataclass
class VerifiedStorageConfig(filesystem.LocalFileSystemStorageConfig):  # type: ignore[misc]
    """Files of a file system, each with a hidden file beside it that has its CRC-32C.

    A process verifies each file when it reads from it for the first time: damage raises a
    :class:`torchrelay.errors.CorruptionError`. Where the checksum is missing, a warning says so.

    Args:
        use_direct_io: whether files are written past the page cache.
    """

    use_direct_io: bool = False

    def create_storage(self) -> _Storage:
        return _Storage(config=self)


class _Storage(filesystem.LocalFileSystemStorage):  # type: ignore[misc]
    def __init__(self, config: VerifiedStorageConfig) -> None:
        super().__init__(config)
        self._verified: set[tuple[int, ...]] = set()

    def stream_write(self, path: Path) -> io.IOBase:
        return _Writer(path, "wb", self._use_direct_io)

    def write(self, path: Path, data: Any) -> None:
        with self.stream_write(path) as stream:
            stream.write(data)

    def stream_read(self, path: Path, read_args: Any = None) -> Any:
        with open(path, "rb", buffering=0) as file:
            self._verify(path, file.fileno())
        return super().stream_read(path, read_args)

    def _verify(self, path: Path, fd: int) -> None:
        found = os.fstat(fd)
        version = (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)
        if version in self._verified:
            return
        try:
            size_bytes, checksum = json.loads(_sums_of(path).read_bytes())
        except FileNotFoundError:
            _logger.warning("%s is not verified: it was written without a checksum", path)
        else:
            ends = np.zeros(1, np.uint64), np.array([found.st_size], np.uint64)
            actual = np.frombuffer(_native.crc32c_of_file(fd, *ends)[0], np.uint32)[0]
            if (found.st_size, actual) != (size_bytes, checksum):
                raise CorruptionError(f"{path}: it is damaged, or was not written to the end")
        self._verified.add(version)

    def rename(self, src_path: Path, dst_path: Path, *args: Any, **options: Any) -> None:
        super().rename(src_path, dst_path, *args, **options)
        _sums_of(dst_path).unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # a folder has its own inside
            _sums_of(src_path).rename(_sums_of(dst_path))

    def delete(self, path: Path) -> None:
        super().delete(path)
        _sums_of(path).unlink(missing_ok=True)

    def ls(self, path: Path) -> list[str]:
        return [name for name in super().ls(path) if not name.endswith(_END)]


class _Writer(filesystem.WriteStream):  # type: ignore[misc]
    """Stores the checksum of what was written, if nothing failed."""

    _size_bytes, _checksum = 0, 0

    def write(self, data: Any) -> int:
        self._size_bytes += memoryview(data).nbytes
        self._checksum = _native.crc32c(data, self._checksum)
        written: int = super().write(data)
        return written

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        super().__exit__(kind, *rest)
        if kind is None:
            _sums_of(self._path).write_text(json.dumps([self._size_bytes, self._checksum]))

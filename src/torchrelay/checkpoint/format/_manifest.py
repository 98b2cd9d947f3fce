"""Reading and writing ``manifest.json``, which makes a folder of data files a checkpoint.

The first line is enough to order checkpoints by age; the last holds the CRC32C of what comes
before it, without the comma and the line break. What is read is not trusted: every name, size,
offset and range is checked before anything is done with it.
"""

from __future__ import annotations

import binascii
import errno
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from json.encoder import encode_basestring_ascii as quoted
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

from torchrelay import _native
from torchrelay._boxes import Box, tiling_fault
from torchrelay.checkpoint._tasks import no_collection
from torchrelay.checkpoint._types import (
    BLOCK_BYTES,
    DTYPES,
    MANIFEST,
    MAX_HEADER_BYTES,
    Chunk,
    DataFile,
    Dtype,
    Manifest,
    StatePath,
    TensorEntry,
)
from torchrelay.checkpoint.storage._contract import Folder, read_again
from torchrelay.errors import CorruptionError, StorageError, UnsupportedError

__all__ = [
    "MAX_DIMS",
    "MAX_MANIFEST_BYTES",
    "PARSING_ERRORS",
    "Head",
    "Parser",
    "all_bytes",
    "check",
    "chunk_text",
    "claims_of",
    "from_bytes",
    "from_folder",
    "head_at",
    "is_of",
    "is_ours",
    "parse",
    "quoted",
    "tensor_text",
    "to_bytes",
]

_FORMAT, _VERSION = "torchrelay-checkpoint", 1
_START = f'{{"format":"{_FORMAT}",'.encode()
MAX_MANIFEST_BYTES = 1 << 30
_HEAD_BYTES = 8192  # at least as long as any first line
_MAX_INT = (1 << 63) - 1
MAX_DIMS = 64
_MAX_BLOCK_BYTES = 1 << 30
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
_TENSOR_FIELDS = itemgetter("dtype", "shape", "chunks")
# What a value of another type may raise where it is used.
PARSING_ERRORS = (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError)
_CHUNK_FIELDS = itemgetter("offsets", "sizes", "file", "bytes", "crc32c")
_TAIL = ',\n"crc32c":"{:08x}"}}\n'
_TAIL_BYTES = len(_TAIL.format(0))


class Head(NamedTuple):
    """The first line of a manifest: which checkpoint it is of.

    ``name`` is the last part of the path that it was saved to; a copy or a renamed folder has
    another. ``saved_at_ns`` is by the clock of the rank that committed it.
    """

    saved_at_ns: int
    id: str
    name: str


def to_bytes(
    head: Head,
    *,
    world_size: int,
    files: Mapping[str, DataFile],
    tensors: Mapping[str, str],
    objects: Mapping[str, Any],
    paths: Mapping[str, StatePath],
) -> bytes:
    """Return the content of ``manifest.json``; ``tensors`` are results of :func:`tensor_text` by
    key.
    """
    first = {"format": _FORMAT, "version": _VERSION, **head._asdict()}
    stored = {
        key: path
        for key, path in paths.items()
        if path != (key,) or (key not in tensors and key not in objects)
    }
    parts = [
        _json({**first, "world_size": world_size, "block_bytes": BLOCK_BYTES})[:-1],
        f'"files":{_json({name: _file_json(file) for name, file in files.items()})}',
        f'"tensors":{{{",".join(f"{quoted(key)}:{text}" for key, text in tensors.items())}}}',
        f'"objects":{_json(dict(objects))}',
        f'"paths":{_json(stored)}',
    ]
    body = ",\n".join(parts).encode()
    return body + _TAIL.format(_native.crc32c(body)).encode()


def tensor_text(dtype: str, shape: tuple[int, ...], chunks: Sequence[str]) -> str:
    """Return a tensor's entry in the manifest; ``chunks`` are results of :func:`chunk_text`."""
    return f'{{"dtype":"{dtype}","shape":{[*shape]},"chunks":[{",".join(chunks)}]}}'


def chunk_text(
    box: Box, file: str, name: str, start: int, checksums: bytes | bytearray, size_bytes: int
) -> str:
    """Return a chunk's entry in the manifest."""
    return (
        f'{{"offsets":{[*box.offsets]},"sizes":{[*box.sizes]},"file":"{file}","name":{quoted(name)},'
        f'"bytes":[{start},{start + size_bytes}],'
        f'"crc32c":"{binascii.b2a_base64(checksums, newline=False).decode()}"}}'
    )


_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _file_json(file: DataFile) -> dict[str, Any]:
    return {**file._asdict(), "header_crc32c": f"{file.header_crc32c:08x}"}


def head_of(data: bytes, where: str) -> Head:
    """Return the first line of a manifest of ours from its first bytes; it is not verified.

    Raises:
        CorruptionError: it is not a manifest of ours.
    """
    return Head(*Parser(where).fields(_first_line(data, where), saved_at_ns=int, id=str, name=str))


def is_ours(folder: Folder) -> bool:
    """Return whether the manifest in a folder begins as ours do; other programs have one, too.

    Raises:
        CorruptionError, StorageError: it cannot be read.
    """
    return folder.content(MANIFEST, len(_START)) == _START


def _check_whole(data: bytes, where: str) -> None:
    """Compare a manifest with its checksum.

    Raises:
        CorruptionError: they differ.
    """
    body, tail = data[:-_TAIL_BYTES], data[-_TAIL_BYTES:]
    if tail != _TAIL.format(_native.crc32c(body)).encode():
        raise CorruptionError(
            f"{where}: the manifest is damaged or cut short (its checksum does not match)"
        )


def head_at(open_folder: Callable[[], Folder]) -> Head | None:
    """Return the first line of the manifest in a folder; None if there is none of ours.

    Raises:
        StorageError: it is not known, as the storage fails.
    """

    def read(folder: Folder) -> Head:
        return head_of(folder.content(MANIFEST, _HEAD_BYTES), folder.location)

    try:
        return read_again(open_folder, read)
    except CorruptionError:
        return None
    except StorageError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENXIO):
            raise
        return None


def is_of(open_folder: Callable[[], Folder], save_id: str) -> bool:
    """Return whether a folder holds the checkpoint of this id.

    Raises:
        StorageError: as :func:`head_at`.
    """
    head = head_at(open_folder)
    return head is not None and head.id == save_id


def all_bytes(folder: Folder) -> tuple[bytes, str]:
    """Return the bytes of the manifest in a folder, and its path.

    Raises:
        CorruptionError: it is missing or too large.
        StorageError: it cannot be read.
    """
    data, where = folder.content(MANIFEST, MAX_MANIFEST_BYTES + 1), f"{folder.location}/{MANIFEST}"
    if len(data) > MAX_MANIFEST_BYTES:
        raise CorruptionError(
            f"{where}: more bytes than a manifest may have ({MAX_MANIFEST_BYTES})"
        )
    return data, where


def claims_of(folder: Folder) -> frozenset[str]:
    """Return the names of the data files that the manifest in a folder claims as its own.

    Whatever else lies beside it belongs to somebody else.

    Raises:
        CorruptionError: it is missing, damaged, or not a manifest of ours.
        UnsupportedError: a version of TorchRelay wrote it that this one does not know.
        StorageError: it cannot be read.
    """
    data, where = all_bytes(folder)
    check(data, where)
    lines = data.split(b",\n", 2)
    (files,) = Parser(where).fields(parse(b"{" + lines[1] + b"}", where), files=dict)
    return frozenset(filter(_FILE_NAME.fullmatch, files))


def from_folder(folder: Folder) -> Manifest:
    """Read the manifest in a folder.

    Raises:
        CorruptionError, UnsupportedError, StorageError: as :func:`all_bytes`, :func:`from_bytes`.
    """
    return from_bytes(*all_bytes(folder))


@no_collection()
def from_bytes(data: bytes, where: str) -> Manifest:
    """Parse a manifest. ``where`` is its path, for errors.

    Raises:
        CorruptionError: it is damaged, of another format, or contradicts itself.
        UnsupportedError: a version of TorchRelay wrote it that this one does not know.
    """
    check(data, where)
    return Parser(where).manifest(parse(data, where))


def check(data: bytes, where: str) -> None:
    """Check that a manifest is of our format and version, and whole.

    Raises:
        CorruptionError: it is not.
        UnsupportedError: a version of TorchRelay wrote it that this one does not know.
    """
    (version,) = Parser(where).fields(_first_line(data, where), version=int)
    if version != _VERSION:
        raise UnsupportedError(
            f"{where}: the checkpoint has format version {version}, this TorchRelay reads version "
            f"{_VERSION}; use the TorchRelay that wrote it, or update this one"
        )
    _check_whole(data, where)


def _first_line(data: bytes, where: str) -> Any:
    if not data.startswith(_START):
        raise CorruptionError(f"{where}: it is not the manifest of a TorchRelay checkpoint")
    return parse(data.partition(b",\n")[0] + b"}", where)


def parse(data: bytes, where: str, what: str = "the manifest") -> Any:
    """Parse JSON.

    Raises:
        CorruptionError: it is damaged, or has a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise CorruptionError(f"{where}: the key {twice!r} occurs twice")
        return found

    try:
        return json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(
            f"{where}: {what} is damaged or cut short (not a JSON document: {error})"
        ) from None


class Parser:
    """Parses a manifest; each method raises :class:`CorruptionError` for an invalid value.

    ``advice`` is added to each message.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self.advice = ""

    def fail(self, what: str) -> NoReturn:
        raise CorruptionError(f"{self._where}: {what}{self.advice}")

    def fields(self, record: Any, what: str = "the manifest", **kinds: type) -> list[Any]:
        """Return the fields of a record that are of these types; integers are sizes."""
        for name, kind in kinds.items():
            if not isinstance(record, dict) or name not in record:
                self.fail(f"{what} lacks {name!r}")
            if type(record[name]) is not kind:
                self.fail(f"{name!r} of {what} is not of type {kind.__name__}")
            if kind is int and not 0 <= record[name] <= _MAX_INT:
                self.fail(f"{name!r} of {what} is {record[name]}, out of range")
        return [record[name] for name in kinds]

    def manifest(self, document: Any) -> Manifest:
        save_id, world_size, block_bytes = self.fields(
            document, id=str, world_size=int, block_bytes=int
        )
        if not 1 <= block_bytes <= _MAX_BLOCK_BYTES:
            self.fail(f"'block_bytes' of the manifest is not between 1 and {_MAX_BLOCK_BYTES}")
        records, tensors, objects, paths = self.fields(
            document, files=dict, tensors=dict, objects=dict, paths=dict
        )
        files = {name: self.file(name, record) for name, record in records.items()}
        entries = self.tensors(tensors, files, block_bytes)
        both = entries.keys() & objects.keys()
        if both:
            self.fail(f"{min(both)!r} is both a tensor and an object")
        paths = {key: self.path(key, value) for key, value in paths.items()}
        found = Manifest(save_id, world_size, files, entries, objects, paths, block_bytes)
        for name, chunks in found.by_file.items():
            index = chunks.overlap()
            if index is not None:  # and they are not tied tensors, which have the same range
                one, other = chunks.keys[index - 1 : index + 1]
                self.fail(f"{one!r} and {other!r} overlap in {name} at byte {chunks.starts[index]}")
        return found

    def file(self, name: str, record: Any) -> DataFile:
        if not _FILE_NAME.fullmatch(name):
            self.fail(f"{name!r} is not the name of a data file inside the checkpoint")
        what = f"file {name}"
        size_bytes, header_bytes, checksum = self.fields(
            record, what, size_bytes=int, header_bytes=int, header_crc32c=str
        )
        if not re.fullmatch(r"[0-9a-f]{8}", checksum):
            self.fail(f"'header_crc32c' of {what} is not a checksum")
        file = DataFile(size_bytes, header_bytes, int(checksum, 16))
        if file.header_bytes > min(file.size_bytes, MAX_HEADER_BYTES):
            self.fail(
                f"the header of {what} is larger than the file or than {MAX_HEADER_BYTES} bytes"
            )
        return file

    def tensors(
        self, records: Any, files: Mapping[str, DataFile], block_bytes: int
    ) -> dict[str, TensorEntry]:
        """Parse tensors in few steps, as there may be a million; each alone if a number is wrong,
        to find the tensor that has it.
        """
        numbers: list[int] = []
        found = {}
        for key, record in records.items():
            what = f"tensor {key!r}"
            try:
                dtype, shape, parts = _TENSOR_FIELDS(record)
                stored = DTYPES.get(dtype) or Dtype.unknown(dtype)  # it may never be wanted
                if len(shape) > MAX_DIMS:
                    self.fail(f"{what} has {len(shape)} dimensions, more than {MAX_DIMS}")
                numbers += shape
                chunks = [
                    self._chunk(what, stored.itemsize, part, files, block_bytes, numbers)
                    for part in parts
                ]
                fault = tiling_fault(tuple(shape), [chunk.box for chunk in chunks])
            except KeyError as error:
                self.fail(f"{what} lacks {error}")
            except PARSING_ERRORS as error:
                self.fail(f"{what} is damaged ({type(error).__name__}: {error})")
            if fault:
                self.fail(f"{what} of shape {shape}: {fault}")
            found[key] = TensorEntry(stored, tuple(shape), tuple(chunks))
        if {*map(type, numbers)} - {int} or not (
            0 <= min(numbers, default=0) <= max(numbers, default=0) <= _MAX_INT
        ):
            if len(found) == 1:
                self.fail(
                    f"tensor {min(found)!r} has a size, an offset or a byte that is not a whole "
                    f"number from 0 to {_MAX_INT}"
                )
            for key, record in records.items():
                self.tensors({key: record}, files, block_bytes)
        return found

    def _chunk(
        self,
        what: str,
        itemsize: int,
        record: Any,
        files: Mapping[str, DataFile],
        block_bytes: int,
        numbers: list[int],
    ) -> Chunk:
        """Parse a chunk; add its sizes and offsets, whose types are not checked, to ``numbers``."""
        offsets, sizes, name, (start, end), text = _CHUNK_FIELDS(record)
        if len(sizes) > MAX_DIMS:
            self.fail(f"{what} has a chunk of {len(sizes)} dimensions, more than {MAX_DIMS}")
        checksums = binascii.a2b_base64(text)
        numbers += (*offsets, *sizes, start, end)
        if len(text) != -(-len(checksums) // 3) * 4:
            raise ValueError("a checksum is not base64")
        if name not in files:
            self.fail(f"{what} lies in {name!r}, which the manifest does not list")
        file, size_bytes = files[name], math.prod(sizes) * itemsize if itemsize else end - start
        if end - start != size_bytes or size_bytes < 0:
            self.fail(
                f"{what}, the chunk at {offsets}, needs {size_bytes} bytes, and its range has "
                f"{end - start}"
            )
        if not file.header_bytes <= start <= file.size_bytes - size_bytes:
            self.fail(
                f"{what}, the chunk at {offsets}, lies at bytes {[start, end]} of {name}, out of "
                f"range: the file has {file.size_bytes} bytes; it is cut short, or this is damaged"
            )
        if checksums and len(checksums) != 4 * -(-size_bytes // block_bytes):
            self.fail(
                f"{what}, the chunk at {offsets}, has {len(checksums)} bytes of checksums for "
                f"{size_bytes} bytes"
            )
        return Chunk(Box(tuple(offsets), tuple(sizes)), name, start, size_bytes, checksums)

    def path(self, key: str, value: Any) -> StatePath:
        steps = value if type(value) is list else [None]
        if not {*map(type, steps)} <= {str}:
            steps = [tuple(step) if type(step) is list else step for step in steps]
            if not all(map(_is_step, steps)):
                self.fail(f"the path of {key!r} is not a list of keys and indices")
        return tuple(steps)


def _is_step(step: Any) -> bool:
    """Return whether ``step`` is a key, an index, or a tuple of a key that is not a string."""
    return type(step) in (str, int) or (type(step) is tuple and len(step) == 1)

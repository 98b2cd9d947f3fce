"""The types that every module of this component shares. Imports no torch.

A checkpoint holds *tensors*, each cut into *chunks* that lie in *data files*, and *objects* (plain
values). The :class:`Manifest` describes where everything lies. Offsets and sizes count elements,
``*_bytes`` and ``start`` count bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchrelay._boxes import Box
from torchrelay.errors import ArgumentError, UnsupportedError

__all__ = [
    "BLOCK_BYTES",
    "CONTAINER",
    "DATA_NAME",
    "DTYPES",
    "EXPORT",
    "EXPORT_NAME",
    "INDEX",
    "MANIFEST",
    "MAX_DEPTH",
    "MAX_HEADER_BYTES",
    "METADATA",
    "NOTE_NAME",
    "Chunk",
    "DataFile",
    "Dtype",
    "FileChunks",
    "Manifest",
    "Sizes",
    "StatePath",
    "TensorDescription",
    "TensorEntry",
    "check_count",
    "is_container",
    "is_metadata",
]

MANIFEST = "manifest.json"
EXPORT = "$export."  # begins the key of a copy for other readers, in a dtype of its own
METADATA = "$metadata"  # in a state dict: its modules' versions, see :mod:`.state._metadata`
CONTAINER = "$container"  # in a dictionary or a tuple: an empty one of its class
INDEX = "model.safetensors.index.json"  # Hugging Face's, of a model in several files
DATA_NAME = re.compile(r"data-\d{5,}-\d{5,}\.safetensors", re.ASCII)
MAX_DEPTH = 100  # of nested states and values
MAX_HEADER_BYTES = 100_000_008  # as safetensors has it, and the 8 bytes of the length
# Of a file that a commit gives its name.
EXPORT_NAME = re.compile(r"torchrelay-export-\d{5,}-\d{5,}", re.ASCII)
NOTE_NAME = re.compile(r"torchrelay-part-\d{5,}\.json", re.ASCII)
Sizes = NDArray[np.uint64]  # of bytes
StatePath = tuple[str | int | tuple[Any], ...]
# Bytes under one checksum. A reader that wants part of a chunk reads and verifies whole blocks.
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Dtype:
    """How a torch dtype is stored.

    ``code`` is the safetensors name. ``width`` elements of it, in a last dimension of their own,
    make one of ours; so do ``packed`` elements that follow one another in the last dimension.
    """

    name: str
    code: str
    itemsize: int
    width: int = 1
    packed: int = 1

    @classmethod
    def unknown(cls, code: str) -> Dtype:
        """Return the dtype of a tensor that this version can describe, but not read."""
        return cls(code.upper(), code, 0)  # the names of those that we know are in lower case

    def stored_shape(self, shape: tuple[int, ...]) -> list[int]:
        """Return the shape that a tensor of ``shape`` has in a safetensors file."""
        if self.packed > 1:
            *rest, last = shape or (1,)
            return [*rest, last * self.packed]
        return [*shape, self.width] if self.width > 1 else [*shape]


_TABLE = [
    Dtype("bool", "BOOL", 1),
    Dtype("uint8", "U8", 1),
    Dtype("int8", "I8", 1),
    Dtype("uint16", "U16", 2),
    Dtype("int16", "I16", 2),
    Dtype("uint32", "U32", 4),
    Dtype("int32", "I32", 4),
    Dtype("uint64", "U64", 8),
    Dtype("int64", "I64", 8),
    Dtype("float8_e4m3fn", "F8_E4M3", 1),
    Dtype("float8_e5m2", "F8_E5M2", 1),
    Dtype("float8_e4m3fnuz", "F8_E4M3FNUZ", 1),
    Dtype("float8_e5m2fnuz", "F8_E5M2FNUZ", 1),
    Dtype("float8_e8m0fnu", "F8_E8M0", 1),
    Dtype("float4_e2m1fn_x2", "F4", 1, packed=2),
    Dtype("float16", "F16", 2),
    Dtype("bfloat16", "BF16", 2),
    Dtype("float32", "F32", 4),
    Dtype("float64", "F64", 8),
    Dtype("complex32", "F16", 4, width=2),
    Dtype("complex64", "C64", 8),
    # safetensors has no such type: a last dimension of real and imaginary part takes its place.
    Dtype("complex128", "F64", 16, width=2),
]
# By torch's name without "torch.".
DTYPES: Mapping[str, Dtype] = {dtype.name: dtype for dtype in _TABLE}


def is_metadata(key: str) -> bool:
    """Return whether a key is of the versions of modules or the class of a container, which no
    state has as an entry.
    """
    return "$" in key and not {METADATA, CONTAINER}.isdisjoint(key.split("."))


def is_container(key: str) -> bool:
    """Return whether a key is of the class of a container."""
    return key.rpartition(".")[2] == CONTAINER


def check_count(name: str, value: int | None) -> None:
    """Raise ArgumentError if ``value`` is less than 1; None stands for a default."""
    if value is not None and value < 1:
        raise ArgumentError(f"{name} must be at least 1, not {value}")


class TensorDescription(NamedTuple):
    """A tensor of a rank's state. ``layout`` is equal on all ranks if they shard the tensor in the
    same way, be it over different meshes. ``mesh`` has the global ranks of the DTensor's mesh, by
    position.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str = ""
    mesh: tuple[int, ...] = ()


class Chunk(NamedTuple):
    """A box of a tensor, stored in one piece.

    ``start`` is the byte of ``file`` at which it begins. ``checksums`` holds the CRC32C of each
    block of :attr:`Manifest.block_bytes` bytes, 4 little-endian bytes each; it is empty if the
    checkpoint was written without checksums. ``strides``, in elements, are given where the order is
    not row-major, as DCP may store it.
    """

    box: Box
    file: str
    start: int
    size_bytes: int
    checksums: bytes = b""
    strides: tuple[int, ...] | None = None


class TensorEntry(NamedTuple):
    """A tensor of the checkpoint: its chunks cover every element exactly once."""

    dtype: Dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def size_bytes(self) -> int:
        return sum(chunk.size_bytes for chunk in self.chunks)

    def check_known(self, key: str, where: str) -> None:
        """Check that torch has a dtype for the elements of this tensor, ``key`` of ``where``.

        Raises:
            UnsupportedError: it has not.
        """
        if not self.dtype.itemsize:
            raise UnsupportedError(
                f"{where}: tensor {key!r} has the dtype {self.dtype.code}, which this version of "
                "TorchRelay does not know; leave it out of the state, or read it with the library "
                "that wrote it"
            )


class DataFile(NamedTuple):
    """A safetensors file of the checkpoint. ``header_crc32c`` covers the bytes before the first
    tensor.
    """

    size_bytes: int
    header_bytes: int
    header_crc32c: int


class FileChunks:
    """The chunks of a file that have bytes, in the order of the file; tied ones once.

    ``starts`` and ``sizes`` count bytes. ``keys`` has the first tensor that a chunk is of.
    """

    def __init__(self, chunks: Sequence[tuple[str, Chunk]]) -> None:
        starts = np.array([chunk.start for _, chunk in chunks], np.uint64)
        sizes = np.array([chunk.size_bytes for _, chunk in chunks], np.uint64)
        order = np.lexsort((sizes, starts))
        order = order[sizes[order] > 0]
        starts, sizes = starts[order], sizes[order]
        differs = (starts[1:] != starts[:-1]) | (sizes[1:] != sizes[:-1])
        first = np.concatenate([np.ones(len(order[:1]), np.bool_), differs])
        self.starts: Sizes = starts[first]
        self.sizes: Sizes = sizes[first]
        kept = [chunks[index] for index in order[first].tolist()]
        self.keys = [key for key, _ in kept]
        self.chunks = [chunk for _, chunk in kept]

    def overlap(self) -> int | None:
        """Return the index of the first chunk that begins before the one before it ends."""
        overlaps = np.flatnonzero(self.starts[1:] < (self.starts + self.sizes)[:-1])
        return int(overlaps[0]) + 1 if len(overlaps) else None


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. ``objects`` are the encoded values (see :mod:`.format._values`).

    ``paths`` gives, for each key of a nested state, what leads to it: keys of dictionaries (other
    than strings as tuples of one encoded value), indices of lists, and ``~index`` of tuples. A key
    that is in neither ``tensors`` nor ``objects`` is that of an empty dictionary.
    """

    id: str
    world_size: int
    files: Mapping[str, DataFile]
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, Any] = field(default_factory=dict)
    paths: Mapping[str, StatePath] = field(default_factory=dict)
    block_bytes: int = BLOCK_BYTES

    def without_exports(self) -> Manifest:
        """Return what the saved state has: without copies that are only for other readers."""
        tensors = {key: one for key, one in self.tensors.items() if not key.startswith(EXPORT)}
        return self if len(tensors) == len(self.tensors) else replace(self, tensors=tensors)

    @property
    def is_foreign(self) -> bool:
        """Return whether others wrote the files, so that the manifest was made up from them."""
        return not self.id

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint of this checkpoint; copies have the same one."""
        if self.id:
            return self.id
        content = (*map(dict, (self.files, self.tensors, self.objects)),)
        return hashlib.sha256(repr(content).encode()).hexdigest()

    @cached_property
    def by_file(self) -> Mapping[str, FileChunks]:
        """The chunks in each file."""
        found: dict[str, list[tuple[str, Chunk]]] = {name: [] for name in self.files}
        for key, entry in self.tensors.items():
            for chunk in entry.chunks:
                found[chunk.file].append((key, chunk))
        return {name: FileChunks(chunks) for name, chunks in found.items()}

    @property
    def has_checksums(self) -> bool:
        """Return whether the bytes of all tensors can be verified."""
        return all(chunk.checksums for file in self.by_file.values() for chunk in file.chunks)

"""The layout of a data file: a plain safetensors file whose tensors begin at multiples of 64 bytes.

safetensors allows no gaps between tensors, so padding is a tensor of bytes itself, named
``__padding__``, a dot and a number, and the file's metadata name its writer. Big tensors come
first; few of them leave a remainder.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchrelay.checkpoint._types import DTYPES
from torchrelay.errors import CorruptionError

if TYPE_CHECKING:
    from torchrelay.checkpoint._write import PlannedChunk

__all__ = [
    "ALIGNMENT",
    "MAX_HEADER_BYTES",
    "PADDING",
    "WRITER",
    "Layout",
    "StoredTensor",
    "header_size",
    "lay_out",
    "parse_header",
    "quoted",
]

PADDING = "__padding__"
WRITER = {"writer": "torchrelay"}  # in the metadata of a file that has padding
ALIGNMENT = 64
MAX_HEADER_BYTES = 100_000_008  # as safetensors has it, and the 8 bytes of the length


@dataclass(frozen=True)
class Layout:
    """The layout of a file: ``header`` is its first bytes, ``order`` the tensors in the order of
    the file, ``starts`` the offset of each tensor, and ``ends`` that of what follows it and its
    padding.
    """

    header: bytes
    order: NDArray[np.intp]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @property
    def size_bytes(self) -> int:
        return int(self.ends.max(initial=len(self.header)))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a header describes it; ``start`` and ``end`` are bytes of the file."""

    code: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


def lay_out(names: Sequence[str], chunks: Sequence[PlannedChunk]) -> Layout:
    """Return the layout of a file with these chunks, whose names in it must differ."""
    sizes = np.array([chunk.size_bytes for chunk in chunks], np.int64)
    order = np.argsort(sizes % ALIGNMENT != 0, kind="stable")
    sizes = sizes[order]
    rounded = -(-sizes // ALIGNMENT) * ALIGNMENT
    rounded[-1:] = sizes[-1:]
    ends = np.cumsum(rounded)
    entries = ['"__metadata__":{"format":"pt","writer":"torchrelay"}']
    columns = (order.tolist(), (ends - rounded).tolist(), sizes.tolist(), ends.tolist())
    for place, (i, start, size, end) in enumerate(zip(*columns, strict=True)):
        dtype, sides = chunks[i].dtype, chunks[i].box.sizes
        shape = [*sides, dtype.width] if dtype.width > 1 else [*sides]
        entries.append(
            f'{quoted(names[i])}:{{"dtype":"{dtype.code}","shape":{shape},'
            f'"data_offsets":[{start},{start + size}]}}'
        )
        if start + size < end:
            entries.append(
                f'"{PADDING}.{place}":{{"dtype":"U8","shape":[{end - start - size}],'
                f'"data_offsets":[{start + size},{end}]}}'
            )
    text = f"{{{','.join(entries)}}}".encode()
    text = text.ljust(-(-(len(text) + 8) // ALIGNMENT) * ALIGNMENT - 8)
    header = struct.pack("<Q", len(text)) + text
    starts, after = np.empty_like(ends), np.empty_like(ends)
    starts[order], after[order] = len(header) + ends - rounded, len(header) + ends
    return Layout(header, order, starts, after)


def header_size(first_bytes: bytes, file_bytes: int, where: str) -> int:
    """Return the length of the header that begins with these 8 bytes, including them.

    Raises:
        CorruptionError: the length is impossible.
    """
    if len(first_bytes) < 8:
        raise CorruptionError(f"{where}: {file_bytes} bytes are too few for a safetensors file")
    size = int(struct.unpack("<Q", first_bytes[:8])[0])
    if size + 8 > MAX_HEADER_BYTES or size + 8 > file_bytes:
        if first_bytes.startswith(b"PK\x03\x04"):
            raise CorruptionError(
                f"{where}: a zip archive, as torch.save writes; convert it with 'torchrelay "
                f"checkpoint convert {where} FOLDER --to torchrelay', and load FOLDER"
            )
        raise CorruptionError(
            f"{where}: not a safetensors file (it claims a header of {size} bytes)"
        )
    return size + 8


def parse_header(
    header: bytes, file_bytes: int, where: str
) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Return the tensors that a header describes, without padding, and the file's metadata.

    Args:
        header: all of it, with the 8 bytes of its length.
        file_bytes: size of the file.
        where: the file, for errors.

    Raises:
        CorruptionError: it is damaged or describes what the file cannot hold.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) != len(pairs):
            raise CorruptionError(f"{where}: the header names a tensor twice")
        return dict(pairs)

    try:
        entries = json.loads(header[8:], object_pairs_hook=unique)
        metadata = entries.pop("__metadata__", None) or {}
        is_ours = WRITER.items() <= metadata.items()
        found = {
            name: _stored(entry, len(header))
            for name, entry in entries.items()
            if not (is_ours and name.startswith(PADDING))
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptionError(f"{where}: the safetensors header is damaged ({error})") from None
    for name, tensor in found.items():
        if tensor.end > file_bytes:
            raise CorruptionError(
                f"{where}: tensor {name!r} ends at byte {tensor.end} of a file of {file_bytes} "
                "bytes; the file is cut short"
            )
    return found, metadata


_ITEM_BYTES = {dtype.code: dtype.itemsize // dtype.width for dtype in DTYPES.values()}


def _stored(entry: Any, base: int) -> StoredTensor:
    shape = tuple(int(size) for size in entry["shape"])
    start, end = (int(position) for position in entry["data_offsets"])
    if start < 0 or any(size < 0 for size in shape):
        raise ValueError("a negative size")
    if end - start != math.prod(shape) * _ITEM_BYTES[entry["dtype"]]:
        raise ValueError(f"{shape} of {entry['dtype']} does not have {end - start} bytes")
    return StoredTensor(entry["dtype"], shape, base + start, base + end)

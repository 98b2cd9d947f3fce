"""Headers of safetensors files: how our data files are laid out, and what anyone's hold. Imports no
torch.

A data file of ours is a plain safetensors file whose tensors begin at multiples of 64 bytes.
safetensors allows no gaps between tensors, so padding is a tensor of bytes itself, named
``__padding__``, a dot and a number, and the file's metadata name its writer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchrelay.checkpoint._types import DTYPES, MAX_HEADER_BYTES, DataFile, Dtype
from torchrelay.checkpoint.format._manifest import PARSING_ERRORS, parse
from torchrelay.checkpoint.storage._contract import Folder
from torchrelay.errors import CorruptionError

__all__ = ["ALIGNMENT", "Header", "StoredTensor", "aligned", "lay_out", "read_header", "unique"]

ALIGNMENT = 64
_PADDING = "__padding__"  # begins the name of a tensor that no state has
_METADATA = "__metadata__"
_WRITER = {"writer": "torchrelay"}  # in the metadata of a file that has padding
_BY_CODE = {dtype.code: dtype for dtype in DTYPES.values() if dtype.width == 1}


class StoredTensor(NamedTuple):
    """A tensor of a file. ``start`` and ``end`` are bytes of the file."""

    dtype: Dtype
    shape: tuple[int, ...]
    start: int
    end: int


class Header(NamedTuple):
    """What a file holds: its tensors by name, without padding, and its metadata."""

    file: DataFile
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def aligned(sizes: NDArray[np.int64], alignment: int = ALIGNMENT) -> NDArray[np.int64]:
    """Return where tensors of these sizes begin, one after another."""
    rounded = -(-sizes // alignment) * alignment
    return np.cumsum(rounded) - rounded


def lay_out(
    tensors: Mapping[str, tuple[Dtype, tuple[int, ...], int]], alignment: int = ALIGNMENT
) -> tuple[bytes, NDArray[np.int64], NDArray[np.int64]]:
    """Lay out a file of ours with these tensors: dtype, shape and size in bytes by name. With an
    ``alignment`` of 1 there is no padding, which other readers take for tensors.

    Returns:
        its header, where each tensor begins, and where it ends with its padding.
    """
    sizes = np.array([size_bytes for *_, size_bytes in tensors.values()], np.int64)
    starts = aligned(sizes, alignment)
    ends = np.append(starts[1:], starts[-1:] + sizes[-1:])
    entries = [f'"{_METADATA}":{{"format":"pt","writer":"{_WRITER["writer"]}"}}']
    places = zip(tensors.items(), starts.tolist(), ends.tolist(), strict=True)
    for index, ((name, (dtype, shape, size_bytes)), start, end) in enumerate(places):
        entries.append(
            f'{quoted(name)}:{{"dtype":"{dtype.code}","shape":{dtype.stored_shape(shape)},'
            f'"data_offsets":[{start},{start + size_bytes}]}}'
        )
        if start + size_bytes < end:
            entries.append(
                f'"{_PADDING}.{index}":{{"dtype":"U8","shape":[{end - start - size_bytes}],'
                f'"data_offsets":[{start + size_bytes},{end}]}}'
            )
    text = f"{{{','.join(entries)}}}".encode()
    text = text.ljust(-(-(len(text) + 8) // ALIGNMENT) * ALIGNMENT - 8)
    header = struct.pack("<Q", len(text)) + text
    return header, len(header) + starts, len(header) + ends


def unique(names: Sequence[str]) -> list[str]:
    """Return names for the tensors of a file of ours, changed where they are reserved or
    repeated.
    """
    used: set[str] = set()
    found = []
    for name in names:
        free = f"_{name}" if name.startswith((_METADATA, _PADDING)) else name
        while free in used:
            free += "'"
        used.add(free)
        found.append(free)
    return found


def read_header(folder: Folder, name: str) -> Header:
    """Read the header of a safetensors file, whoever wrote it.

    Tensors of dtypes that this version does not know are described with
    :meth:`Dtype.unknown <torchrelay.checkpoint._types.Dtype.unknown>`. What the header says of
    shapes and places is not checked.

    Raises:
        CorruptionError: it is not a safetensors file.
    """
    where, file_bytes = f"{folder.location}/{name}", folder.size_bytes(name)
    text = _header_text(folder, name, where, file_bytes)
    entries = parse(text, where, "the safetensors header")
    first = len(text) + 8
    try:
        metadata = entries.pop(_METADATA, None) or {}
        is_ours = _WRITER.items() <= metadata.items()
        tensors = dict(_tensors(entries, first, is_ours))
    except (*PARSING_ERRORS, RecursionError) as error:
        raise CorruptionError(f"{where}: the safetensors header is damaged ({error})") from None
    return Header(DataFile(file_bytes, first, 0), tensors, metadata)


def _tensors(
    entries: Mapping[str, Any], first: int, is_ours: bool
) -> Iterator[tuple[str, StoredTensor]]:
    for key, entry in entries.items():
        if is_ours and key.startswith(_PADDING):
            continue
        code, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        dtype = _BY_CODE.get(code)
        if dtype is not None and dtype.packed > 1:
            *rest, last = shape or (1,)
            if last % dtype.packed:  # of half a byte, which torch has not
                dtype = None
            else:
                shape = (*rest, last // dtype.packed)
        yield key, StoredTensor(dtype or Dtype.unknown(code), shape, first + start, first + end)


def _header_text(folder: Folder, name: str, where: str, file_bytes: int) -> bytes:
    if file_bytes < 8:
        raise CorruptionError(f"{where}: {file_bytes} bytes are too few for a safetensors file")
    first = bytearray(8)
    folder.read(name, 0, memoryview(first))
    size = int.from_bytes(first, "little")
    if size + 8 > min(MAX_HEADER_BYTES, file_bytes):
        if first.startswith(b"PK\x03\x04"):
            raise CorruptionError(
                f"{where}: a zip archive, as torch.save writes; convert it with 'torchrelay "
                f"checkpoint convert {where} FOLDER --to torchrelay', and load FOLDER"
            )
        if first == b"version ":  # https://git-lfs.github.com/spec/v1
            raise CorruptionError(
                f"{where}: a pointer of Git LFS, not what it points to; run 'git lfs pull'"
            )
        raise CorruptionError(
            f"{where}: not a safetensors file (it claims a header of {size} bytes)"
        )
    text = bytearray(size)
    folder.read(name, 8, memoryview(text))
    return bytes(text)

"""Operations on whole checkpoints for the command line: read without a model, convert, compare."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch

from torchrelay.checkpoint._boxes import BoxIndex
from torchrelay.checkpoint._foreign import open_checkpoint
from torchrelay.checkpoint._local import storage_errors
from torchrelay.checkpoint._read import ChunkReader, segments_of
from torchrelay.checkpoint._save import save
from torchrelay.checkpoint._state import flatten
from torchrelay.checkpoint._types import Box, Manifest, StatePath
from torchrelay.checkpoint._values import decode
from torchrelay.checkpoint._write import default_threads
from torchrelay.errors import ArgumentError, CorruptionError, StorageError, UnavailableError

__all__ = ["FORMATS", "convert", "differences", "read_state"]

FORMATS = ("torchrelay", "dcp", "safetensors", "torch")
_BUFFER_BYTES = 64 << 20
_MAX_LIST = 1_000_000  # items that a list may lack before the one that a path leads to
_TORCH_SUFFIXES = (".pt", ".pth", ".bin")


def read_state(path: str, keys: set[str] | None = None) -> dict[str, Any]:
    """Return the state of a checkpoint of any format, nested as it was saved, on the CPU.

    Args:
        path: a checkpoint of ours or of DCP, safetensors files, or a file of ``torch.save``.
        keys: only these; all by default.

    Raises:
        CorruptionError: it is damaged.
        StorageError: there is none.
    """
    if path.endswith(_TORCH_SUFFIXES):
        return _read_torch(path)
    folder, manifest = open_checkpoint(
        path, lambda folder, found: _reader(folder, found).check_files(found.files)
    )
    with closing(folder):
        reader = _reader(folder, manifest)
        state: dict[str, Any] = {}
        for key, value in manifest.objects.items():
            if keys is None or key in keys:
                _set(state, manifest.paths.get(key, (key,)), decode(key, value))
        for key in manifest.tensors:
            if keys is None or key in keys:
                _set(state, manifest.paths.get(key, (key,)), _read_tensor(reader, manifest, key))
        return state


def _reader(folder: Any, manifest: Manifest) -> ChunkReader:
    return ChunkReader(folder, manifest, threads=default_threads(), max_buffer_bytes=_BUFFER_BYTES)


def _read_tensor(reader: ChunkReader, manifest: Manifest, key: str) -> torch.Tensor:
    entry = manifest.tensors[key]
    index = BoxIndex([chunk.box for chunk in entry.chunks])
    segments = segments_of(key, entry, Box.whole(entry.shape), index)
    reader.verify(segments)
    tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype.name))
    reader.fill(
        [
            (
                segment,
                tensor[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))],
            )
            for segment in segments
            for box in [segment.inner]
        ]
    )
    return tensor


def _read_torch(path: str) -> dict[str, Any]:
    if not os.path.isfile(path):
        raise StorageError(2, f"{path}: there is no such file")
    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise CorruptionError(f"{path}: torch.load refuses it ({error})") from error
    if not isinstance(found, dict):
        raise ArgumentError(f"{path}: it holds a {type(found).__name__}, not a state dict")
    return found


def _set(state: dict[str, Any], path: StatePath, value: Any) -> None:
    """Set ``value`` at ``path``, creating dictionaries and lists on the way."""
    here: Any = state
    for step, following in zip(path, (*path[1:], None), strict=True):
        key: Any = step[0] if isinstance(step, tuple) else step
        if isinstance(here, list):
            if key > len(here) + _MAX_LIST:
                raise CorruptionError(f"the path {path} has the impossible index {key}")
            here.extend([None] * (key + 1 - len(here)))
        if following is None:
            here[key] = value
            return
        missing = here[key] is None if isinstance(here, list) else key not in here
        if missing:
            here[key] = [] if isinstance(following, int) else {}
        here = here[key]


def convert(source: str, target: str, to: str, max_file_bytes: int) -> None:
    """Write the state of ``source`` to ``target`` in another format.

    Args:
        source: anything that :func:`read_state` reads.
        target: a folder; for ``"torch"`` a file. It must not be there yet.
        to: one of :data:`FORMATS`. Safetensors files hold tensors only.
        max_file_bytes: safetensors files larger than this are split, with an index beside them.

    Raises:
        ArgumentError: the format is unknown, ``target`` is there, or the state has what the format
            cannot hold.
    """
    if to not in FORMATS:
        raise ArgumentError(f"--to {to}: it must be one of {', '.join(FORMATS)}")
    if os.path.exists(target):
        raise ArgumentError(f"{target} exists already; choose another name")
    state = read_state(source)
    if to == "torchrelay":
        save(state, target)
    elif to == "torch":
        with storage_errors(f"writing {target}"):
            torch.save(state, target)
    elif to == "dcp":
        _write_dcp(state, target)
    else:
        _write_safetensors(state, target, max_file_bytes)


def _write_dcp(state: dict[str, Any], target: str) -> None:
    from torch.distributed import checkpoint as dcp  # noqa: PLC0415

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "torch.distributed is disabled, unavailable or uninitialized"
        )
        dcp.save(state, checkpoint_id=target, no_dist=True)


def _write_safetensors(state: dict[str, Any], target: str, max_file_bytes: int) -> None:
    try:
        from safetensors.torch import save_file  # noqa: PLC0415
    except ImportError:
        raise UnavailableError(
            "safetensors is missing; pip install 'torchrelay[checkpoint]'"
        ) from None
    tensors = {}
    for key, leaf in flatten(state).items():
        if not isinstance(leaf.value, torch.Tensor):
            raise ArgumentError(
                f"{key}: safetensors files hold tensors only, not {type(leaf.value).__name__}"
            )
        tensors[key] = leaf.value.contiguous()
    groups = list(_grouped(tensors, max_file_bytes))
    with storage_errors(f"writing {target}"):
        os.makedirs(target)
        if len(groups) == 1:
            save_file(tensors, os.path.join(target, "model.safetensors"), {"format": "pt"})
            return
        weights: dict[str, str] = {}
        for number, keys in enumerate(groups, 1):
            name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            save_file(
                {key: tensors[key] for key in keys}, os.path.join(target, name), {"format": "pt"}
            )
            weights.update(dict.fromkeys(keys, name))
        total = sum(tensor.nbytes for tensor in tensors.values())
        with open(os.path.join(target, "model.safetensors.index.json"), "w") as file:
            json.dump({"metadata": {"total_size": total}, "weight_map": weights}, file, indent=2)


def _grouped(tensors: dict[str, torch.Tensor], limit_bytes: int) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for key, tensor in tensors.items():
        if group and size + tensor.nbytes > limit_bytes:
            yield group
            group, size = [], 0
        group.append(key)
        size += tensor.nbytes
    yield group


def differences(one: str, other: str, rtol: float, atol: float) -> Iterator[str]:
    """Return the differences between two checkpoints, one sentence each.

    Tensors are compared bit by bit unless a tolerance is given.
    """
    first, second = (flatten(read_state(path)) for path in (one, other))
    for key in sorted(first.keys() | second.keys()):
        if key not in second:
            yield f"{key}: only in {one}"
        elif key not in first:
            yield f"{key}: only in {other}"
        else:
            found = _difference(first[key].value, second[key].value, rtol, atol)
            if found:
                yield f"{key}: {found}"


def _difference(one: Any, other: Any, rtol: float, atol: float) -> str | None:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return None if repr(one) == repr(other) else f"{one!r} and {other!r}"
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"{one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
    if not one.numel():
        return None
    bits, others = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    if torch.equal(bits, others):
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    gap = (one.to(wide) - other.to(wide)).abs()
    within = gap <= atol + rtol * other.to(wide).abs()
    if (rtol or atol) and bool(within.all()):
        return None
    count = (
        int((~within).sum())
        if (rtol or atol)
        else int((bits != others).reshape(one.numel(), -1).any(1).sum())
    )
    return (
        f"{count} of {one.numel()} elements differ, at most by {float(gap.nan_to_num().max()):.3g}"
    )

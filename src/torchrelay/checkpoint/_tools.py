"""Operations on whole checkpoints for the command line: read without a model, convert, compare."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np
import torch

from torchrelay._torch import flat_bytes
from torchrelay.checkpoint._read import ChunkReader, ReadOptions, Segment, segments_of, within
from torchrelay.checkpoint._save import save
from torchrelay.checkpoint._saving import grouped
from torchrelay.checkpoint._state import flatten, insert, key_of, leaf_path
from torchrelay.checkpoint._storage import storage_errors
from torchrelay.checkpoint._tensors import dtype_of
from torchrelay.checkpoint._types import INDEX, Box
from torchrelay.checkpoint._values import decode, encode
from torchrelay.errors import ArgumentError, CorruptionError, UnavailableError

__all__ = ["FORMATS", "convert", "differences", "read_state"]

FORMATS = ("torchrelay", "dcp", "safetensors", "torch")
# A zip archive, or the pickled magic number of files from before torch 1.6.
_TORCH_STARTS = (b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")


def read_state(path: str, prefix: str = "") -> dict[str, Any]:
    """Return the state of a checkpoint of any format, nested as it was saved, on the CPU.

    Args:
        path: a checkpoint of ours or of DCP, safetensors files, or a file of ``torch.save``.
        prefix: only keys that begin with it are read; it is removed from them.

    Raises:
        ArgumentError: no key begins with ``prefix``.
        CorruptionError: it is damaged.
        StorageError: there is none.
    """
    state: dict[str, Any] = {}
    if _is_torch_file(path):
        leaves = flatten(_read_torch(path))
        for key in _keys(leaves, prefix, path):
            insert(state, _without(prefix, leaves[key].path), leaves[key].value)
        return state
    reader = ChunkReader.open(path, ReadOptions(), ChunkReader.check_all)
    with closing(reader):
        manifest = reader.manifest
        targets: list[tuple[Segment, torch.Tensor]] = []
        for key in _keys({**manifest.objects, **manifest.tensors}, prefix, path):
            if key in manifest.objects:
                value = decode(key, manifest.objects[key])
            else:
                entry = manifest.tensors[key]
                entry.check_known(key, path)
                value = torch.empty(
                    entry.shape, dtype=getattr(torch, entry.dtype.name), device="cpu"
                )
                whole = Box.whole(entry.shape)
                segments = segments_of(key, entry, whole)
                targets += [(one, value[within(one.inner, whole)]) for one in segments]
            insert(state, _without(prefix, leaf_path(manifest.paths.get(key, (key,)))), value)
        reader.fill(targets, verify=True)
        return state


def _keys(keys: Mapping[str, Any], prefix: str, path: str) -> list[str]:
    found = [key for key in keys if key.startswith(prefix)]
    if keys and not found:
        shown = ", ".join(map(repr, [*keys][:3]))
        raise ArgumentError(
            f"{path}: no key begins with {prefix!r}; its {len(keys)} keys begin with {shown}"
        )
    return found


def _without(prefix: str, path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a path whose key begins with ``prefix``, without it."""
    if not prefix:
        return path
    for count in range(1, len(path)):
        if f"{key_of(path[:count])}." == prefix:
            return path[count:]
    return (key_of(path).removeprefix(prefix),)


def _is_torch_file(path: str) -> bool:
    """Return whether a file begins as those of ``torch.save``, whatever it is called."""
    if not os.path.isfile(path):
        return False
    with storage_errors(f"reading {path}"), open(path, "rb") as file:
        return file.read(max(map(len, _TORCH_STARTS))).startswith(_TORCH_STARTS)


def _read_torch(path: str) -> dict[str, Any]:
    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise CorruptionError(f"{path}: torch.load refuses it ({error})") from error
    if not isinstance(found, dict):
        raise ArgumentError(f"{path}: it holds a {type(found).__name__}, not a state dict")
    return found


def convert(
    source: str, target: str, to: str, max_file_bytes: int, *, prefix: str = ""
) -> list[str]:
    """Write the state of ``source`` to ``target`` in another format.

    Args:
        source: anything that :func:`read_state` reads.
        target: a folder; for ``"torch"`` a file. It must not exist yet.
        to: one of :data:`FORMATS`. Safetensors files hold tensors only.
        max_file_bytes: safetensors files larger than this are split, with an index beside them.
        prefix: only keys that begin with it are written, with it removed.

    Returns:
        the keys of values that are left out, because the format holds tensors only.

    Raises:
        ArgumentError: the format is unknown, ``target`` exists, no key begins with ``prefix``, or
        the state holds what the format cannot.
        UnsupportedError: it holds a tensor that no checkpoint can hold.
    """
    if to not in FORMATS:
        raise ArgumentError(f"--to {to}: it must be one of {', '.join(FORMATS)}")
    if os.path.exists(target):
        raise ArgumentError(f"{target} exists already; choose another name")
    state = read_state(source, prefix)
    if to == "torchrelay":
        save(state, target, no_dist=True)
    elif to == "torch":
        with storage_errors(f"writing {target}"):
            torch.save(state, target)
    elif to == "dcp":
        _write_dcp(state, target)
    else:
        return _write_safetensors(state, target, max_file_bytes)
    return []


def _write_dcp(state: dict[str, Any], target: str) -> None:
    from torch.distributed import checkpoint as dcp  # noqa: PLC0415

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "torch.distributed is disabled, unavailable or uninitialized"
        )
        dcp.save(state, checkpoint_id=target, no_dist=True)


def _write_safetensors(state: dict[str, Any], target: str, max_file_bytes: int) -> list[str]:
    """Write the tensors of a state; return the keys of values that are not tensors."""
    try:
        from safetensors.torch import save_file  # noqa: PLC0415
    except ImportError:
        raise UnavailableError("safetensors is missing; pip install safetensors") from None
    tensors: dict[str, torch.Tensor] = {}
    left_out: list[str] = []
    memory: set[int] = set()
    for key, leaf in flatten(state).items():
        if not isinstance(leaf.value, torch.Tensor):
            left_out.append(key)
            continue
        if dtype_of(key, leaf.value).width > 1:
            raise ArgumentError(
                f"{key}: safetensors files hold no tensors of {leaf.value.dtype}; convert to "
                "another format, or save its torch.view_as_real()"
            )
        tensor = leaf.value.contiguous()
        if tensor.untyped_storage().data_ptr() in memory:
            tensor = tensor.clone()  # save_file refuses tensors that share memory
        memory.add(tensor.untyped_storage().data_ptr())
        tensors[key] = tensor
    if not tensors:
        raise ArgumentError(
            "there is no tensor to write, and safetensors files hold tensors only; it has "
            f"{', '.join(left_out[:3])}"
        )
    groups = grouped(tensors, (tensor.nbytes for tensor in tensors.values()), max_file_bytes)
    with storage_errors(f"writing {target}"):
        os.makedirs(target)
        weights: dict[str, str] = {}
        for number, keys in enumerate(groups, 1):
            part = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
            name = f"model{part}.safetensors"
            found = {key: tensors[key] for key in keys}
            save_file(found, os.path.join(target, name), {"format": "pt"})
            weights.update(dict.fromkeys(keys, name))
        if len(groups) == 1:
            return left_out
        total = sum(tensor.nbytes for tensor in tensors.values())
        with open(os.path.join(target, INDEX), "w") as file:
            json.dump({"metadata": {"total_size": total}, "weight_map": weights}, file, indent=2)
    return left_out


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


def _text(value: Any) -> str:
    """Return a text that is equal for equal values; of arrays, repr() shows a part."""
    try:
        return json.dumps(encode("", value))
    except ArgumentError:  # of a file of torch.save
        return repr(value)


def _both(one: Any, other: Any) -> str:
    """Return two values as text; of arrays that are printed alike, the first items that differ."""
    if repr(one) != repr(other):
        return f"{one!r} and {other!r}"
    if not isinstance(one, np.ndarray) or one.shape != other.shape:
        return f"they differ, although both are printed as {one!r}"
    bits, others = (np.ascontiguousarray(a).reshape(-1, 1).view("u1") for a in (one, other))
    first = np.unravel_index((bits != others).any(1).argmax(), one.shape)
    return f"they differ first at {[*map(int, first)]}: {one[first]!r} and {other[first]!r}"


def _difference(one: Any, other: Any, rtol: float, atol: float) -> str | None:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return None if _text(one) == _text(other) else _both(one, other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"{one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
    if not one.numel():
        return None
    bits, others = (flat_bytes(t.contiguous()).reshape(t.numel(), -1) for t in (one, other))
    if torch.equal(bits, others):
        return None
    differs = (bits != others).any(1)
    wide = torch.complex128 if one.is_complex() else torch.float64
    first, second = (t.to(wide).flatten() for t in (one, other))
    gap = (first - second).abs()
    if rtol or atol:
        differs &= ~(gap <= atol + rtol * second.abs())
    if not differs.any():
        return None
    return (
        f"{int(differs.sum())} of {one.numel()} elements differ, at most by "
        f"{float(gap.nan_to_num().max()):.3g}"
    )

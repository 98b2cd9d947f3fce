"""Snapshots of Hugging Face models: what their index and configuration say, and the names that the
module has for what is on the disk.

transformers saves a model in the layout in which it was published, which may not be that of the
module: experts one by one, or without the prefix of a task's head. Its own conversion is executed
here on descriptions of the stored tensors, which gives a manifest in the names of the module. The
reader then reads each piece straight to its place, whatever part of the tensor a rank needs.
"""

from __future__ import annotations

import copy
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from torchrelay._boxes import Box
from torchrelay.checkpoint._types import Chunk, Dtype, Manifest, TensorEntry
from torchrelay.checkpoint.format._foreign import Snapshot
from torchrelay.checkpoint.format._quantized import SCALES
from torchrelay.errors import MismatchError, UnsupportedError

__all__ = ["converted"]


def converted(manifest: Manifest, parts: Iterable[tuple[str, Any, Mapping[str, Any]]]) -> Manifest:
    """Return ``manifest`` with the names and shapes that modules have, if it is a snapshot.

    Args:
        parts: of each part of the state, what its keys begin with in the snapshot, the module or
            other object that it is of, and its values by name.

    Raises:
        CorruptionError: a tensor of the state is in a file that is not there.
        MismatchError: the snapshot holds an adapter, and none of the tensors of the state.
        UnsupportedError: transformers computes with the values of what is stored.
    """
    if not isinstance(manifest, Snapshot):
        return manifest
    wanted = set()
    for start, owner, values in parts:
        if isinstance(owner, torch.nn.Module) and manifest.is_converted:
            manifest = _converted(manifest, start, owner, values)
        wanted |= {start + name for name in values}
    manifest.check_present(wanted)
    if manifest.is_adapter and not wanted & manifest.tensors.keys():
        raise MismatchError(
            f"{manifest.location}: an adapter, without the model that it belongs to: load that "
            "model, which adapter_config.json names as base_model_name_or_path, then the adapter, "
            "with peft.PeftModel.from_pretrained(model, folder)"
        )
    return manifest


def _converted(
    snapshot: Snapshot, start: str, model: torch.nn.Module, values: Mapping[str, Any]
) -> Snapshot:
    """Return ``snapshot`` with the names that ``model`` has for the tensors under ``start``."""
    names = _Names.of(model, values)
    if names is None:
        return snapshot
    inside = [key for key in snapshot.tensors if key.startswith(start)]
    tensors = {key: entry for key, entry in snapshot.tensors.items() if key not in {*inside}}
    stored = {key.removeprefix(start): snapshot.tensors[key] for key in inside}
    absent = {
        start + names.find(key.removeprefix(start))[0] if key.startswith(start) else key: name
        for key, name in snapshot.absent.items()
    }
    tensors.update({start + key: entry for key, entry in _convert(stored, names, snapshot, absent)})
    return replace(snapshot, tensors=tensors, absent=absent)


class _Names:
    """The conversion that the installed transformers has for one of its models."""

    def __init__(self, model: Any, values: Mapping[str, Any], library: Any, rules: Any) -> None:
        self.model = model
        self.library = library
        self._values = values
        self._renamings = [one for one in rules if isinstance(one, library.WeightRenaming)]
        self._converters = [one for one in rules if isinstance(one, library.WeightConverter)]
        self.by_pattern = {
            pattern: one for one in self._converters for pattern in one.source_patterns
        }

    @classmethod
    def of(cls, model: Any, values: Mapping[str, Any]) -> _Names | None:
        """Return that of ``model``; None if it is not one of transformers, from version 5 on."""
        modeling = sys.modules.get("transformers.modeling_utils")
        if modeling is None or not isinstance(model, modeling.PreTrainedModel):
            return None
        try:
            from transformers import (  # noqa: PLC0415 - optional
                conversion_mapping,
                core_model_loading,
            )
        except ImportError:  # version 4, whose names are those of the module
            return None
        rules = conversion_mapping.get_model_conversion_mapping(_without_fsdp(model))
        return cls(model, values, core_model_loading, rules)

    def find(self, key: str) -> tuple[str, str | None]:
        """Return the name in the module, and the pattern by which it is converted, or None."""
        prefix = self.model.base_model_prefix
        rename = self.library.rename_source_key
        name, pattern = rename(key, self._renamings, self._converters, prefix, self._values)
        if name not in self._values and key in self._values:
            name, pattern = rename(key, [], [], prefix, self._values)
        return (name, pattern) if name in self._values else (key, None)

    def ignores(self, key: str) -> bool:
        """Return whether transformers expects a tensor that the module lacks."""
        patterns = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        return key not in self._values and any(re.search(one, key) for one in patterns)


def _without_fsdp(model: Any) -> Any:
    """Return a model of the same configuration whose parts are of the classes of transformers, for
    which alone it has conversions.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not any(isinstance(one, fsdp.FSDPModule) for one in model.modules()):
        return model
    made = type(model)
    original = made.__bases__[-1] if issubclass(made, fsdp.FSDPModule) else made
    with torch.device("meta"):
        return original(model.config)


def _convert(
    stored: Mapping[str, TensorEntry],
    names: _Names,
    snapshot: Snapshot,
    absent: Mapping[str, str],
) -> Iterable[tuple[str, TensorEntry]]:
    """Yield the tensors of a module, made of ``stored`` ones, and those that it lacks."""
    groups: dict[str, Any] = {}
    for key in sorted(stored, key=names.library.dot_natural_key):  # the order of the experts
        scaled = key.removesuffix(SCALES) if key.removesuffix(SCALES) in stored else key
        name, pattern = names.find(scaled)
        if pattern is None:
            if not names.ignores(name):
                yield name + key.removeprefix(scaled), stored[key]
            continue
        if name not in groups:
            groups[name] = copy.deepcopy(names.by_pattern[pattern])
        groups[name].add_tensor(name, key, pattern, _Stored.of(stored[key]))
    for name, rule in groups.items():
        if name in absent:  # a part of it is not there
            continue
        try:
            made = rule.convert(name, model=names.model, config=names.model.config)
        except Exception as error:
            model = type(names.model).__name__
            operations = ", ".join(type(one).__name__ for one in rule.operations)
            raise UnsupportedError(
                f"{snapshot.location}: transformers makes {name!r} of what is stored by an "
                f"operation that is not executed here ({operations}: {error}). Load it with "
                f"{model}.from_pretrained(folder), and save() that model's state_dict() to load it "
                "from then on"
            ) from error
        for target, value in made.items():
            yield target, (value[0] if isinstance(value, list) else value).entry


class _Piece(NamedTuple):
    """A box of a tensor, and where it is stored; ``strides`` in elements."""

    box: Box
    file: str
    start: int
    strides: tuple[int, ...]

    def moved(self, dim: int, distance: int) -> _Piece:
        offsets = list(self.box.offsets)
        offsets[dim] += distance
        return self._replace(box=Box(tuple(offsets), self.box.sizes))

    def chunk(self, dtype: Dtype) -> Chunk:
        sizes = self.box.sizes
        span = 1 + sum((n - 1) * step for n, step in zip(sizes, self.strides, strict=True))
        size_bytes = (span if self.box.numel else 0) * dtype.itemsize
        strides = None if self.strides == _row_major(sizes) else self.strides
        return Chunk(self.box, self.file, self.start, size_bytes, strides=strides)


def _row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


@dataclass(frozen=True)
class _Stored:
    """A tensor made of pieces of files. What rearranges tensors can be called on it; what computes
    with their values cannot.
    """

    dtype: Dtype
    shape: torch.Size
    pieces: tuple[_Piece, ...]

    @classmethod
    def of(cls, entry: TensorEntry) -> _Stored:
        pieces = [
            _Piece(one.box, one.file, one.start, one.strides or _row_major(one.box.sizes))
            for one in entry.chunks
        ]
        return cls(entry.dtype, torch.Size(entry.shape), tuple(pieces))

    @property
    def entry(self) -> TensorEntry:
        chunks = tuple(piece.chunk(self.dtype) for piece in self.pieces)
        return TensorEntry(self.dtype, tuple(self.shape), chunks)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = _FUNCTIONS.get(func)
        return NotImplemented if known is None else known(*args, **(kwargs or {}))

    def size(self, dim: int) -> int:
        return self.shape[dim]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def contiguous(self) -> _Stored:
        return self

    def permuted(self, dims: Sequence[int]) -> _Stored:
        def order(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(values[dim] for dim in dims)

        pieces = tuple(
            one._replace(
                box=Box(order(one.box.offsets), order(one.box.sizes)), strides=order(one.strides)
            )
            for one in self.pieces
        )
        return _Stored(self.dtype, torch.Size(order(self.shape)), pieces)

    def transpose(self, dim0: int, dim1: int) -> _Stored:
        dims = list(range(self.ndim))
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
        return self.permuted(dims)

    def narrow(self, dim: int, start: int, length: int) -> _Stored:
        dim %= self.ndim
        pieces = []
        for one in self.pieces:
            first, size = one.box.offsets[dim], one.box.sizes[dim]
            low, high = max(first, start), min(first + size, start + length)
            if low < high:
                sizes = (*one.box.sizes[:dim], high - low, *one.box.sizes[dim + 1 :])
                begin = one.start + (low - first) * one.strides[dim] * self.dtype.itemsize
                cut = one._replace(box=Box(one.box.offsets, sizes), start=begin)
                pieces.append(cut.moved(dim, low - start - first))
        shape = torch.Size((*self.shape[:dim], length, *self.shape[dim + 1 :]))
        return _Stored(self.dtype, shape, tuple(pieces))

    def reshaped(self, dim: int, sizes: tuple[int, ...]) -> _Stored:
        """Return it with a dimension of size 1 more or less: ``sizes`` instead of ``dim``."""

        def put(values: Sequence[int], new: int) -> tuple[int, ...]:
            rest = values[dim + 1 :] if not sizes else values[dim:]
            return (*values[:dim], *([new] * len(sizes)), *rest)

        pieces = tuple(
            one._replace(
                box=Box(put(one.box.offsets, 0), put(one.box.sizes, 1)), strides=put(one.strides, 1)
            )
            for one in self.pieces
        )
        return _Stored(self.dtype, torch.Size(put(self.shape, 1)), pieces)

    def squeeze(self, dim: int) -> _Stored:
        return self.reshaped(dim % self.ndim, ()) if self.shape[dim] == 1 else self

    def unsqueeze(self, dim: int) -> _Stored:
        return self.reshaped(dim % (self.ndim + 1), (1,))


def _cat(tensors: Sequence[_Stored], dim: int = 0) -> _Stored:
    first, dim = tensors[0], dim % tensors[0].ndim
    for one in tensors:
        if one.dtype is not first.dtype or _without(one.shape, dim) != _without(first.shape, dim):
            raise ValueError("the parts of a tensor have different shapes or dtypes")
    starts = accumulate((one.shape[dim] for one in tensors), initial=0)
    pieces = tuple(
        piece.moved(dim, start)
        for one, start in zip(tensors, starts, strict=False)
        for piece in one.pieces
    )
    extent = sum(one.shape[dim] for one in tensors)
    shape = torch.Size((*first.shape[:dim], extent, *first.shape[dim + 1 :]))
    return _Stored(first.dtype, shape, pieces)


def _without(shape: torch.Size, dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _stack(tensors: Sequence[_Stored], dim: int = 0) -> _Stored:
    return _cat([one.unsqueeze(dim) for one in tensors], dim)


def _split(tensor: _Stored, sizes: int | Sequence[int], dim: int = 0) -> tuple[_Stored, ...]:
    extent = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, extent - start) for start in range(0, extent, sizes)]
    starts = accumulate(sizes, initial=0)
    return tuple(
        tensor.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False)
    )


def _chunk(tensor: _Stored, chunks: int, dim: int = 0) -> tuple[_Stored, ...]:
    return _split(tensor, max(1, -(-tensor.shape[dim] // chunks)), dim)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.chunk: _chunk,
    torch.split: _split,
    torch.stack: _stack,
    torch.transpose: _Stored.transpose,
}

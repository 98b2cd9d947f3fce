"""A flattened state, with the blocks of each tensor that this process holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchrelay import _torch
from torchrelay.checkpoint._types import DTYPES, Box, Dtype
from torchrelay.deferred import is_deferred
from torchrelay.errors import ArgumentError, UnsupportedError

__all__ = [
    "Index",
    "Leaf",
    "Shard",
    "TensorState",
    "as_state",
    "byte_view",
    "dtype_of",
    "flatten",
    "is_stateful",
    "is_waiting",
    "plain",
    "put",
    "source_data",
    "tensor_state",
]

Path = tuple[str | int, ...]


class Index(int):
    """A position in a list, as distinct from an integer key of a dictionary."""


@dataclass(frozen=True)
class Leaf:
    """A value of a nested state. ``path`` has the caller's own keys and indices."""

    path: tuple[Any, ...]
    value: Any


@dataclass(frozen=True)
class Shard:
    """A block of a tensor in this process's memory.

    ``holders`` are the global ranks that have the same block; None: every rank whose state has the
    key.
    """

    box: Box
    tensor: torch.Tensor
    holders: tuple[int, ...] | None


@dataclass(frozen=True)
class TensorState:
    """A tensor of the state. ``layout`` is equal on all ranks if they shard the tensor in the same
    way.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    layout: str


def as_state(state: Any) -> dict[Any, Any]:
    """Return the state dict of a module or of another stateful object; a dictionary unchanged.

    Raises:
        ArgumentError: it is neither.
    """
    if isinstance(state, Mapping):
        return {
            key: value.state_dict() if is_stateful(value) else value for key, value in state.items()
        }
    if is_stateful(state):
        found: dict[Any, Any] = state.state_dict()
        return found
    raise ArgumentError(
        f"a state is a dictionary, a module or has state_dict(); got {type(state).__name__}"
    )


def is_stateful(value: Any) -> bool:
    """Return whether ``value`` has a state dict, as modules and optimizers do."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def flatten(state: Mapping[Any, Any]) -> dict[str, Leaf]:
    """Return the leaves of a nested state by key: the path joined by dots, as in DCP.

    Dictionaries are flattened, and lists that hold tensors, dictionaries or such lists.

    Raises:
        ArgumentError: two leaves would have the same key.
    """
    found: dict[str, Leaf] = {}

    def visit(path: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, Mapping):
            for name, item in value.items():
                visit((*path, name), item)
        elif isinstance(value, list) and any(map(_is_nested, value)):
            for index, item in enumerate(value):
                visit((*path, Index(index)), item)
        else:
            key = ".".join(map(str, path))
            if key in found:
                raise ArgumentError(f"two values of the state have the key {key!r}")
            found[key] = Leaf(path, value)

    for name, value in state.items():
        visit((name,), value)
    return found


def _is_nested(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_nested, value))
    return isinstance(value, Mapping | torch.Tensor)


def put(state: Any, path: tuple[Any, ...], value: Any) -> None:
    """Replace the leaf at ``path``."""
    for step in path[:-1]:
        state = state[step]
    state[path[-1]] = value


def dtype_of(key: str, tensor: torch.Tensor) -> Dtype:
    """Return how the dtype of ``tensor`` is stored.

    Raises:
        UnsupportedError: safetensors has no such dtype, or the tensor is not strided.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedError(f"{key}: a checkpoint cannot hold tensors of {tensor.dtype}")
    if tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"{key}: a checkpoint holds strided tensors, not {tensor.layout}; save its parts"
        )
    return DTYPES[name]


def tensor_state(key: str, tensor: torch.Tensor) -> TensorState:
    """Return the blocks of ``tensor`` that this process holds.

    It may be a plain tensor, a DTensor, a ShardedTensor, or answer
    ``torch.distributed._checkpointable``.

    Raises:
        UnsupportedError: a checkpoint cannot hold its dtype, layout or placement.
    """
    dtype, shape = dtype_of(key, tensor), tuple(tensor.shape)
    kind = _torch.sharding_of(tensor)
    if kind == "dtensor":
        return _distributed(key, tensor, dtype, shape)
    if kind == "plain":
        return TensorState(dtype, shape, (Shard(Box.whole(shape), tensor.detach(), None),), "whole")
    shards = tuple(
        Shard(Box(offsets, tuple(local.shape)), local.detach(), ())
        for offsets, local in _torch.local_shards(tensor)
    )
    return TensorState(dtype, shape, shards, "shards")


def _distributed(key: str, tensor: Any, dtype: Dtype, shape: tuple[int, ...]) -> TensorState:
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedError(
            f"{key}: {tensor.placements} has partial sums; redistribute it to Replicate or Shard "
            "first"
        )
    mesh = tensor.device_mesh
    layout = f"{tuple(mesh.mesh.flatten().tolist())} {tuple(mesh.shape)} {tensor.placements}"
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return TensorState(dtype, shape, (), layout)
    same = tuple(
        slice(None) if placement.is_replicate() else place
        for placement, place in zip(tensor.placements, coordinate, strict=True)
    )
    holders = tuple(sorted(mesh.mesh[same].flatten().tolist()))
    with torch.no_grad():
        local = tensor.to_local()
    blocks = _torch.local_blocks(tensor)
    shards = tuple(
        Shard(Box(offsets, sizes), local[within], holders) for offsets, sizes, within in blocks
    )
    return TensorState(dtype, shape, shards, layout)


def is_waiting(value: Any) -> bool:
    """Return whether ``value`` is a deferred tensor, or a DTensor over one."""
    if not isinstance(value, torch.Tensor):
        return False
    return is_deferred(value) or is_deferred(getattr(value, "_local_tensor", value))


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return a writable view of the bytes of a contiguous CPU tensor; it keeps the tensor alive."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def source_data(tensor: torch.Tensor) -> tuple[Callable[[], memoryview], bool]:
    """Return a function that returns the bytes of a tensor in row-major order, and whether it
    copies them.
    """
    found = plain(tensor)
    if found.device.type == "cpu" and found.is_contiguous():
        return lambda: byte_view(found), False
    return lambda: byte_view(found.contiguous().cpu()), True


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without lazy conjugation or negation."""
    return tensor.detach().resolve_conj().resolve_neg()

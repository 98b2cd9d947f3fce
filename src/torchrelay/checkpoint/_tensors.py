"""The tensors of a state: the blocks that this process holds, and whether they can be stored or
filled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchrelay import _torch
from torchrelay.checkpoint._types import DTYPES, Box, Dtype
from torchrelay.deferred import fake, is_deferred
from torchrelay.errors import ArgumentError, DeferredError, UnsupportedError

__all__ = [
    "Shard",
    "TensorState",
    "byte_view",
    "check_memory",
    "check_target",
    "dtype_of",
    "is_ordinary",
    "is_waiting",
    "memory_of",
    "plain",
    "source_data",
    "tensor_state",
]


class Shard(NamedTuple):
    """A block of a tensor in this process's memory.

    ``positions`` are the places in the tensor's mesh that have the same block; None: every rank
    whose state has the key has it; empty: this process alone.
    """

    box: Box
    tensor: torch.Tensor
    positions: tuple[int, ...] | None


class TensorState(NamedTuple):
    """A tensor of the state.

    ``layout`` is equal on all ranks if they shard the tensor in the same way, be it over different
    meshes. ``mesh`` has the global ranks of the DTensor's mesh, by position.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    layout: str
    mesh: tuple[int, ...] = ()


_DTYPES = {getattr(torch, name): dtype for name, dtype in DTYPES.items()}


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is of no subclass, so that it is neither deferred nor sharded."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def dtype_of(key: str, tensor: torch.Tensor) -> Dtype:
    """Return how the dtype of ``tensor`` is stored.

    Raises:
        UnsupportedError: safetensors has no such dtype, or the tensor is not strided.
    """
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedError(
            f"{key}: the tensor has no shape before the first call of its lazy module; call the "
            "module once"
        )
    if tensor.dtype not in _DTYPES:
        raise UnsupportedError(f"{key}: a checkpoint cannot hold tensors of {tensor.dtype}")
    if _torch.sharding_of(tensor) == "plain" and tensor.is_nested:
        raise UnsupportedError(
            f"{key}: a checkpoint holds strided tensors, not nested ones; save its values() and "
            "offsets()"
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"{key}: a checkpoint holds strided tensors, not {tensor.layout}; save its parts"
        )
    return _DTYPES[tensor.dtype]


def check_memory(key: str, tensor: torch.Tensor) -> None:
    """Check that the elements of a plain tensor are in memory.

    Raises:
        ArgumentError: they are not: it is on the meta device, or its memory was released.
        DeferredError: it is deferred or fake.
        UnsupportedError: it is a wrapper around other tensors.
    """
    if is_ordinary(tensor) and tensor.data_ptr():
        return
    kind = type(tensor).__name__
    if is_deferred(tensor) or isinstance(tensor, fake.FakeTensor) or _torch.is_fake(tensor):
        raise DeferredError(
            f"{key}: the tensor is deferred or fake and has no values; materialize_module() gives "
            "deferred ones theirs"
        )
    if tensor.is_meta:
        raise ArgumentError(
            f"{key}: the tensor is on the meta device and has no memory; Module.to_empty(device=) "
            "makes some, or build the module with torchrelay.deferred.deferred_init()"
        )
    if not tensor.numel() or _has_address(tensor):
        return
    if _torch.dispatches_itself(tensor):
        raise UnsupportedError(
            f"{key}: a checkpoint cannot hold a {kind}, a wrapper around other tensors that does "
            "not name them (__tensor_flatten__); use the tensors inside"
        )
    raise ArgumentError(
        f"{key}: the memory of the tensor was released, as FSDP does with unsharded parameters; "
        "use it while it has memory"
    )


def _has_address(tensor: torch.Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:  # of a wrapper whose class forbids it
        return False


def check_target(key: str, tensor: torch.Tensor) -> None:
    """Check that a plain tensor can be filled.

    Raises:
        ArgumentError: its elements are not in memory, or several share theirs.
        DeferredError, UnsupportedError: as for :func:`check_memory`.
    """
    check_memory(key, tensor)
    if tensor.is_contiguous():
        return
    end = 1  # one past the last element of the dimensions before
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < end and tensor.numel():
                raise ArgumentError(
                    f"{key}: the tensor cannot be filled: elements of it share memory (shape "
                    f"{list(tensor.shape)}, strides {list(tensor.stride())}), as after expand(); "
                    "load into a clone() of it"
                )
            end += (size - 1) * stride


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return a value that is equal for two tensors exactly if they are the same in memory; None
    if the tensor has no memory.
    """
    if is_waiting(tensor):
        return (id(tensor),)
    if not tensor.numel() or not _has_address(tensor):
        return None
    view = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), *view)


def tensor_state(key: str, tensor: torch.Tensor) -> TensorState:
    """Return the blocks of ``tensor`` that this process holds.

    It may be a plain tensor, a DTensor, a ShardedTensor, or implement
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
    members = tuple(mesh.mesh.flatten().tolist())
    layout = f"mesh {tuple(mesh.shape)} {tensor.placements}"
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return TensorState(dtype, shape, (), layout, members)
    same = tuple(
        slice(None) if placement.is_replicate() else place
        for placement, place in zip(tensor.placements, coordinate, strict=True)
    )
    positions = torch.arange(len(members)).reshape(tuple(mesh.shape))[same].flatten().tolist()
    with torch.no_grad():
        local = tensor.to_local()
    blocks = _torch.local_blocks(tensor)
    shards = tuple(
        Shard(Box(offsets, sizes), local[within], tuple(positions))
        for offsets, sizes, within in blocks
    )
    return TensorState(dtype, shape, shards, layout, members)


def is_waiting(value: Any) -> bool:
    """Return whether ``value`` is a deferred tensor, or a DTensor over one."""
    if not isinstance(value, torch.Tensor) or is_ordinary(value):
        return False
    return is_deferred(value) or is_deferred(getattr(value, "_local_tensor", value))


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return a writable view of the bytes of a contiguous CPU tensor; it keeps the tensor alive."""
    if not tensor.numel():
        return memoryview(b"")
    array: Any = _torch.flat_bytes(tensor).numpy()
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
    """Return ``tensor`` without its class and without lazy conjugation or negation."""
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    return tensor.resolve_conj().resolve_neg()

"""The tensors of a state: the blocks that this process holds, and whether they can be stored or
filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from torchrelay import _torch
from torchrelay._boxes import Box
from torchrelay.checkpoint._types import DTYPES, Dtype, TensorDescription
from torchrelay.checkpoint.engine._output import Data
from torchrelay.checkpoint.state._state import ORDINARY
from torchrelay.deferred import fake, is_deferred
from torchrelay.errors import ArgumentError, DeferredError, UnsupportedError

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

__all__ = [
    "TensorBlock",
    "TensorLayout",
    "TensorState",
    "address_of",
    "byte_view",
    "check_memory",
    "check_target",
    "data_of",
    "dtype_of",
    "in_stream_of",
    "is_waiting",
    "memory_of",
    "plain",
    "tensor_state",
]

T = TypeVar("T")


class TensorBlock(NamedTuple):
    """A block of a tensor that a process holds.

    ``replicas`` are the places in the tensor's mesh that have the same block; None: every rank
    whose state has the key has it; empty: this process alone.
    """

    box: Box
    replicas: tuple[int, ...] | None
    size_bytes: int


class TensorLayout(NamedTuple):
    """How a tensor of the state is distributed, and which blocks of it this process holds."""

    dtype: Dtype
    described: TensorDescription
    blocks: tuple[TensorBlock, ...]


class TensorState(NamedTuple):
    """A tensor of the state: its layout, and the tensor of each block."""

    layout: TensorLayout
    tensors: tuple[torch.Tensor, ...]


# What tensors of other layouts are made of.
_ROWS = "crow_indices(), col_indices() and values()"
_COLUMNS = "ccol_indices(), row_indices() and values()"
_PARTS = {
    torch.sparse_coo: "coalesce().indices() and coalesce().values()",
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}
_DTYPES = {getattr(torch, name): dtype for name, dtype in DTYPES.items()}


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
            f"{key}: a checkpoint holds strided tensors, not {tensor.layout}; save its "
            + _PARTS.get(tensor.layout, "to_dense()")
        )
    return _DTYPES[tensor.dtype]


def check_memory(key: str, tensor: torch.Tensor) -> None:
    """Check that the elements of a plain tensor are in memory.

    Raises:
        ArgumentError: they are not: it is on the meta device, or its memory was released.
        DeferredError: it is deferred or fake.
        UnsupportedError: it is a wrapper around other tensors.
    """
    if type(tensor) in ORDINARY and tensor.data_ptr():
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
    if type(tensor) not in ORDINARY or tensor.is_nested or tensor.layout is not torch.strided:
        dtype = dtype_of(key, tensor)
        kind = _torch.sharding_of(tensor)
        if kind != "plain":
            try:
                return (_distributed if kind == "dtensor" else _sharded)(key, tensor, dtype)
            except UnsupportedError:
                raise
            except NotImplementedError as error:  # by the class of the local tensor
                raise UnsupportedError(
                    f"{key}: a checkpoint cannot hold this {type(tensor).__name__}: the class of "
                    f"its local tensor lacks what a save needs ({error})"
                ) from error
    elif tensor.dtype not in _DTYPES:
        dtype_of(key, tensor)  # raises
    return TensorState(_whole(tensor.dtype, tensor.shape), (tensor,))


@lru_cache(1 << 12)
def _whole(dtype: torch.dtype, shape: torch.Size) -> TensorLayout:
    """Return the layout of a tensor that is not sharded; the same object for equal ones."""
    return _layout(_DTYPES[dtype], tuple(shape), [(Box.whole(shape), None)], "whole")


def _layout(
    dtype: Dtype,
    shape: tuple[int, ...],
    blocks: Iterable[tuple[Box, tuple[int, ...] | None]],
    layout: str,
    mesh: tuple[int, ...] = (),
) -> TensorLayout:
    described = TensorDescription(dtype.name, shape, layout, mesh)
    return TensorLayout(
        dtype,
        described,
        tuple(TensorBlock(box, at, box.numel * dtype.itemsize) for box, at in blocks),
    )


def _sharded(key: str, tensor: torch.Tensor, dtype: Dtype) -> TensorState:
    shards = _torch.local_shards(tensor)
    blocks = [(box, ()) for box, _ in shards]
    layout = _layout(dtype, tuple(tensor.shape), blocks, "shards")
    return TensorState(layout, tuple(local for _, local in shards))


def _distributed(key: str, tensor: Any, dtype: Dtype) -> TensorState:
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedError(
            f"{key}: {tensor.placements} has partial sums; redistribute it to Replicate or Shard "
            "first"
        )
    coordinate = tensor.device_mesh.get_coordinate()
    layout, parts = _placed(
        dtype,
        tensor.shape,
        tensor.device_mesh,
        tensor.placements,
        None if coordinate is None else tuple(coordinate),
    )
    with torch.no_grad():
        local = tensor.to_local()
    return TensorState(layout, tuple(local[part] for part in parts))


@lru_cache(1 << 12)
def _placed(
    dtype: Dtype,
    size: torch.Size,
    mesh: DeviceMesh,
    placements: tuple[Any, ...],
    coordinate: tuple[int, ...] | None,
) -> tuple[TensorLayout, tuple[tuple[slice, ...], ...]]:
    """Return the layout of a DTensor, and the place of each block in its local tensor.

    ``coordinate`` is that of this process in the mesh; None if it is not there.
    """
    shape, grid = tuple(size), tuple(mesh.shape)
    members = tuple(mesh.mesh.flatten().tolist())
    layout = f"mesh {grid} {placements}"
    if coordinate is None:
        return _layout(dtype, shape, (), layout, members), ()
    same = tuple(
        slice(None) if placement.is_replicate() else place
        for placement, place in zip(placements, coordinate, strict=True)
    )
    replicas = tuple(
        torch.arange(len(members), device="cpu").reshape(grid)[same].flatten().tolist()
    )
    found = _torch.local_blocks(size, mesh, placements)
    blocks = [(box, replicas) for box, _ in found]
    return _layout(dtype, shape, blocks, layout, members), tuple(place for _, place in found)


def is_waiting(value: Any) -> bool:
    """Return whether ``value`` is a deferred tensor, or a DTensor over one."""
    if not isinstance(value, torch.Tensor) or type(value) in ORDINARY:
        return False
    return is_deferred(value) or is_deferred(getattr(value, "_local_tensor", value))


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return a writable view of the bytes of a contiguous CPU tensor; it keeps the tensor alive."""
    if not tensor.numel():
        return memoryview(b"")
    array: Any = _torch.flat_bytes(tensor).numpy()
    return memoryview(array)


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the bytes of a tensor in row-major order; 0 if they are not in host
    memory in this form.
    """
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj()):
        return tensor.data_ptr()
    return 0


def data_of(tensor: torch.Tensor) -> Data:
    """Return what a save needs of a tensor, which must live until it is written."""
    return address_of(tensor) or in_stream_of(
        tensor, lambda: byte_view(plain(tensor).contiguous().cpu())
    )


def in_stream_of(tensor: torch.Tensor, function: Callable[..., T]) -> Callable[..., T]:
    """Return ``function``, which uses ``tensor``, so that in any thread it runs in the CUDA stream
    that is this thread's now.
    """
    if not tensor.is_cuda:
        return function
    stream = torch.cuda.current_stream(tensor.device)

    def call(*args: Any) -> T:
        with torch.cuda.stream(stream):
            return function(*args)

    return call


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without its class and without lazy conjugation or negation."""
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    return tensor.resolve_conj().resolve_neg()

"""Tensors that are divided between ranks, and what Distributed Checkpoint asks of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from torchrelay._boxes import Box
from torchrelay.errors import UnsupportedError

__all__ = [
    "CheckpointShard",
    "dtensor_of",
    "local_blocks",
    "local_box",
    "local_shards",
    "sharding_of",
]


T = TypeVar("T")


class CheckpointShard(torch.Tensor):
    """A block of rows of a larger tensor that Distributed Checkpoint saves and loads.

    It has the larger tensor's size and implements DCP's own protocol
    (``torch.distributed._checkpointable``); computing with it is an error. ``local`` is this rank's
    block, at ``offsets`` of the whole.
    """

    local: torch.Tensor
    offsets: tuple[int, ...]

    @staticmethod
    def __new__(
        cls, local: torch.Tensor, offsets: tuple[int, ...], size: torch.Size, *_: Any
    ) -> CheckpointShard:
        self: CheckpointShard = torch.Tensor._make_wrapper_subclass(cls, size, dtype=local.dtype)
        self.local, self.offsets = local, offsets
        return self

    def __init__(self, local: torch.Tensor, offsets: tuple[int, ...], size: torch.Size) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.new_empty.default and tuple(args[1]) == tuple(args[0].size()):
            # DCP stages an asynchronous save: it copies the attributes into an empty tensor of the
            # same kind.
            return cls(torch.empty_like(args[0].local), args[0].offsets, args[0].size())
        raise UnsupportedError(
            f"{func}: a {cls.__name__} is for checkpoints only; compute with its .local"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        shape, of = tuple(self.local.shape), tuple(self.size())
        return f"{type(self).__name__}(offsets={self.offsets}, {shape=}, {of=})"

    def _chunk(self) -> Any:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: PLC0415

        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.local.size())

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties  # noqa: PLC0415
        from torch.distributed.checkpoint.planner import (  # noqa: PLC0415
            TensorWriteData,
            WriteItem,
            WriteItemType,
        )

        if self.local.numel() == 0 and self.numel() > 0:
            return []  # DCP tells blocks apart by their offsets, and the next rank's has the same
        chunk = self._chunk()
        data = TensorWriteData(
            chunk=chunk,
            properties=TensorProperties.create_from_tensor(self.local),
            size=self.size(),
        )
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data
            )
        ]

    def __create_chunk_list__(self) -> list[Any]:
        return [self._chunk()]

    def __get_tensor_shard__(self, _: object) -> torch.Tensor:
        return self.local


def local_box(shape: Any, mesh: Any, placements: Any) -> Box:
    """Return this rank's part of a distributed tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415

    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Box(tuple(offsets), tuple(sizes))


def sharding_of(tensor: torch.Tensor) -> str:
    """Return how a checkpoint divides ``tensor``: "dtensor", "shards" or "plain".

    Shards are those of a ShardedTensor or of a class with ``torch.distributed._checkpointable``.
    """
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return "plain"
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor  # noqa: PLC0415
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    if isinstance(tensor, DTensor):
        return "dtensor"
    if isinstance(tensor, ShardedTensor) or hasattr(tensor, "__create_chunk_list__"):
        return "shards"
    return "plain"


def dtensor_of(
    local: torch.Tensor, like: Any, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Return a DTensor over ``local``, on the mesh and with the placements of ``like``."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )


def local_shards(tensor: Any) -> list[tuple[Box, torch.Tensor]]:
    """Return each block of this rank, and its local tensor.

    For a ShardedTensor, or a tensor of a class with ``torch.distributed._checkpointable``.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: PLC0415

    if hasattr(tensor, "__create_chunk_list__"):
        found = [
            (
                chunk.offsets,
                tensor.__get_tensor_shard__(MetadataIndex("", chunk.offsets, index)),
            )
            for index, chunk in enumerate(tensor.__create_chunk_list__())
        ]
    else:
        found = [(shard.metadata.shard_offsets, shard.tensor) for shard in tensor.local_shards()]
    return [(Box(tuple(offsets), tuple(local.shape)), local) for offsets, local in found]


Block = tuple[Box, tuple[slice, ...]]


def local_blocks(shape: torch.Size, mesh: Any, placements: Sequence[Any]) -> list[Block]:
    """Return the blocks of the global tensor that form this rank's part of a DTensor, and the place
    of each in the local tensor.

    One, unless a strided shard (FSDP over tensor parallelism, with uneven sizes) interleaves: then
    one per run.
    """
    from torch.distributed.tensor.placement_types import _StridedShard  # noqa: PLC0415

    box = local_box(shape, mesh, placements)
    strided = {p.dim for p in placements if isinstance(p, _StridedShard)}
    blocks: list[Block] = [(box, box.within(box))]
    for dim in sorted(strided):
        runs = _runs(_indices_along(shape[dim], mesh, placements, dim))
        blocks = [
            (
                Box(_put(box.offsets, dim, start), _put(box.sizes, dim, length)),
                _put(place, dim, slice(first, first + length)),
            )
            for box, place in blocks
            for start, first, length in runs
        ]
    return blocks


def _put(values: tuple[T, ...], dim: int, value: T) -> tuple[T, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _indices_along(size: int, mesh: Any, placements: Sequence[Any], dim: int) -> torch.Tensor:
    """Which indices of dimension ``dim`` this rank has, in the order in which it has them."""
    held = torch.arange(size, device="cpu")
    coordinate = mesh.get_coordinate()
    for mesh_dim, placement in enumerate(placements):
        if getattr(placement, "dim", None) == dim:
            factor = getattr(placement, "split_factor", None)
            strided = {} if factor is None else {"split_factor": factor}
            along = type(placement)(0, **strided)
            pieces, _ = along._split_tensor(held, mesh.size(mesh_dim), with_padding=False)
            held = pieces[coordinate[mesh_dim]]
    return held


def _runs(indices: torch.Tensor) -> list[tuple[int, int, int]]:
    """Each run of successive indices: its first value, its position, its length."""
    if not len(indices):
        return [(0, 0, 0)]
    ends = [*(torch.nonzero(indices.diff() != 1).flatten() + 1).tolist(), len(indices)]
    return [(int(indices[at]), at, end - at) for at, end in itertools.pairwise([0, *ends])]

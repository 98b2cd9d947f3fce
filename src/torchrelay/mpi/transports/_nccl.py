"""Collectives of tensors of CUDA devices, over a duplicate of a process group's NCCL.

The current stream orders what they write, so they are complete when they return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torchrelay._torch import flat_bytes, private_nccl
from torchrelay.mpi._dtypes import EXTREMA, NATIVE, Op
from torchrelay.mpi._memory import Blocks
from torchrelay.mpi._transport import Part

__all__ = ["Nccl"]

_c10d: Any = dist.distributed_c10d
_OPS: dict[Op, Any] = {
    Op.SUM: dist.ReduceOp.SUM,
    Op.PROD: dist.ReduceOp.PRODUCT,
    Op.MIN: dist.ReduceOp.MIN,
    Op.MAX: dist.ReduceOp.MAX,
}


class Nccl:
    """The ranks of ``store``, which nothing else uses."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self._backend = private_nccl(store, rank, size, timeout_s)
        self._size = size

    def all_reduce(self, source: Tensor, result: Tensor, op: Op) -> bool:
        """Reduce all ranks' ``source`` into every rank's ``result``; False if NCCL cannot."""
        lacks = source.dtype.itemsize == 2 and not source.is_floating_point()  # int16
        loses_nan = op in EXTREMA and source.is_floating_point()
        if op not in _OPS or (source.dtype, op) not in NATIVE or lacks or loses_nan:
            return False
        if result is not source:
            result.copy_(source)
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        self._backend.allreduce([result], options).wait()
        return True

    def broadcast(self, memory: Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._backend.broadcast([flat_bytes(memory)], options).wait()

    def move(self, sent: Part, received: Part, root: int | None) -> None:
        """Copy blocks between ranks; see :class:`torchrelay.mpi._transport.Transport`."""
        counts = received.layout.counts if isinstance(received, Blocks) else ()
        if root is None and isinstance(sent, Tensor) and len({*counts}) == 1:
            assert isinstance(received, Blocks)
            into, options = flat_bytes(received.memory), _c10d.AllgatherOptions()
            self._backend._allgather_base(into, flat_bytes(sent), options).wait()
            return
        source, going = self._memory(sent, received, root)
        result, coming = self._memory(received, sent, root)
        self._backend.alltoall_base(
            flat_bytes(result),
            flat_bytes(source),
            [count * result.itemsize for count in coming],
            [count * source.itemsize for count in going],
            dist.AllToAllOptions(),
        ).wait()

    def _memory(self, part: Part, other: Part, root: int | None) -> tuple[Tensor, Sequence[int]]:
        """Return the memory of ``part``, and how many elements each rank has of it."""
        if isinstance(part, Blocks):
            return part.memory, part.layout.counts
        if part is None:
            assert isinstance(other, Tensor)
            part = other.new_empty(0)
        if root is None:
            return part.view(-1).repeat(self._size), [part.numel()] * self._size
        return part, [part.numel() * (rank == root) for rank in range(self._size)]

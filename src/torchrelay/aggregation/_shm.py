"""The plane of ranks that share a host: a shared segment and the native core."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from torchrelay import _native
from torchrelay._native import Op
from torchrelay.aggregation._dtypes import NATIVE, code
from torchrelay.aggregation._plane import PlaneStats
from torchrelay.buffers import Segment
from torchrelay.config import Aggregation
from torchrelay.errors import OperationTimeoutError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from torchrelay._native import Ticket, Transfer

__all__ = ["ShmPlane"]

_SEGMENT_KEY = "torchrelay/segment"


class ShmPlane:
    """One rank's part in a group whose ranks all run on this host; see :class:`_plane.Plane`.

    Making one is collective: the first rank makes the segment, the others attach it by the address it left in
    ``store``, and all wait for each other.

    Args:
        store: shared by the group's ranks, and by nobody else.
        names: the ranks as users know them, for messages.

    Raises:
        OperationTimeoutError: a rank did not come within ``timeout_s``.
        SegmentError: the segment cannot be made or attached.
    """

    name = "shm"

    def __init__(
        self,
        store: Store,
        rank: int,
        names: Sequence[int],
        timeout_s: float,
        settings: Aggregation,
    ) -> None:
        self._segment = _open_segment(store, rank, names, timeout_s, settings)
        self._native = _native.Communicator(
            self._segment.memory,
            rank,
            list(names),
            spin_s=settings.spin_us * 1e-6,
            yield_s=settings.crowded_yield_us * 1e-6,
        )
        self._native.join(timeout_s)
        self._payload_bytes = 0

    def all_reduce(self, tensor: torch.Tensor, op: Op, timeout_s: float, block: bool) -> Ticket | None:
        self._payload_bytes += tensor.nbytes
        return self._native.all_reduce(
            tensor.data_ptr(), tensor.numel(), NATIVE[tensor.dtype], op, timeout_s, block
        )

    def reduce(self, tensor: torch.Tensor, op: Op, root: int, timeout_s: float, block: bool) -> Ticket | None:
        self._payload_bytes += tensor.nbytes
        return self._native.reduce(
            tensor.data_ptr(), tensor.numel(), NATIVE[tensor.dtype], op, root, timeout_s, block
        )

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op, timeout_s: float, block: bool
    ) -> Ticket | None:
        self._payload_bytes += output.nbytes * len(inputs)
        addresses = [tensor.data_ptr() for tensor in inputs]
        return self._native.reduce_scatter(
            addresses, output.data_ptr(), output.numel(), NATIVE[output.dtype], op, timeout_s, block
        )

    def broadcast(self, tensor: torch.Tensor, root: int, timeout_s: float, block: bool) -> Ticket | None:
        self._payload_bytes += tensor.nbytes
        return self._native.broadcast(
            tensor.data_ptr(), tensor.nbytes, code(tensor.dtype), root, timeout_s, block
        )

    def all_gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, timeout_s: float, block: bool
    ) -> Ticket | None:
        self._payload_bytes += tensor.nbytes
        return self._native.all_gather(
            tensor.data_ptr(), tensor.nbytes, _blocks(outputs), code(tensor.dtype), timeout_s, block
        )

    def gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int, timeout_s: float, block: bool
    ) -> Ticket | None:
        self._payload_bytes += tensor.nbytes
        return self._native.gather(
            tensor.data_ptr(), tensor.nbytes, _blocks(outputs), code(tensor.dtype), root, timeout_s, block
        )

    def scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int, timeout_s: float, block: bool
    ) -> Ticket | None:
        self._payload_bytes += output.nbytes
        return self._native.scatter(
            _blocks(inputs), output.data_ptr(), output.nbytes, code(output.dtype), root, timeout_s, block
        )

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        timeout_s: float,
        block: bool,
    ) -> Ticket | None:
        self._payload_bytes += sum(tensor.nbytes for tensor in inputs)
        dtype = inputs[0].dtype
        return self._native.all_to_all(_blocks(inputs), _blocks(outputs), code(dtype), timeout_s, block)

    def barrier(self, timeout_s: float, block: bool) -> Ticket | None:
        return self._native.barrier(timeout_s, block)

    def send(self, tensor: torch.Tensor, to: int, tag: int, timeout_s: float) -> Transfer:
        self._payload_bytes += tensor.nbytes
        return self._native.send(tensor.data_ptr(), tensor.nbytes, to, tag, code(tensor.dtype), timeout_s)

    def receive(self, tensor: torch.Tensor, source: int, tag: int, timeout_s: float) -> Transfer:
        return self._native.receive(
            tensor.data_ptr(), tensor.nbytes, source, tag, code(tensor.dtype), timeout_s
        )

    def wait_transfer(self, transfer: Transfer, timeout_s: float) -> bool:
        return self._native.wait_transfer(transfer, timeout_s)

    def stats(self) -> PlaneStats:
        native = self._native
        return PlaneStats(self.name, native.jobs, self._payload_bytes, native.waiting_ns * 1e-9)

    def close(self) -> None:
        self._native.close()


def _blocks(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]


def _open_segment(
    store: Store, rank: int, names: Sequence[int], timeout_s: float, settings: Aggregation
) -> Segment:
    if rank == 0:
        memory = _native.Communicator.create_segment(
            len(names), settings.slot_bytes, settings.one_shot_bytes, settings.mailbox_bytes
        )
        segment = Segment(memory)
        store.set(_SEGMENT_KEY, segment.address)
        return segment
    try:
        store.wait([_SEGMENT_KEY], timedelta(seconds=timeout_s))
    except Exception as error:  # DistStoreError from a TCPStore, RuntimeError from others
        raise OperationTimeoutError(
            f"rank {names[rank]}: rank {names[0]} made no segment for their group within {timeout_s:g} s; "
            "is it running, and does it make the same groups in the same order?",
            ranks=(names[0],),
        ) from error
    return Segment.attach(store.get(_SEGMENT_KEY).decode())

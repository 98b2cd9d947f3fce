"""The native core as a data plane; that of ranks that share a host, over a shared segment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from torchrelay._communicators import open_local
from torchrelay._native import Op
from torchrelay.aggregation._dtypes import NATIVE, code
from torchrelay.aggregation._plane import PlaneStats, Tensors
from torchrelay.config import Aggregation
from torchrelay.world import Meeting

if TYPE_CHECKING:
    from torchrelay._native import Communicator, HostCommunicator, Ticket, Transfer

__all__ = ["NativePlane", "ShmPlane"]


class NativePlane:
    """Those methods of a :class:`_plane.Plane` that a native communicator implements."""

    native: Communicator | HostCommunicator
    _payload_bytes = 0

    def all_reduce(self, tensor: Tensor, op: Op, timeout_s: float, block: bool) -> Ticket | None:
        self._payload_bytes += tensor.nbytes
        return self.native.all_reduce(
            tensor.data_ptr(), tensor.numel(), NATIVE[tensor.dtype], op, timeout_s, block
        )

    def sum_into(self, output: Tensor, source: Tensor, timeout_s: float) -> None:
        self._payload_bytes += output.nbytes
        dtype, address = NATIVE[output.dtype], source.data_ptr()
        self.native.all_reduce(
            output.data_ptr(), output.numel(), dtype, Op.SUM, timeout_s, True, address
        )

    def reduce(
        self, tensor: Tensor, op: Op, root: int, timeout_s: float, block: bool
    ) -> Ticket | None:
        self._payload_bytes += tensor.nbytes
        return self.native.reduce(
            tensor.data_ptr(), tensor.numel(), NATIVE[tensor.dtype], op, root, timeout_s, block
        )

    def reduce_scatter(
        self, output: Tensor, inputs: Tensors, op: Op, timeout_s: float, block: bool
    ) -> Ticket | None:
        self._payload_bytes += output.nbytes * len(inputs)
        addresses = [tensor.data_ptr() for tensor in inputs]
        return self.native.reduce_scatter(
            addresses, output.data_ptr(), output.numel(), NATIVE[output.dtype], op, timeout_s, block
        )

    def _block(self, tensor: Tensor) -> tuple[int, int, int]:
        """Return address, bytes and dtype of a tensor, whose bytes count."""
        self._payload_bytes += tensor.nbytes
        return tensor.data_ptr(), tensor.nbytes, code(tensor.dtype)

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float, block: bool) -> Ticket | None:
        return self.native.broadcast(*self._block(tensor), root, timeout_s, block)

    def all_gather(
        self, outputs: Tensors, tensor: Tensor, timeout_s: float, block: bool
    ) -> Ticket | None:
        address, size, dtype = self._block(tensor)
        return self.native.all_gather(address, size, _blocks(outputs), dtype, timeout_s, block)

    def gather(
        self, outputs: Tensors, tensor: Tensor, root: int, timeout_s: float, block: bool
    ) -> Ticket | None:
        address, size, dtype = self._block(tensor)
        return self.native.gather(address, size, _blocks(outputs), dtype, root, timeout_s, block)

    def scatter(
        self, output: Tensor, inputs: Tensors, root: int, timeout_s: float, block: bool
    ) -> Ticket | None:
        address, size, dtype = self._block(output)
        return self.native.scatter(_blocks(inputs), address, size, dtype, root, timeout_s, block)

    def all_to_all(
        self, outputs: Tensors, inputs: Tensors, timeout_s: float, block: bool
    ) -> Ticket | None:
        self._payload_bytes += sum(tensor.nbytes for tensor in inputs)
        dtype = code(inputs[0].dtype)
        return self.native.all_to_all(_blocks(inputs), _blocks(outputs), dtype, timeout_s, block)

    def barrier(self, timeout_s: float, block: bool) -> Ticket | None:
        return self.native.barrier(timeout_s, block)

    def send(self, tensor: Tensor, to: int, tag: int, timeout_s: float) -> Transfer:
        address, size, dtype = self._block(tensor)
        return self.native.send(address, size, to, tag, dtype, timeout_s)

    def receive(self, tensor: Tensor, source: int, tag: int, timeout_s: float) -> Transfer:
        return self.native.receive(
            tensor.data_ptr(), tensor.nbytes, source, tag, code(tensor.dtype), timeout_s
        )

    def wait_transfer(self, transfer: Transfer, timeout_s: float) -> bool:
        return self.native.wait_transfer(transfer, timeout_s)


class ShmPlane(NativePlane):
    """The :class:`_plane.Plane` of a rank in a group whose ranks all run on this host.

    Creation is collective; see :func:`open_local`, also for its errors.

    Args:
        meeting: of the group's ranks.
    """

    name = "shm"
    native: Communicator

    def __init__(self, meeting: Meeting, timeout_s: float, settings: Aggregation) -> None:
        self.native = open_local(meeting, timeout_s, settings)

    def stats(self) -> PlaneStats:
        native = self.native
        return PlaneStats(self.name, native.jobs, self._payload_bytes, native.waiting_ns * 1e-9)

    def close(self) -> None:
        self.native.close()


def _blocks(tensors: Tensors) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]

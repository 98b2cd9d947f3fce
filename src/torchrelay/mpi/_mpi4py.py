"""MPI as a transport, by mpi4py.

MPI lacks float16 and bfloat16: they are sent as two bytes and reduced by operations defined here.
What one MPI call cannot count is moved in pieces; all ranks decide so alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from mpi4py import MPI
from torch import Tensor

from torchrelay.errors import ArgumentError
from torchrelay.mpi import _wait
from torchrelay.mpi._dtypes import KERNELS, Op, check_dtype, check_op
from torchrelay.mpi._headers import Headers
from torchrelay.mpi._layout import Blocks
from torchrelay.mpi._memory import pieces
from torchrelay.mpi._settings import settings
from torchrelay.mpi._transport import Requests, Testable

__all__ = ["MpiTransport"]

PIECE_TAG = 7
CONTROL_BYTES = 1024
Buffer: TypeAlias = tuple[MPI.buffer, int, MPI.Datatype]

_two_bytes = MPI.BYTE.Create_contiguous(2).Commit()
_TYPES: dict[torch.dtype, MPI.Datatype] = {
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.float16: _two_bytes,
    torch.bfloat16: _two_bytes,
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
    torch.bool: MPI.C_BOOL,
}
# Sums, products and extrema of bool, as logical operations.
_AS_LOGICAL = {
    Op.SUM: Op.LOR,
    Op.MAX: Op.LOR,
    Op.BOR: Op.LOR,
    Op.PROD: Op.LAND,
    Op.MIN: Op.LAND,
    Op.BAND: Op.LAND,
    Op.BXOR: Op.LXOR,
}
_ops: dict[tuple[torch.dtype, Op], MPI.Op] = {}
_posting: list[tuple[MPI.Request, object]] = []  # control messages in transit


def _buffer(tensor: Tensor) -> Buffer:
    """Return the memory of a contiguous CPU tensor, which the caller keeps alive."""
    kind = _TYPES.get(tensor.dtype)
    if kind is None:
        check_dtype(tensor.dtype)
    return (MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), tensor.numel(), kind)  # type: ignore[return-value]


def _vector(blocks: Blocks) -> tuple[object, ...]:
    """Return the memory as an argument of a v-collective of mpi4py."""
    memory, _, kind = _buffer(blocks.memory)
    return (memory, blocks.layout.counts, blocks.layout.starts, kind)


def _half_op(dtype: torch.dtype, op: Op) -> MPI.Op:
    kernel = KERNELS[op]

    def reduce(incoming: Any, result: Any, _datatype: MPI.Datatype) -> None:
        if not len(incoming):  # a rank's part of a Reduce_scatter may be empty
            return
        theirs, ours = (torch.frombuffer(each, dtype=dtype) for each in (incoming, result))
        kernel(theirs, ours, out=ours)

    return MPI.Op.Create(reduce, commute=True)


def _op(dtype: torch.dtype, op: Op) -> MPI.Op:
    """Return the MPI operation for ``op`` on ``dtype``; raise ArgumentError if it is undefined."""
    found = _ops.get((dtype, op))
    if found is None:
        check_op(dtype, op)
        if dtype in (torch.float16, torch.bfloat16):
            found = _half_op(dtype, op)
        else:
            name = _AS_LOGICAL.get(op, op) if dtype is torch.bool else op
            found = getattr(MPI, name.value)
        _ops[dtype, op] = found
    return found


class _Message:
    """A message in transit into ``memory``."""

    __slots__ = ("memory", "request", "size_bytes", "source", "status", "tag")

    def __init__(self, request: MPI.Request, memory: Tensor, source: int, tag: int) -> None:
        self.request, self.memory = request, memory
        self.source, self.tag, self.size_bytes = source, tag, 0
        self.status = MPI.Status()

    def Test(self) -> bool:
        if not self.request.Test(self.status):
            return False
        self.source, self.tag = self.status.Get_source(), self.status.Get_tag()
        self.size_bytes = self.status.Get_count(MPI.BYTE)
        return True


class MpiTransport:
    """An intra-communicator of MPI."""

    most_bytes = 1 << 62
    max_tag: int = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # type: ignore[assignment]

    def __init__(self, mpi: MPI.Comm) -> None:
        if not isinstance(mpi, MPI.Intracomm):
            raise ArgumentError(f"{mpi!r} is not an intra-communicator")
        self.mpi = mpi
        self.rank, self.size = mpi.rank, mpi.size
        self.idle_headers: list[Headers] = []
        self._descending: MPI.Intracomm | None = None

    def takes(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def row_exchange(self, sent: Tensor, received: Tensor) -> Callable[[bool], Testable]:
        row, rows = _buffer(sent), (_buffer(received)[0], sent.numel(), MPI.BYTE)
        return lambda _: self.mpi.Iallgather(row, rows)

    # Collectives

    def begin_after(self, comparison: Testable) -> None:
        """Do nothing: data that does not match is found with the comparison."""

    def _run(
        self, name: str, arrived: bool, *arguments: object, mpi: MPI.Intracomm | None = None
    ) -> Requests:
        """Call MPI's function ``name``, or its non-blocking form."""
        mpi = mpi or self.mpi
        if arrived:
            getattr(mpi, name)(*arguments)
            return []
        return [getattr(mpi, f"I{name.lower()}")(*arguments)]

    def allreduce(self, source: Tensor, result: Tensor, op: Op, arrived: bool) -> Requests:
        kind = _op(source.dtype, op)
        requests: list[Testable] = []
        for ours, total in pieces(source, result):
            sent = MPI.IN_PLACE if source is result else _buffer(ours)
            requests += self._run("Allreduce", arrived, sent, _buffer(total), kind)
        return requests

    def reduce(self, source: Tensor, result: Tensor, op: Op, root: int, arrived: bool) -> Requests:
        kind = _op(source.dtype, op)
        requests: list[Testable] = []
        for ours, total in pieces(source, result):
            sent: object = _buffer(ours)
            into = None
            if self.rank == root:
                sent, into = MPI.IN_PLACE if result is source else sent, _buffer(total)
            requests += self._run("Reduce", arrived, sent, into, kind, root)
        return requests

    def scan(
        self,
        source: Tensor,
        result: Tensor,
        op: Op,
        exclusive: bool,
        descending: bool,
        arrived: bool,
    ) -> Requests:
        kind, name = _op(source.dtype, op), "Exscan" if exclusive else "Scan"
        requests: list[Testable] = []
        mpi = self._reversed() if descending else self.mpi
        for ours, total in pieces(source, result):
            requests += self._run(name, arrived, _buffer(ours), _buffer(total), kind, mpi=mpi)
        return requests

    def _reversed(self) -> MPI.Intracomm:
        """Return the ranks in reverse order; all ranks have arrived in the scan that needs it."""
        if self._descending is None:
            self._descending = self.mpi.Split(0, -self.rank)  # type: ignore[assignment]
        assert self._descending is not None
        return self._descending

    def reduce_scatter(self, blocks: Blocks, result: Tensor, op: Op, arrived: bool) -> Requests:
        arguments = (_buffer(blocks.memory), _buffer(result), blocks.layout.counts)
        return self._run("Reduce_scatter", arrived, *arguments, _op(result.dtype, op))

    def broadcast(self, memory: Tensor, root: int, arrived: bool) -> Requests:
        requests: list[Testable] = []
        for (piece,) in pieces(memory):
            requests += self._run("Bcast", arrived, _buffer(piece), root)
        return requests

    def allgather(self, block: Tensor, received: Blocks, arrived: bool) -> Requests:
        if received.layout.total > settings.max_count:
            return self._move_pieces([block] * self.size, received.tensors())
        return self._run("Allgatherv", arrived, _buffer(block), _vector(received))

    def gather(
        self, block: Tensor, received: Blocks, root: int, total: int, arrived: bool
    ) -> Requests:
        is_root = self.rank == root
        if total > settings.max_count:
            nothing = block.new_empty(0)
            sending = [block if rank == root else nothing for rank in range(self.size)]
            return self._move_pieces(sending, received.tensors())
        into = _vector(received) if is_root else None
        return self._run("Gatherv", arrived, _buffer(block), into, root)

    def scatter(
        self, sending: Blocks | None, received: Tensor, root: int, total: int, arrived: bool
    ) -> Requests:
        if total > settings.max_count:
            nothing = received.new_empty(0)
            given = [nothing] * self.size if sending is None else sending.tensors()
            into = [received if rank == root else nothing for rank in range(self.size)]
            return self._move_pieces(given, into)
        sent = None if sending is None else _vector(sending)
        return self._run("Scatterv", arrived, sent, _buffer(received), root)

    def alltoall(self, sending: Blocks, received: Blocks, total: int, arrived: bool) -> Requests:
        if total > settings.max_count:
            return self._move_pieces(sending.tensors(), received.tensors())
        return self._run("Alltoallv", arrived, _vector(sending), _vector(received))

    def _move_pieces(self, sending: Iterable[Tensor], received: Iterable[Tensor]) -> Requests:
        """Send ``sending[r]`` to rank r and receive ``received[r]`` from it, in pieces."""
        requests: list[Testable] = []
        for blocks, start in ((received, self.mpi.Irecv), (sending, self.mpi.Isend)):
            for rank, tensor in enumerate(blocks):
                if tensor.numel():
                    requests += [
                        start(_buffer(part), rank, PIECE_TAG) for (part,) in pieces(tensor)
                    ]
        return requests

    # Messages

    def isend(self, memory: Tensor, dest: int, tag: int) -> MPI.Request:
        return self.mpi.Isend(_buffer(memory), dest, tag)

    def irecv(self, memory: Tensor, source: int, tag: int) -> _Message:
        return _Message(self.mpi.Irecv(_buffer(memory), source, tag), memory, source, tag)

    def post(self, dest: int, tag: int, text: bytes) -> None:
        message = bytearray(text[:CONTROL_BYTES])
        request = self.mpi.Isend([message, len(message), MPI.BYTE], dest, tag)
        _posting[:] = [each for each in _posting if not each[0].Test()]
        _posting.append((request, message))

    def posted(self, source: int, tag: int) -> list[tuple[int, bytes]]:
        messages, status = [], MPI.Status()
        while (message := self.mpi.Improbe(source, tag, status)) is not None:
            text = bytearray(CONTROL_BYTES)
            message.Recv([text, CONTROL_BYTES, MPI.BYTE], status)
            messages.append((status.Get_source(), bytes(text[: status.Get_count(MPI.BYTE)])))
        return messages

    # Communicators

    def duplicate(self) -> MpiTransport:
        return MpiTransport(self.mpi.Dup())

    def split(
        self, color: int, key: int, finish: Callable[[Testable], object]
    ) -> MpiTransport | None:
        mpi = self.mpi.Split(color, key)
        return None if mpi == MPI.COMM_NULL else MpiTransport(mpi)

    def free(self) -> None:
        for mpi in (self._descending, self.mpi):
            if mpi is not None:
                mpi.Free()


class _End:
    """The end of the job, which all ranks of MPI leave together."""

    def __init__(self) -> None:
        self._mpi = MPI.COMM_WORLD.Dup()

    def is_over(self) -> bool:
        return MPI.COMM_WORLD.size == 1 or MPI.Is_finalized()

    def start(self) -> Testable:
        """Start to wait for the others."""
        return self._mpi.Ibarrier()

    def abort(self) -> None:
        """End the job, because MPI_Finalize would never return."""
        MPI.COMM_WORLD.Abort(1)


_wait.leave_with(_End())

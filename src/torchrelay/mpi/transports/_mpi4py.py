"""MPI as a transport, by mpi4py.

MPI lacks float16 and bfloat16: they are sent as two bytes and reduced by operations defined here,
as is what MPI libraries reduce otherwise than torch.
What one MPI call cannot count is moved in pieces; all ranks decide so alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from mpi4py import MPI
from torch import Tensor

from torchrelay.errors import ArgumentError, UnavailableError
from torchrelay.mpi import _wait
from torchrelay.mpi._dtypes import DTYPES, EXTREMA, KERNELS, Op, check_op
from torchrelay.mpi._headers import Headers
from torchrelay.mpi._memory import Blocks, pieces
from torchrelay.mpi._settings import settings
from torchrelay.mpi._transport import CONTROL_TAG, Part, Requests, Testable

__all__ = ["End", "MpiTransport"]

PIECE_TAG = 2  # on the communicator of control messages; in a backward pass the next
CONTROL_BYTES = 1024
Buffer: TypeAlias = tuple[MPI.buffer, int, MPI.Datatype]

HALVES = (torch.float16, torch.bfloat16)
_two_bytes = MPI.BYTE.Create_contiguous(2).Commit()


def _mpi_type(dtype: torch.dtype) -> MPI.Datatype:
    if dtype in HALVES:
        return _two_bytes
    # bool as bytes of 0 and 1, for which MPI has all reductions
    kind = torch.uint8 if dtype is torch.bool else dtype
    like = torch.empty(0, dtype=kind, device="cpu").numpy()
    return MPI.Datatype.fromcode(like.dtype.str[1:])


_TYPES = {dtype: _mpi_type(dtype) for dtype in DTYPES}
_ops: dict[tuple[torch.dtype, Op], MPI.Op] = {}
_posting: list[tuple[MPI.Request, object]] = []  # control messages in transit


def _buffer(tensor: Tensor) -> Buffer:
    """Return the memory of a contiguous CPU tensor, which the caller keeps alive."""
    memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    return (memory, tensor.numel(), _TYPES[tensor.dtype])


def _argument(part: Part) -> tuple[object, ...] | None:
    """Return what is sent or received as an argument of a v-collective of mpi4py."""
    if not isinstance(part, Blocks):
        return None if part is None else _buffer(part)
    memory, _, kind = _buffer(part.memory)
    return (memory, part.layout.counts, part.layout.starts, kind)


def _given(root: int | None) -> tuple[int, ...]:
    return () if root is None else (root,)


def _own_op(dtype: torch.dtype, op: Op) -> MPI.Op:
    kernel = KERNELS[op]

    def reduce(incoming: Any, result: Any, _datatype: MPI.Datatype) -> None:
        if not len(incoming):  # a rank's part of a Reduce_scatter may be empty
            return
        theirs, ours = (torch.frombuffer(each, dtype=dtype) for each in (incoming, result))
        kernel(theirs, ours, out=ours)

    # Products of three complex numbers that are not finite depend on their order.
    return MPI.Op.Create(reduce, commute=not dtype.is_complex)


def _needs_own_op(dtype: torch.dtype, op: Op) -> bool:
    if dtype.is_floating_point:
        return dtype in HALVES or op in EXTREMA  # others may lose a NaN
    if dtype.is_complex:
        return op is Op.PROD  # C makes an infinity of some NaNs
    return op is Op.SUM and dtype.itemsize <= 2 and dtype is not torch.bool  # may not wrap around


def _op(dtype: torch.dtype, op: Op) -> MPI.Op:
    """Return the MPI operation for ``op`` on ``dtype``; raise ArgumentError if it is undefined."""
    found = _ops.get((dtype, op))
    if found is None:
        check_op(dtype, op)
        if _needs_own_op(dtype, op):
            found = _own_op(dtype, op)
        else:
            is_any = dtype is torch.bool and op is Op.SUM
            found = getattr(MPI, (Op.LOR if is_any else op).value)
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

    job = _wait.process
    max_tag: int = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # type: ignore[assignment]

    def __init__(self, mpi: MPI.Comm) -> None:
        if not isinstance(mpi, MPI.Intracomm):
            raise ArgumentError(f"{mpi!r} is not an intra-communicator")
        self.mpi = mpi
        self.rank, self.size = mpi.rank, mpi.size
        self.is_alone = mpi.size == MPI.COMM_WORLD.size == 1
        self.idle_headers: list[Headers] = []
        self._descending: MPI.Intracomm | None = None
        self._pieces: tuple[MPI.Comm, int] = (mpi, PIECE_TAG)

    def takes(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def row_exchange(self, sent: Tensor, received: Tensor) -> Callable[[bool], Testable]:
        row, rows = _buffer(sent), (_buffer(received)[0], sent.numel(), MPI.BYTE)
        return lambda _: self.mpi.Iallgather(row, rows)

    # Collectives

    def _run(
        self, name: str, may_block: bool, *calls: tuple[object, ...], mpi: MPI.Comm | None = None
    ) -> Requests:
        """Call MPI's function ``name``, or its non-blocking form, for each tuple of arguments."""
        function = getattr(mpi or self.mpi, name if may_block else f"I{name.lower()}")
        requests = [function(*arguments) for arguments in calls]
        return [] if may_block else requests

    def reduce(
        self, source: Tensor, result: Tensor, op: Op, root: int | None, may_block: bool
    ) -> Requests:
        kind, gets, in_place = _op(source.dtype, op), root in (None, self.rank), source is result
        calls = (
            (
                MPI.IN_PLACE if in_place and gets else _buffer(ours),
                _buffer(total) if gets else None,
                kind,
                *_given(root),
            )
            for ours, total in pieces(source, result)
        )
        return self._run("Allreduce" if root is None else "Reduce", may_block, *calls)

    def scan(
        self, source: Tensor, result: Tensor, op: Op, exclusive: bool, descending: bool
    ) -> Requests:
        kind, name = _op(source.dtype, op), "Exscan" if exclusive else "Scan"
        calls = ((_buffer(ours), _buffer(total), kind) for ours, total in pieces(source, result))
        return self._run(name, True, *calls, mpi=self._reversed() if descending else None)

    def _reversed(self) -> MPI.Intracomm:
        """Return the ranks in reverse order; all ranks have arrived in the scan that needs it."""
        if self._descending is None:
            self._descending = self.mpi.Split(0, -self.rank)  # type: ignore[assignment]
        assert self._descending is not None
        return self._descending

    def reduce_scatter(self, blocks: Blocks, result: Tensor, op: Op, may_block: bool) -> Requests:
        arguments = (_buffer(blocks.memory), _buffer(result), blocks.layout.counts)
        return self._run("Reduce_scatter", may_block, (*arguments, _op(result.dtype, op)))

    def broadcast(self, memory: Tensor, root: int) -> Requests:
        return self._run("Bcast", True, *((_buffer(piece), root) for (piece,) in pieces(memory)))

    def move(
        self, name: str, sent: Part, received: Part, root: int | None, total: int, may_block: bool
    ) -> Requests:
        if total > settings.max_count:
            return self._move_pieces(self._blocks(sent, root), self._blocks(received, root))
        return self._run(name, may_block, (_argument(sent), _argument(received), *_given(root)))

    def _blocks(self, part: Part, root: int | None) -> list[Tensor | None]:
        """Return the block that is for each rank, or of it."""
        if isinstance(part, Blocks):
            return [*part.tensors()]
        return [part if root in (None, rank) else None for rank in range(self.size)]

    def _move_pieces(
        self, sent: Iterable[Tensor | None], received: Iterable[Tensor | None]
    ) -> Requests:
        """Send ``sent[r]`` to rank r and receive ``received[r]`` from it, in pieces."""
        requests: list[Testable] = []
        mpi, tag = self._pieces
        for blocks, start in ((received, mpi.Irecv), (sent, mpi.Isend)):
            for rank, tensor in enumerate(blocks):
                if tensor is not None and tensor.numel():
                    requests += [start(_buffer(part), rank, tag) for (part,) in pieces(tensor)]
        return requests

    # Messages

    def cut(self, memory: Tensor) -> Sequence[Tensor]:
        return [piece for (piece,) in pieces(memory)]

    def isend(self, memory: Tensor, dest: int, tag: int) -> MPI.Request:
        return self.mpi.Isend(_buffer(memory), dest, tag)

    def irecv(self, memory: Tensor, source: int, tag: int) -> _Message:
        return _Message(self.mpi.Irecv(_buffer(memory), source, tag), memory, source, tag)

    def post(self, dest: int, text: bytes) -> None:
        message = bytearray(text[:CONTROL_BYTES])
        request = self.mpi.Isend([message, len(message), MPI.BYTE], dest, CONTROL_TAG)
        _posting[:] = [each for each in _posting if not each[0].Test()]
        _posting.append((request, message))

    def posted(self) -> list[tuple[int, bytes]]:
        messages, status = [], MPI.Status()
        while (message := self.mpi.Improbe(MPI.ANY_SOURCE, CONTROL_TAG, status)) is not None:
            text = bytearray(CONTROL_BYTES)
            message.Recv([text, CONTROL_BYTES, MPI.BYTE], status)
            messages.append((status.Get_source(), bytes(text[: status.Get_count(MPI.BYTE)])))
        return messages

    # Communicators

    def duplicate(self, for_messages: bool = False) -> MpiTransport:
        try:
            copy = MpiTransport(self.mpi.Dup())
        except MPI.Exception as error:
            raise UnavailableError(
                f"MPI makes no further communicator ({error.Get_error_string()}); Free those that "
                "are not needed any more"
            ) from error
        if for_messages:
            self._pieces = (copy.mpi, PIECE_TAG)
        else:
            copy._pieces = (self._pieces[0], PIECE_TAG + 1)
        return copy

    def split(self, color: int, members: list[int]) -> MpiTransport | None:
        mpi = self.mpi.Split(color, members.index(self.rank))
        return None if mpi == MPI.COMM_NULL else MpiTransport(mpi)

    def free(self) -> None:
        for mpi in (self._descending, self.mpi):
            if mpi is not None:
                mpi.Free()


class End:
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


_wait.process.end = End()

"""Point-to-point messages: sending, receiving, and errors if both sides do not match."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchrelay.errors import MismatchError
from torchrelay.mpi import _check
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._dtypes import buffer, datatype
from torchrelay.mpi._library import MPI
from torchrelay.mpi._memory import pieces
from torchrelay.mpi._receipts import numbers
from torchrelay.mpi._settings import settings
from torchrelay.mpi._wait import Waiting, abandon, failed, finish

__all__ = ["Incoming", "Receiving", "finish_all", "start_send"]


def start_send(
    call: Waiting, memory: Tensor, dest: int, tag: int
) -> Sequence[tuple[MPI.Request, Tensor]]:
    """Start to send contiguous memory of this host, which must not change until done."""
    if settings.debug:
        _check.announce(call, memory, dest, tag)
    mpi = call.comm.mpi
    return [(mpi.Isend(buffer(part), dest, tag), part) for (part,) in pieces(memory)]


def finish_all(started: Sequence[tuple[MPI.Request, Tensor]], call: Waiting) -> None:
    for request, _ in started:
        finish(request, call, started)


class Incoming:
    """Request of a message into ``memory``. ``Test`` raises if the message is shorter."""

    __slots__ = ("call", "memory", "request", "status")

    def __init__(self, request: MPI.Request, memory: Tensor, call: Waiting) -> None:
        self.request = request
        self.memory = memory
        self.call = call
        self.status = MPI.Status()

    def Test(self) -> bool:
        if not self.request.Test(self.status):
            return False
        source = self.status.Get_source()
        wanted, kind = self.memory.numel(), datatype(self.memory.dtype)
        if source != MPI.PROC_NULL and self.status.Get_count(kind) != wanted:
            call, got_bytes = self.call, self.status.Get_count(MPI.BYTE)
            raise failed(
                MismatchError(
                    f"rank {call.comm.rank}: {call.describe()} on {call.comm.name} got {got_bytes} "
                    f"bytes from rank {source}, and expected {self.memory.nbytes}: {wanted} "
                    f"elements of {self.memory.dtype}"
                )
            )
        return True


class Receiving:
    """A message in transit into ``memory``; ``source`` and ``tag`` may be wildcards."""

    __slots__ = ("header", "is_done", "memory", "number", "requests", "source", "tag")

    def __init__(
        self, comm: Comm, memory: Tensor, source: int, tag: int, request: MPI.Request | None = None
    ) -> None:
        """Start to receive, or use ``request``, which does."""
        self.is_done = False
        self.requests: list[MPI.Request] = []
        self.memory = memory
        self.number = next(numbers)
        self.source = source
        self.tag = tag
        self.header = _check.expect(comm, source, tag) if settings.debug else None
        (part,) = pieces(memory)[0]
        self.requests = [request or comm.mpi.Irecv(buffer(part), source, tag)]
        if source != MPI.ANY_SOURCE and tag != MPI.ANY_TAG:
            self._start_others(comm)

    def _start_others(self, comm: Comm) -> None:
        """Start to receive a long message's other pieces from the source of the first."""
        for (part,) in pieces(self.memory)[len(self.requests) :]:
            self.requests.append(comm.mpi.Irecv(buffer(part), self.source, self.tag))

    def finish(self, call: Waiting) -> None:
        """Wait until the message has arrived.

        Raises:
            MismatchError: its length, or in debug mode its shape or dtype, differs from the memory.
        """
        if self.header is not None:
            self.header.compare(call, self.memory)
        first = self._finish_part(call, 0)
        if self.source == MPI.PROC_NULL:
            self.is_done = True
            return
        self.source, self.tag = first.Get_source(), first.Get_tag()
        if settings.debug and self.header is None:
            header = _check.expect(call.comm, self.source, self.tag)
            if header is not None:
                header.compare(call, self.memory)
        self._start_others(call.comm)
        for index in range(1, len(self.requests)):
            self._finish_part(call, index)
        self.is_done = True

    def __del__(self) -> None:
        if not self.is_done:  # it was never waited for, or it failed
            abandon((self.requests, self.memory))

    def _finish_part(self, call: Waiting, index: int) -> MPI.Status:
        (part,) = pieces(self.memory)[index]
        incoming = Incoming(self.requests[index], part, call)
        finish(incoming, call)
        return incoming.status

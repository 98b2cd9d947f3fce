"""One message between two ranks: how it is sent, how it is received, and who is told if the two do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from torchrelay.mpi import _check
from torchrelay.mpi._dtypes import buffer
from torchrelay.mpi._exchange import pieces
from torchrelay.mpi._library import MPI
from torchrelay.mpi._receipts import numbers
from torchrelay.mpi._settings import settings
from torchrelay.mpi._wait import Waiting, finish

if TYPE_CHECKING:
    from torchrelay.mpi.communicator import Communicator

__all__ = ["Receiving", "finish_all", "start_send"]


def start_send(call: Waiting, memory: Tensor, dest: int, tag: int) -> Sequence[tuple[MPI.Request, Tensor]]:
    """Starts to send contiguous memory of this host, which the caller leaves as it is until all is sent."""
    if settings.debug:
        _check.announce(call, memory, dest, tag)
    mpi = call.comm.mpi
    return [(mpi.Isend(buffer(part), dest, tag), part) for (part,) in pieces(memory)]


def finish_all(started: Sequence[tuple[MPI.Request, Tensor]], call: Waiting) -> None:
    for request, _ in started:
        finish(request, call)


class Receiving:
    """A message under way into ``memory``; ``source`` and ``tag`` may be wildcards, until :meth:`finish` knows them."""

    __slots__ = ("header", "memory", "number", "requests", "source", "tag")

    def __init__(
        self, comm: Communicator, memory: Tensor, source: int, tag: int, request: MPI.Request | None = None
    ) -> None:
        """Starts to receive, or joins ``request``, which does."""
        self.memory = memory
        self.number = next(numbers)
        self.source = source
        self.tag = tag
        self.header = _check.expect(comm, source, tag) if settings.debug else None
        (part,) = pieces(memory)[0]
        self.requests = [request or comm.mpi.Irecv(buffer(part), source, tag)]
        if source != MPI.ANY_SOURCE and tag != MPI.ANY_TAG:
            self._start_others(comm)

    def _start_others(self, comm: Communicator) -> None:
        """A long message's other pieces; they come from where its first came from."""
        for (part,) in pieces(self.memory)[len(self.requests) :]:
            self.requests.append(comm.mpi.Irecv(buffer(part), self.source, self.tag))

    def finish(self, call: Waiting) -> None:
        """Returns when the message is there."""
        if self.header is not None:
            self.header.compare(call, self.memory)
        status = MPI.Status()
        finish(_WithStatus(self.requests[0], status), call)
        self.source, self.tag = status.Get_source(), status.Get_tag()
        if settings.debug and self.header is None:
            header = _check.expect(call.comm, self.source, self.tag)
            if header is not None:
                header.compare(call, self.memory)
        self._start_others(call.comm)
        for request in self.requests[1:]:
            finish(request, call)


class _WithStatus:
    """A request whose tests also fill a status."""

    __slots__ = ("request", "status")

    def __init__(self, request: MPI.Request, status: MPI.Status) -> None:
        self.request = request
        self.status = status

    def Test(self) -> bool:
        return self.request.Test(self.status)

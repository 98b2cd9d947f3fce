"""Point-to-point messages: sending, receiving, and errors if both sides do not match."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from torchrelay.errors import MismatchError
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._dtypes import buffer, datatype
from torchrelay.mpi._library import MPI
from torchrelay.mpi._memory import pieces
from torchrelay.mpi._receipts import numbers
from torchrelay.mpi._settings import settings
from torchrelay.mpi._wait import Waiting, abandon, failed, finish

__all__ = ["Incoming", "Receiving", "finish_all", "start_send"]

ANNOUNCEMENT_BYTES = 256
ANNOUNCEMENTS = 16  # on the control communicator: the first of the tags for announcements
MOST_TAGS = 1 << 13  # MPI promises 32767; messages whose tags are that far apart share one

_announcements: list[tuple[MPI.Request, object]] = []  # in progress


def start_send(
    call: Waiting, memory: Tensor, dest: int, tag: int
) -> Sequence[tuple[MPI.Request, Tensor]]:
    """Start to send contiguous memory of this host, which must not change until done."""
    if settings.debug:
        announce(call, memory, dest, tag)
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

    def __init__(self, comm: Comm, memory: Tensor, source: int, tag: int) -> None:
        self.is_done = False
        self.requests: list[MPI.Request] = []
        self.memory = memory
        self.number = next(numbers)
        self.source = source
        self.tag = tag
        self.header = expect(comm, source, tag) if settings.debug else None
        (part,) = pieces(memory)[0]
        self.requests = [comm.mpi.Irecv(buffer(part), source, tag)]
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
            header = expect(call.comm, self.source, self.tag)
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


# In debug mode, each message is announced to its receiver, which compares shape and dtype.


def announce(call: Waiting, memory: Tensor, dest: int, tag: int) -> None:
    """Send ``dest`` a description of the message that ``call`` will send."""
    if dest == MPI.PROC_NULL:
        return
    record = _encoded(f"{_contents(memory)} in {call.describe()}")
    request = call.comm.lease.control.Isend([record, MPI.BYTE], dest, _announcement(call.comm, tag))
    _announcements[:] = [each for each in _announcements if not each[0].Test()]
    _announcements.append((request, record))


def expect(comm: Comm, source: int, tag: int) -> Announced | None:
    """Return the announcement of the next message of ``source`` with ``tag``.

    None if the source or tag is not known yet, or none is announced.
    """
    if source in (MPI.ANY_SOURCE, MPI.PROC_NULL) or tag == MPI.ANY_TAG:
        return None
    return Announced(comm, source, tag)


class Announced:
    """An announcement in transit."""

    __slots__ = ("record", "request", "source")

    def __init__(self, comm: Comm, source: int, tag: int) -> None:
        self.record = np.zeros(ANNOUNCEMENT_BYTES, np.uint8)
        self.source = source
        self.request = comm.lease.control.Irecv(
            [self.record, MPI.BYTE], source, _announcement(comm, tag)
        )

    def compare(self, call: Waiting, memory: Tensor) -> None:
        """Wait for the announcement.

        Raises:
            MismatchError: it has another shape or dtype than ``memory``; on the sender, too.
        """
        finish(self.request, call)
        contents, theirs = (
            _contents(memory),
            bytes(self.record).rstrip(b"\0").decode(errors="replace"),
        )
        if theirs.startswith(f"{contents} in "):
            return
        raise failed(
            MismatchError(
                f"rank {call.comm.rank} of {call.comm.name} receives {contents} in "
                f"{call.describe()}, and rank {self.source} sends it {theirs}"
            )
        )


def _contents(memory: Tensor) -> str:
    return f"{memory.dtype} {tuple(memory.shape)}"


def _announcement(comm: Comm, tag: int) -> int:
    return ANNOUNCEMENTS + 2 * (tag % MOST_TAGS) + comm.is_reverse


def _encoded(text: str) -> np.ndarray:
    record = np.zeros(ANNOUNCEMENT_BYTES, np.uint8)
    encoded = text.encode()[:ANNOUNCEMENT_BYTES]
    record[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    return record

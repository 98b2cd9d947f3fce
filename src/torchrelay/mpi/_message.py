"""Point-to-point messages: sending, receiving, and errors if both sides do not match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from torchrelay.errors import MismatchError
from torchrelay.mpi._chain import Answer
from torchrelay.mpi._dtypes import check_dtype
from torchrelay.mpi._memory import fresh, pieces
from torchrelay.mpi._settings import settings
from torchrelay.mpi._transport import ANY_SOURCE, ANY_TAG, PROC_NULL, Message, Testable
from torchrelay.mpi._wait import Waiting, abandon, failed, finish

if TYPE_CHECKING:
    from torchrelay.mpi._comm import Comm

__all__ = ["Receiving", "Sending", "finish_all", "memory_for", "start_send"]

ANNOUNCEMENT_BYTES = 256
ANNOUNCEMENTS = 16  # on the control communicator: the first of the tags for announcements
MOST_TAGS = 1 << 13  # MPI promises 32767; messages whose tags are that far apart share one


Sending: TypeAlias = Sequence[tuple[Testable, Tensor]]
"""The pieces of a message in transit, with their requests."""


def start_send(call: Waiting, memory: Tensor, dest: int, tag: int) -> Sending:
    """Start to send contiguous memory of this host, which must not change until done."""
    if settings.debug:
        announce(call, memory, dest, tag)
    transport = call.comm.transport
    return [
        (transport.isend(part, dest, tag), part)
        for (part,) in pieces(memory, most_bytes=transport.most_bytes)
    ]


def finish_all(started: Sending, call: Waiting) -> None:
    for request, _ in started:
        finish(request, call, started)


def memory_for(shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
    """Allocate memory for a message of ``source``; zeros, if nobody sends it."""
    return torch.zeros(shape, dtype=dtype) if source == PROC_NULL else fresh(shape, dtype)


class Receiving:
    """A message in transit into ``memory``; ``source`` and ``tag`` may be wildcards."""

    __slots__ = ("header", "is_done", "memory", "number", "requests", "source", "tag")

    def __init__(self, comm: Comm, memory: Tensor, source: int, tag: int) -> None:
        self.is_done = False
        self.requests: list[Message] = []
        self.memory = memory
        self.number = next(Answer.numbers)
        self.source = source
        self.tag = tag
        self.header = expect(comm, source, tag) if settings.debug else None
        check_dtype(memory.dtype)
        (part,) = self._pieces(comm)[0]
        self.requests = [comm.transport.irecv(part, source, tag)]
        if source != ANY_SOURCE and tag != ANY_TAG:
            self._start_others(comm)

    def _start_others(self, comm: Comm) -> None:
        """Start to receive a long message's other pieces from the source of the first."""
        for (part,) in self._pieces(comm)[len(self.requests) :]:
            self.requests.append(comm.transport.irecv(part, self.source, self.tag))

    def _pieces(self, comm: Comm) -> Sequence[tuple[Tensor, ...]]:
        return pieces(self.memory, most_bytes=comm.transport.most_bytes)

    def finish(self, call: Waiting) -> None:
        """Wait until the message has arrived.

        Raises:
            MismatchError: its length, or in debug mode its shape or dtype, differs from the memory.
        """
        if self.header is not None:
            self.header.compare(call, self.memory)
        first = self._finish_part(call, 0)
        if self.source == PROC_NULL:
            self.is_done = True
            return
        self.source, self.tag = first.source, first.tag
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

    def _finish_part(self, call: Waiting, index: int) -> Message:
        (part,) = self._pieces(call.comm)[index]
        message = self.requests[index]
        finish(message, call, part)
        if message.source != PROC_NULL and message.size_bytes != part.nbytes:
            raise failed(
                MismatchError(
                    f"rank {call.comm.rank}: {call.describe()} on {call.comm.name} got "
                    f"{message.size_bytes} bytes from rank {message.source}, and expected "
                    f"{part.nbytes}: {part.numel()} elements of {part.dtype}"
                )
            )
        return message


# In debug mode, each message is announced to its receiver, which compares shape and dtype.


def announce(call: Waiting, memory: Tensor, dest: int, tag: int) -> None:
    """Send ``dest`` a description of the message that ``call`` will send."""
    if dest == PROC_NULL:
        return
    text = f"{_contents(memory)} in {call.describe()}".encode()[:ANNOUNCEMENT_BYTES]
    padded = text.ljust(ANNOUNCEMENT_BYTES, b"\0")
    call.comm.lease.control.post(dest, _announcement(call.comm, tag), padded)


def expect(comm: Comm, source: int, tag: int) -> Announced | None:
    """Return the announcement of the next message of ``source`` with ``tag``.

    None if the source or tag is not known yet, or none is announced.
    """
    if source in (ANY_SOURCE, PROC_NULL) or tag == ANY_TAG:
        return None
    return Announced(comm, source, tag)


class Announced:
    """An announcement in transit."""

    __slots__ = ("record", "request", "source")

    def __init__(self, comm: Comm, source: int, tag: int) -> None:
        self.record = torch.zeros(ANNOUNCEMENT_BYTES, dtype=torch.uint8)
        self.source = source
        self.request = comm.lease.control.irecv(self.record, source, _announcement(comm, tag))

    def compare(self, call: Waiting, memory: Tensor) -> None:
        """Wait for the announcement.

        Raises:
            MismatchError: it has another shape or dtype than ``memory``; on the sender, too.
        """
        finish(self.request, call)
        contents, theirs = (
            _contents(memory),
            self.record.numpy().tobytes().rstrip(b"\0").decode(errors="replace"),
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

"""Debug mode: the ranks compare their calls before each collective.

Point-to-point messages are announced to their receiver, which compares shape and dtype.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from torchrelay.errors import MismatchError
from torchrelay.mpi._comm import Comm
from torchrelay.mpi._library import MPI
from torchrelay.mpi._wait import Comparable, Waiting, failed, finish

__all__ = [
    "Announced",
    "Comparison",
    "Counts",
    "announce",
    "compare",
    "compare_texts",
    "exchange_counts",
    "expect",
]

RECORD_BYTES = 256
ANNOUNCEMENTS = (
    16  # on the control communicator: the first of the tags for announcements of messages
)
MOST_TAGS = 1 << 13  # MPI promises 32767; messages whose tags are that far apart share one

_announcements: list[tuple[MPI.Request, object]] = []  # in progress


def compare(call: Comparable, x: Tensor) -> None:
    """Compare function, arguments, shape, dtype and grad mode. Collective over ``call.comm``.

    Raises:
        MismatchError: two ranks differ; on every rank.
    """
    if not call.everyone or call.comm.size == 1:
        return
    recorded = torch.is_grad_enabled() and call.differentiable(x)
    compare_texts(
        call, f"{call.signature(x)}, {'recorded' if recorded else 'not recorded'} by autograd"
    )


def compare_texts(call: Waiting, text: str) -> None:
    """Compare texts. Collective over ``call.comm``.

    Raises:
        MismatchError: two ranks differ; on every rank.
    """
    comparison = Comparison(call, text)
    finish(comparison.request, call, comparison)
    error = comparison.error()
    if error is not None:
        raise error


class Comparison:
    """A started comparison of all ranks' texts. ``Test`` raises if they differ."""

    __slots__ = ("call", "record", "records", "request")

    def __init__(self, call: Waiting, text: str) -> None:
        self.call = call
        self.record = _record(text)
        self.records = np.zeros((call.comm.size, RECORD_BYTES), np.uint8)
        self.request = call.comm.meeting.Iallgather(
            [self.record, MPI.BYTE], [self.records, MPI.BYTE]
        )

    def Test(self) -> bool:
        if not self.request.Test():
            return False
        error = self.error()
        if error is not None:
            raise failed(error)
        return True

    def error(self) -> MismatchError | None:
        """Return what to raise once all texts have arrived."""
        if (self.records == self.records[0]).all():
            return None
        texts, comm = [_text(row) for row in self.records], self.call.comm
        groups = {
            text: [rank for rank, other in enumerate(texts) if other == text] for text in texts
        }
        who = "; ".join(f"ranks {ranks} call {text}" for text, ranks in groups.items())
        return MismatchError(
            f"rank {comm.rank}: the ranks of {comm.name} make different calls: {who}"
        )


class Counts:
    """A started exchange of what each rank sends to each. ``Test`` raises if it does not fit."""

    __slots__ = ("call", "expected", "received", "request", "sent")

    def __init__(self, call: Waiting, sent: Sequence[int], expected: Sequence[int]) -> None:
        """Bytes that this rank sends to each, and expects from each."""
        self.call = call
        self.expected = np.array(expected, np.int64)
        self.sent, self.received, self.request = _exchanged(call, sent)

    def Test(self) -> bool:
        if not self.request.Test():
            return False
        wrong = np.flatnonzero(self.received != self.expected)
        if len(wrong):
            comm, rank = self.call.comm, int(wrong[0])
            raise failed(
                MismatchError(
                    f"rank {comm.rank}: {self.call.describe()} in two steps on {comm.name} expects "
                    f"{self.expected[rank]} bytes from rank {rank}, which sends "
                    f"{self.received[rank]}"
                )
            )
        return True


def exchange_counts(call: Waiting, sent: Sequence[int]) -> list[int]:
    """Return what each rank sends to this one. Collective and blocking."""
    memory, received, request = _exchanged(call, sent)
    finish(request, call, memory)
    return received.tolist()  # type: ignore[no-any-return]


def _exchanged(call: Waiting, sent: Sequence[int]) -> tuple[np.ndarray, np.ndarray, MPI.Request]:
    """What is sent and, once the request is done, received."""
    mine, received = np.array(sent, np.int64), np.zeros(len(sent), np.int64)
    request = call.comm.meeting.Ialltoall((mine, 1, MPI.INT64_T), (received, 1, MPI.INT64_T))
    return mine, received, request


def announce(call: Waiting, memory: Tensor, dest: int, tag: int) -> None:
    """Send ``dest`` a description of the message that ``call`` will send."""
    if dest == MPI.PROC_NULL:
        return
    record = _record(f"{_contents(memory)} in {call.describe()}")
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
        self.record = np.zeros(RECORD_BYTES, np.uint8)
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
        contents, theirs = _contents(memory), _text(self.record)
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


def _record(text: str) -> np.ndarray:
    record = np.zeros(RECORD_BYTES, np.uint8)
    encoded = text.encode()
    if len(encoded) > RECORD_BYTES:
        mark = hashlib.blake2b(encoded, digest_size=8).hexdigest()
        encoded = encoded[: RECORD_BYTES - len(mark) - 4] + f"... {mark}".encode()
    record[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    return record


def _text(record: np.ndarray) -> str:
    return bytes(record).rstrip(b"\0").decode(errors="replace")

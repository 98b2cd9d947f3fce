"""The header that all ranks exchange with every collective, before any data moves.

It holds a digest of all that must be equal (function, arguments, dtype, shape), and a payload: the
numbers that the other ranks need, such as lengths, or the values of a small reduction. It has one
size whatever is called, so ranks that call different functions exchange it too, and every rank
finds the difference. Only then do ranks send each other descriptions of their calls, for the error.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchrelay import _native
from torchrelay._waiting import listed
from torchrelay.errors import MismatchError
from torchrelay.mpi import _wait
from torchrelay.mpi._settings import settings
from torchrelay.mpi._transport import Transport

if TYPE_CHECKING:
    from torchrelay.mpi._comm import Comm
    from torchrelay.mpi._record import Call

__all__ = [
    "MAX_NUMBERS",
    "CallSignature",
    "Comparison",
    "Headers",
    "described",
    "exchange_numbers",
    "exchange_values",
    "on_device",
    "payload_bytes",
]

MAX_NUMBERS = 31
NUMBERS_BYTES = 8 * MAX_NUMBERS
LARGE_PAYLOAD_BYTES = 1 << 10  # among few ranks; all ranks receive the headers of all
FEW_RANKS = 8
STARTED = 1  # bit of a digest: the data follows without waiting for the headers

CallSignature = tuple[Any, ...]
"""What must be equal on all ranks: the arguments of :func:`described`."""


def payload_bytes(size: int) -> int:
    """Return how long the payload of a header among ``size`` ranks is."""
    return LARGE_PAYLOAD_BYTES if size <= FEW_RANKS else NUMBERS_BYTES


class Headers:
    """Memory for the headers of one collective, and how to exchange them."""

    __slots__ = ("rows", "start")

    def __init__(self, transport: Transport) -> None:
        self.rows = rows = _native.CallRows(transport.size, payload_bytes(transport.size))
        self.start = transport.row_exchange(
            _memory_at(rows.sent, rows.row_bytes),
            _memory_at(rows.received, rows.row_bytes * transport.size),
        )

    def exchange(self, call: _wait.Waiting, fields: CallSignature) -> None:
        """Send this rank's header and wait for those of the others.

        Raises:
            MismatchError: their digests differ; on all ranks.
        """
        call.comm.lease.comparisons += 1
        _wait.finish(self.start(True), call, self)
        if self.rows.first_difference() >= 0:
            raise self.mismatch(call, fields)

    def mismatch(self, call: _wait.Waiting, fields: CallSignature) -> MismatchError:
        """Exchange descriptions and return the error that contains them.

        If the data of a started collective is in transit, communication ends.
        """
        comm = call.comm
        texts = self._texts_of_started()
        is_fatal = bool(texts)
        _exchange_texts(comm, texts, described(*fields))
        groups: dict[str, list[int]] = {}
        for rank in range(comm.size):
            groups.setdefault(texts.get(rank, "something else"), []).append(rank)
        calls = "; ".join(
            f"{listed('rank', ranks)} call{'s' * (len(ranks) == 1)} {text}"
            for text, ranks in groups.items()
        )
        error = MismatchError(
            f"rank {comm.rank}: the ranks of {comm.name} make different calls: {calls}"
        )
        if is_fatal:
            comm.job.failed(error)
        return error

    def _texts_of_started(self) -> dict[int, str]:
        """Return the descriptions that the headers of started collectives contain."""
        rows = np.array(self.rows.numbers(MAX_NUMBERS), np.int64)
        return {
            rank: bytes(row).rstrip(b"\0").decode(errors="replace")
            for rank, row in enumerate(rows)
            if self.rows.digest(rank) & STARTED
        }


def idle_headers(comm: Comm) -> Headers:
    """Take headers that no exchange uses. Append them again once their rows have been read."""
    idle = comm.transport.idle_headers
    return idle.pop() if idle else Headers(comm.transport)


def _memory_at(address: int, size_bytes: int) -> Tensor:
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


@functools.lru_cache(maxsize=4096)
def digest(*fields: Any) -> int:
    """Return a hash of ``fields`` that is the same in every process."""
    hashed = hashlib.blake2b(described(*fields).encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little") & ~STARTED


@functools.lru_cache(maxsize=4096)
def description_numbers(*fields: Any) -> list[int]:
    """Return the description of a call as the numbers of a header, cut to their size."""
    text = described(*fields).encode()[:NUMBERS_BYTES].ljust(NUMBERS_BYTES, b"\0")
    numbers: list[int] = np.frombuffer(text, np.int64).tolist()
    return numbers


def described(
    name: str,
    arguments: str = "",
    dtype: torch.dtype | None = None,
    shape: Sequence[object] | None = None,
    recorded: bool | None = None,
) -> str:
    """Describe a call, alike in every process."""
    text = f"{name}({arguments})"
    if dtype is not None and shape is not None:
        text += f" of {dtype} ({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
    if recorded is None:
        return text
    why_not = "" if recorded else " (of integers, or under no_grad)"
    return f"{text}, {'' if recorded else 'not '}recorded by autograd{why_not}"


def on_device(fields: CallSignature, device: torch.device) -> CallSignature:
    """Return the ``fields`` of a call on a device that has a backend of its own."""
    name, arguments, *others = fields
    return (name, f"{arguments}, on {device.type}", *others)


def exchange_numbers(
    call: _wait.Waiting, fields: CallSignature, numbers: Sequence[int] = ()
) -> Sequence[Sequence[int]]:
    """Return the numbers of all ranks. Collective; blocks until all ranks have arrived.

    Raises:
        MismatchError: the ranks make different calls; on all ranks.
    """
    comm = call.comm
    if comm.size == 1:
        return [numbers]
    headers = idle_headers(comm)
    headers.rows.write_numbers(digest(*fields), numbers)
    headers.exchange(call, fields)
    received = headers.rows.numbers(len(numbers))
    comm.transport.idle_headers.append(headers)
    return received


def exchange_values(
    call: Call, x: Tensor, result: Tensor, dtype: _native.Dtype, op: _native.Op
) -> None:
    """Reduce contiguous ``x``, which fits into a payload, into ``result``, in the order of ranks.

    Collective; blocks until all ranks have arrived.

    Raises:
        MismatchError: the ranks make different calls; on all ranks.
    """
    comm, fields = call.comm, call.fields(x)
    headers = idle_headers(comm)
    headers.rows.write_bytes(digest(*fields), x.data_ptr(), x.nbytes)
    headers.exchange(call, fields)
    headers.rows.reduce(dtype, op, result.data_ptr(), x.numel())
    comm.transport.idle_headers.append(headers)


class Comparison:
    """The headers of a started collective. ``Test`` raises if they differ."""

    __slots__ = ("call", "fields", "headers", "request")

    def __init__(self, call: _wait.Waiting, fields: CallSignature) -> None:
        call.comm.lease.comparisons += 1
        self.call = call
        self.fields = fields
        self.headers: Headers | None = idle_headers(call.comm)
        # The data meets soon, and MPICH aborts if it does not match: describe the call here, so
        # that the error needs no further message.
        self.headers.rows.write_numbers(digest(*fields) | STARTED, description_numbers(*fields))
        self.request = self.headers.start(False)

    def Test(self) -> bool:
        if not self.request.Test():
            return False
        if self.headers is not None:
            if self.headers.rows.first_difference() >= 0:
                raise self.headers.mismatch(self.call, self.fields)
            self.call.comm.transport.idle_headers.append(self.headers)
            self.headers = None
        return True


def _exchange_texts(comm: Comm, texts: dict[int, str], text: str) -> None:
    """Add to ``texts``, those of started collectives, what arrives within a grace period."""
    lease = comm.lease
    if comm.rank not in texts:
        texts[comm.rank] = text
        for rank in range(comm.size):
            if rank != comm.rank:
                _wait.send(lease, rank, _wait.CALL, text)
    until = time.monotonic() + _wait.CALLS_GRACES * settings.grace_s
    while len(texts) < comm.size and time.monotonic() < until:
        comm.job.listen()
        texts.update(lease.calls)
        lease.calls.clear()
        time.sleep(0)

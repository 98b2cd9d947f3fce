"""Gradients of rows, summed over the processes of a table: each key's by one process, its owner.

A process sends each row of its own gradient to one process, so what it sends does not grow with
the number of processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from torchrelay._native import Communicator, HostCommunicator
from torchrelay.errors import MismatchError, OperationTimeoutError, PeerLostError
from torchrelay.world import Ranks

__all__ = ["GradientExchange", "sum_by_key"]


_ROWS = 0  # the type of messages, which is the same in all calls


class _Call(IntEnum):
    """What a process does in an exchange; the values are those of messages."""

    SUM = 1
    SIZES = 2
    GATHER = 3
    BARRIER = 4


_CALLS = {
    _Call.SUM: "a backward pass",
    _Call.SIZES: "a backward pass",
    _Call.GATHER: "an access to weight.grad or weight.keys",
    _Call.BARRIER: "a step",
}


def sum_by_key(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct ``keys``, ascending, and the sum of each one's rows of ``values``.

    Rows ``(n, dim)`` are added in their order.
    """
    unique, inverse = torch.unique(keys, return_inverse=True)
    return unique, values.new_zeros(len(unique), values.shape[1]).index_add_(0, inverse, values)


class GradientExchange:
    """Sums sparse gradients over ``ranks``. All methods are collective, and block.

    All methods raise:
        OperationTimeoutError: processes did not make the call in time; ``ranks`` names them.
        PeerLostError: a process has exited.
        MismatchError: processes make different calls.

    Args:
        group: of the same ranks.
        on_loss: called with the ranks that have exited, before PeerLostError is raised.

    Attributes:
        sent_bytes: what this process has sent to others.
    """

    def __init__(
        self,
        ranks: Ranks,
        group: Communicator | HostCommunicator,
        timeout_s: float,
        on_loss: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> None:
        self._ranks, self._group, self._timeout_s = ranks, group, timeout_s
        self._on_loss = on_loss
        self.sent_bytes = 0

    def sum(self, keys: Tensor, values: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys that this process owns, ascending, and the sums of all processes' rows.

        They are added in the order of ranks, so the sums are the same in each run.

        Args:
            keys: distinct, ``(n,)`` int64.
            values: ``(n, dim)``.
            owners: the rank that owns each key, ``(n,)``.
        """
        order = owners.argsort(stable=True)
        keys, values = keys.cpu()[order], values.cpu()[order]
        counts = torch.bincount(owners, minlength=self._ranks.size)
        received = self._headers(_Call.SUM, counts)[:, 1]
        return sum_by_key(*self._exchange((keys, values), counts.tolist(), received.tolist()))

    def sizes(self, count: int, is_finite: bool) -> tuple[list[int], bool]:
        """Return the ``count`` of each process, and whether all are finite."""
        mine = torch.tensor([count, int(is_finite)]).expand(self._ranks.size, 2)
        headers = self._headers(_Call.SIZES, mine)
        return headers[:, 1].tolist(), bool(headers[:, 2].all())

    def gather(self, keys: Tensor, values: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
        """Return the rows of all processes, in the order of their keys, ``(n,)`` and ``(n, dim)``.

        Args:
            keys: of this process's rows; no other has them.
            sizes: the number of rows of each process.
        """
        size = self._ranks.size
        self._headers(_Call.GATHER, torch.zeros(size, dtype=torch.int64))
        repeated = keys.repeat(size), values.repeat(size, 1)
        keys, values = self._exchange(repeated, [len(keys)] * size, sizes)
        order = keys.argsort()
        return keys[order], values[order]

    def barrier(self) -> None:
        """Wait for all processes."""
        self._headers(_Call.BARRIER, torch.zeros(self._ranks.size, dtype=torch.int64))

    def _headers(self, call: _Call, mine: Tensor) -> Tensor:
        """Send row ``i`` of ``mine`` to rank ``i``; return those received, after their call."""
        size = self._ranks.size
        mine = torch.cat([torch.full((size, 1), int(call)), mine.reshape(size, -1)], dim=1)
        width = max(3, mine.shape[1])  # the same in all calls, so that different ones are noticed
        mine = torch.nn.functional.pad(mine, (0, width - mine.shape[1]))
        (received,) = self._exchange((mine,), [1] * size, [1] * size)
        other = (received[:, 0] != int(call)).nonzero().flatten().tolist()
        if other:
            there = _CALLS[_Call(int(received[other[0], 0]))]
            raise MismatchError(
                f"{self._ranks.name} is in {_CALLS[call]}, and rank "
                f"{self._ranks.names[other[0]]} in {there}: all processes of a table must run the "
                "same backward passes and steps, and look at weight.grad and weight.keys together"
            )
        return received

    def _exchange(
        self, rows: tuple[Tensor, ...], sent: list[int], received: list[int]
    ) -> list[Tensor]:
        """Send ``sent[i]`` rows to rank ``i``, in order; return the rows received, in order."""
        rows = tuple(part.contiguous() for part in rows)
        outs = [part.new_empty(sum(received), *part.shape[1:]) for part in rows]
        try:
            for out, part in zip(outs, rows, strict=True):
                self._group.all_to_all(
                    _blocks(part, sent),
                    _blocks(out, received),
                    _ROWS,
                    self._timeout_s,
                    True,
                )
        except (OperationTimeoutError, PeerLostError) as error:
            if isinstance(error, PeerLostError):
                self._on_loss([self._ranks.names.index(name) for name in error.ranks])
            cause = str(error).partition("; ")[0]
            raise type(error)(
                f"{cause}, in the sum of row gradients; every process must run the same "
                "backward passes with a lookup in the table. The timeout is "
                "TORCHRELAY_PARAMETERS_TIMEOUT_S",
                ranks=error.ranks,
            ) from error
        others = sum(sent) - sent[self._ranks.rank]
        self.sent_bytes += others * sum(part[:1].nbytes for part in rows)
        return outs


def _blocks(rows: Tensor, counts: list[int]) -> list[tuple[int, int]]:
    """Return address and size of consecutive blocks of so many ``rows``, which are contiguous."""
    ends = itertools.accumulate(counts, initial=0)
    row_bytes = rows[:1].nbytes
    return [
        (rows.data_ptr() + start * row_bytes, count * row_bytes)
        for start, count in zip(ends, counts, strict=False)
    ]

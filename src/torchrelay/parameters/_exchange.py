"""Gradients of rows, summed over the processes of a table: each key's by one process, its owner.

A process sends each row of its own gradient to one process, so what it sends does not grow with
the number of processes.
"""

from __future__ import annotations

import time
from enum import IntEnum

import torch
from torch import Tensor

from torchrelay import _torch
from torchrelay._waiting import listed
from torchrelay.errors import MismatchError, OperationTimeoutError, PeerLostError
from torchrelay.world import Ranks

__all__ = ["GradientExchange", "sum_by_key"]

# After a failed exchange, each process announces that it failed; after this time, processes that
# have not are reported.
_ANNOUNCEMENTS_S = 1.0


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
    """Sums sparse gradients over ``ranks``. Creation and all methods are collective, and block.

    All methods raise:
        OperationTimeoutError: processes did not make the call in time; ``ranks`` names them.
        PeerLostError: a process has exited.
        MismatchError: processes make different calls.

    Args:
        interface: the address at which other processes reach this one.

    Attributes:
        sent_bytes: what this process has sent to others.
    """

    def __init__(self, ranks: Ranks, timeout_s: float, interface: str = "127.0.0.1") -> None:
        self._ranks, self._timeout_s, self._interface = ranks, timeout_s, interface
        self._calls = 0
        self.sent_bytes = 0
        try:
            self._group = _torch.gloo_group(
                ranks.store, ranks.rank, ranks.size, timeout_s, interface
            )
        except RuntimeError as error:
            raise self._failure(error, time.monotonic()) from error

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
        self._calls += 1
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
        started_s = time.monotonic()
        outs = [part.new_empty(sum(received), *part.shape[1:]) for part in rows]
        try:
            works = [
                self._group.alltoall_base(out, part.contiguous(), received, sent)
                for out, part in zip(outs, rows, strict=True)
            ]
            for work in works:
                work.wait()
        except RuntimeError as error:  # what Gloo raises
            raise self._failure(error, started_s) from error
        others = sum(sent) - sent[self._ranks.rank]
        self.sent_bytes += others * sum(part[:1].nbytes for part in rows)
        return outs

    def _failure(self, error: RuntimeError, started_s: float) -> Exception:
        """Return the error to raise; it names the processes that did not fail in this call."""
        name, elapsed_s = self._ranks.name, time.monotonic() - started_s
        step = f"gradients/{self._calls}"
        try:
            self._ranks.announce(step)
            time.sleep(_ANNOUNCEMENTS_S)
            missing = [self._ranks.names[rank] for rank in self._ranks.missing(step)]
        except (RuntimeError, PeerLostError):
            return PeerLostError(
                f"{name}: the store where processes meet is gone after {elapsed_s:.1f} s in the "
                f"exchange of row gradients; has its process exited? ({error})"
            )
        if not missing:
            return PeerLostError(
                f"{name}: exchange {self._calls} of row gradients, which all ranks have joined, "
                f"failed after {elapsed_s:.1f} s ({error}); is a process exiting, or does a "
                f"firewall keep other hosts from {self._interface}, where this process listens "
                "(TORCHRELAY_TRANSPORT_INTERFACE)?"
            )
        kind = OperationTimeoutError if elapsed_s >= self._timeout_s else PeerLostError
        return kind(
            f"{name}: {listed('rank', missing)} did not join exchange {self._calls} of row "
            f"gradients within {elapsed_s:.1f} s; every process must run the same backward passes "
            f"with a lookup in the table ({error})",
            ranks=missing,
        )

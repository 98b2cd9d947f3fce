"""Gradients of rows, summed over the processes of a table: each key's by one process, its owner.

A process sends each row of its own gradient to one process, so what it sends does not grow with
the number of processes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import NoReturn

import torch
from torch import Tensor

from torchrelay._group import Collective, Group, Kind
from torchrelay.errors import (
    ArgumentError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    SegmentError,
)
from torchrelay.parameters._arrays import sum_rows
from torchrelay.world import Ranks

__all__ = ["GradientExchange", "sum_by_key"]


# What a process does in an exchange, as messages and errors name it.
_SUM, _SIZES, _GATHER, _STEP, _BARRIER = range(5)
_CALLS = (
    "a backward pass",
    "a backward pass",
    "an access to weight.grad or weight.keys",
    "a step",
    "a step",
)


def sum_by_key(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct ``keys``, ascending, and the sum of each one's rows of ``values``.

    Rows ``(n, dim)`` are added in their order.
    """
    unique, inverse = torch.unique(keys, return_inverse=True)
    return unique, sum_rows(inverse, values, len(unique))


class GradientExchange:
    """Sums sparse gradients over ``ranks``. All methods are collective, and block.

    All methods raise:
        OperationTimeoutError: processes did not make the call in time; ``ranks`` names them.
        PeerLostError: a process has exited.
        MismatchError: processes make different calls.

    Args:
        open_group: opens the group of the same ranks at the first call; collective.
        on_loss: called with the ranks that have exited, before PeerLostError is raised.

    Attributes:
        sent_bytes: what this process has sent to others.
    """

    def __init__(
        self,
        ranks: Ranks,
        open_group: Callable[[], Group],
        timeout_s: float,
        on_loss: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> None:
        self._ranks, self._open_group, self._timeout_s = ranks, open_group, timeout_s
        self._on_loss = on_loss
        self.sent_bytes = 0

    @cached_property
    def _group(self) -> Group:
        try:
            return self._open_group()
        except SegmentError as error:
            raise PeerLostError(
                f"{self._ranks.name}: a process has given up waiting for this one, or has ended, "
                f"or this one lacks what it needs: {error}"
            ) from error
        except (OperationTimeoutError, PeerLostError) as error:
            self._open_group = partial(_fail_again, error)  # its group cannot be opened twice
            raise

    def sum(self, keys: Tensor, values: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys that this process owns, ascending, and the sums of all processes' rows.

        They are added in the order of ranks, so the sums are the same in each run.

        Args:
            keys: distinct, ``(n,)`` int64.
            values: ``(n, dim)``.
            owners: the rank that owns each key, ``(n,)``.
        """
        order = owners.argsort(stable=True)
        rows = _packed(keys.cpu(), values.cpu(), order)
        counts = torch.bincount(owners, minlength=self._ranks.size).tolist()
        me = self._ranks.rank
        received = [theirs[me] for theirs in self._headers(_SUM, counts)]
        return sum_by_key(*_unpacked(self._exchange(rows, counts, received)))

    def sizes(self, count: int, is_finite: bool) -> tuple[list[int], bool]:
        """Return the ``count`` of each process, and whether all are finite."""
        headers = self._headers(_SIZES, [count, int(is_finite)])
        return [row[0] for row in headers], all(row[1] for row in headers)

    def gather(self, keys: Tensor, values: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
        """Return the rows of all processes, in the order of their keys, ``(n,)`` and ``(n, dim)``.

        Args:
            keys: of this process's rows; no other has them.
            sizes: the number of rows of each process.
        """
        self._headers(_GATHER)
        rows = _packed(keys, values, torch.arange(len(keys), device="cpu"))
        keys, values = _unpacked(self._all_gather(rows, sizes))
        order = keys.argsort()
        return keys[order], values[order]

    def begin_step(self, problem: ArgumentError | None, lr: float, has_gradient: bool) -> None:
        """Compare the steps of all processes, before any applies its gradients.

        Raises:
            ArgumentError: ``problem``, the reason why this process cannot step.
            MismatchError: another cannot, or steps at another rate or without a gradient.
        """
        mine = [
            int(problem is not None),
            *struct.unpack("q", struct.pack("d", lr)),
            int(has_gradient),
        ]
        headers = self._headers(_STEP, mine)
        if problem is not None:
            raise problem
        for name, theirs in zip(self._ranks.names, headers, strict=True):
            if theirs[: len(mine)] != mine:
                raise MismatchError(
                    f"{self._ranks.name} {_described(mine)}, and rank {name} {_described(theirs)}: "
                    "all processes of a table must make the same steps; nothing was applied"
                )

    def barrier(self) -> None:
        """Wait for all processes."""
        self._headers(_BARRIER)

    def _headers(self, call: int, numbers: Sequence[int] = ()) -> list[list[int]]:
        """Return the numbers of all ranks: up to three, or one for each rank; all ranks make
        ``call``.
        """
        size = self._ranks.size
        width = 1 + max(3, size)  # in all calls, so that different calls are noticed
        mine = torch.tensor([[call, *numbers] + [0] * (width - 1 - len(numbers))], device="cpu")
        received = self._all_gather(mine, [1] * size).tolist()
        other = [rank for rank, row in enumerate(received) if row[0] != call]
        if other:
            there = _CALLS[received[other[0]][0]]
            raise MismatchError(
                f"{self._ranks.name} is in {_CALLS[call]}, and rank "
                f"{self._ranks.names[other[0]]} in {there}: all processes of a table must run the "
                "same backward passes and steps, and look at weight.grad and weight.keys together"
            )
        return [row[1:] for row in received]

    def _all_gather(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Return the rows of all ranks, in order; rank ``i`` has ``counts[i]``."""
        out = rows.new_empty(sum(counts), rows.shape[1])
        self._run(Collective(Kind.all_gather, [rows], torch.split(out, counts)))
        self.sent_bytes += (self._ranks.size - 1) * rows.nbytes
        return out

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send ``sent[i]`` rows to rank ``i``, in order; return the rows received, in order."""
        out = rows.new_empty(sum(received), rows.shape[1])
        self._run(Collective(Kind.all_to_all, torch.split(rows, sent), torch.split(out, received)))
        self.sent_bytes += (sum(sent) - sent[self._ranks.rank]) * rows[:1].nbytes
        return out

    def _run(self, call: Collective) -> None:
        try:
            self._group.run([call], self._timeout_s, True)
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


def _fail_again(error: Exception) -> NoReturn:
    raise error


def _described(step: Sequence[int]) -> str:
    is_refused, bits, has_gradient, *_ = step
    if is_refused:
        return "cannot step, as its own error says"
    (lr,) = struct.unpack("d", struct.pack("q", bits))
    return f"steps {'with' if has_gradient else 'without'} a gradient at lr = {lr}"


def _packed(keys: Tensor, values: Tensor, order: Tensor) -> Tensor:
    """Return the rows of ``order``, ``(n, key and values)`` in the dtype of ``values``."""
    width = keys.itemsize // values.itemsize
    rows = values.new_empty(len(order), width + values.shape[1])
    rows[:, :width] = keys[order].view(values.dtype).view(len(order), width)
    rows[:, width:] = values[order]
    return rows


def _unpacked(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of packed rows."""
    width = torch.int64.itemsize // rows.itemsize
    return rows[:, :width].reshape(-1).view(torch.int64), rows[:, width:]

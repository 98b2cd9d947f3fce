"""Gradients of rows, summed over the processes of a table."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchrelay import _torch
from torchrelay._waiting import listed
from torchrelay.errors import OperationTimeoutError, PeerLostError
from torchrelay.parameters._weight import sum_by_key

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["GradientExchange"]

# After a failed exchange, each process writes a mark to the store; after this time, processes whose
# marks are missing are reported.
_MARKS_S = 1.0


class GradientExchange:
    """The sum of sparse gradients over ``size`` processes, which meet at ``store``; each call is
    collective.

    The sum is the same on every process, bit for bit. Creation is collective and blocks until all
    processes have joined. Each process sends its own gradient, padded to the longest, to every
    other.

    Args:
        interface: the address at which other processes reach this one.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout_s: float, interface: str = "127.0.0.1"
    ) -> None:
        self._store, self._rank, self._size, self._timeout_s = store, rank, size, timeout_s
        self._interface = interface
        self._calls = 0
        try:
            self._group = _torch.gloo_group(store, rank, size, timeout_s, interface)
        except RuntimeError as error:
            raise self._missing(error, time.monotonic()) from error

    def __call__(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The distinct keys of all processes, ascending, and their summed values ``(n, dim)``.

        Raises:
            OperationTimeoutError: processes did not call it in time; ``ranks`` names them.
            PeerLostError: a process has exited.
        """
        started_s = time.monotonic()
        self._calls += 1
        try:
            counts = self._gather(torch.tensor([len(keys)])).reshape(-1).tolist()
            longest = max(counts)
            all_keys = self._gather(_padded(keys.cpu(), longest))
            all_values = self._gather(_padded(values.cpu(), longest))
        except RuntimeError as error:  # what gloo raises
            raise self._missing(error, started_s) from error
        keys = torch.cat([part[:n] for part, n in zip(all_keys, counts, strict=True)])
        total = torch.cat([part[:n] for part, n in zip(all_values, counts, strict=True)])
        keys, total = sum_by_key(keys, total)
        return keys, total.to(values.device)

    def _gather(self, mine: Tensor) -> Tensor:
        out = [torch.empty_like(mine) for _ in range(self._size)]
        self._group.allgather([out], [mine]).wait()
        return torch.stack(out)

    def _missing(self, error: RuntimeError, started_s: float) -> Exception:
        """The error to raise; it names the processes that have not come to this call either."""
        where = f"torchrelay/gradients/{self._calls}"
        elapsed_s = time.monotonic() - started_s
        try:
            self._store.set(f"{where}/{self._rank}", "waited")
            time.sleep(_MARKS_S)
            missing = [r for r in range(self._size) if not self._store.check([f"{where}/{r}"])]
        except RuntimeError:
            return PeerLostError(
                f"rank {self._rank}: the store where processes meet is gone after {elapsed_s:.1f} "
                f"s in the exchange of row gradients; has its process exited? ({error})"
            )
        if not missing:
            return PeerLostError(
                f"rank {self._rank}: exchange {self._calls} of row gradients, which all ranks "
                f"have joined, failed after {elapsed_s:.1f} s ({error}); is a process exiting, "
                f"or does a firewall keep other hosts from {self._interface}, where this process "
                "listens (TORCHRELAY_TRANSPORT_INTERFACE)?"
            )
        kind = OperationTimeoutError if elapsed_s >= self._timeout_s else PeerLostError
        return kind(
            f"rank {self._rank}: {listed('rank', missing)} did not join exchange {self._calls} of "
            f"row gradients within {elapsed_s:.1f} s; every process must run the same backward "
            f"passes with a lookup in the table ({error})",
            ranks=missing,
        )


def _padded(rows: Tensor, length: int) -> Tensor:
    if len(rows) == length:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])

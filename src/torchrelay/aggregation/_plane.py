"""The contract between the c10d face and what carries the bytes.

A plane moves contiguous CPU tensors between the ranks of one group. Calls of all ranks are matched
by their order. A plane never copies a tensor's metadata and never changes it: the caller keeps
every tensor alive, and leaves it alone, until the ticket is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torchrelay._native import Op

__all__ = ["ANY_RANK", "LinkStats", "Op", "Plane", "PlaneStats", "Ticket", "Transfer"]


ANY_RANK = -1  # receive from whoever sends first


@dataclass(frozen=True)
class LinkStats:
    """What one transport of a group has carried.

    Args:
        transport: ``shm`` within a host; between hosts ``tcp`` or ``switch``.
        reason: why this one was chosen.
        sent_bytes: by this rank.
        busy_s: seconds that this rank's collectives spent in it.
    """

    transport: str
    reason: str
    sent_bytes: int
    busy_s: float


@dataclass(frozen=True)
class PlaneStats:
    """What one group has done so far; ``links`` where it uses several transports."""

    plane: str
    jobs: int
    payload_bytes: int
    waiting_s: float
    links: tuple[LinkStats, ...] = ()


class Ticket(Protocol):
    """The fate of one operation."""

    @property
    def done(self) -> bool: ...
    def wait(self, timeout_s: float) -> bool:
        """False if it is still not done after ``timeout_s``; raises what the operation failed
        with.
        """

    def error(self) -> tuple[int, str, list[int]] | None: ...
    def when_done(self, function: Callable[[], None]) -> None:
        """Calls ``function`` at the end, in any thread; at once if it is done."""


class Transfer(Protocol):
    """A send or receive in progress."""

    @property
    def ticket(self) -> Ticket: ...
    @property
    def source(self) -> int:
        """The rank a message came from, once it is done."""


class Plane(Protocol):
    """Collectives and messages of one rank in one group.

    With ``block`` a collective returns None when it is done, or raises; else it returns at once,
    with a ticket. All raise MismatchError, OperationTimeoutError or PeerLostError; the last two
    break the group. Tensors are dense, contiguous and on the CPU, of a dtype of ``_dtypes.NATIVE``
    where they are reduced.
    """

    @property
    def name(self) -> str: ...

    def all_reduce(
        self, tensor: torch.Tensor, op: Op, timeout_s: float, block: bool
    ) -> Ticket | None:
        """Replaces ``tensor`` by the reduction, on every rank."""

    def reduce(
        self, tensor: torch.Tensor, op: Op, root: int, timeout_s: float, block: bool
    ) -> Ticket | None:
        """The same, but only on ``root``; the others' tensors stay as they are."""

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: Op,
        timeout_s: float,
        block: bool,
    ) -> Ticket | None:
        """Writes the reduction of all ranks' ``inputs[rank]`` to ``output``; all have its size."""

    def broadcast(
        self, tensor: torch.Tensor, root: int, timeout_s: float, block: bool
    ) -> Ticket | None: ...

    def all_gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, timeout_s: float, block: bool
    ) -> Ticket | None:
        """Writes rank i's tensor to ``outputs[i]``. Ranks may have different sizes."""

    def gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        root: int,
        timeout_s: float,
        block: bool,
    ) -> Ticket | None:
        """The same, on ``root`` only; the others' ``outputs`` are empty."""

    def scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        root: int,
        timeout_s: float,
        block: bool,
    ) -> Ticket | None:
        """Writes ``root``'s ``inputs[rank]`` to ``output``; the others' ``inputs`` are empty."""

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        timeout_s: float,
        block: bool,
    ) -> Ticket | None:
        """Writes rank i's ``inputs[rank]`` to ``outputs[i]``. Each pair of ranks may have its own
        size.
        """

    def barrier(self, timeout_s: float, block: bool) -> Ticket | None: ...

    def send(self, tensor: torch.Tensor, to: int, tag: int, timeout_s: float) -> Transfer:
        """Never blocks; messages of one pair of ranks and tag arrive in the order they were
        sent.
        """

    def receive(self, tensor: torch.Tensor, source: int, tag: int, timeout_s: float) -> Transfer:
        """Never blocks. ``source`` ANY_RANK takes the next message of ``tag`` from any rank."""

    def wait_transfer(self, transfer: Any, timeout_s: float) -> bool:
        """As :meth:`Ticket.wait`, for a transfer this plane made."""

    def stats(self) -> PlaneStats: ...

    def close(self) -> None:
        """Ends this rank's part: what is in progress fails, here and where others wait for it.
        Idempotent.
        """

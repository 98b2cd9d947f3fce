"""The contract of a data plane, which moves bytes for the c10d interface.

A data plane moves contiguous CPU tensors between the ranks of one group. Calls of all ranks are
matched by their order. A data plane never copies a tensor's metadata and never changes it: the
caller keeps every tensor alive, and leaves it alone, until the ticket is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from torchrelay._native import Op, Ticket, Transfer

__all__ = [
    "ANY_RANK",
    "LinkStats",
    "Op",
    "Operations",
    "Plane",
    "PlaneStats",
    "Tensors",
    "Ticket",
    "Transfer",
]

Tensors = Sequence[Tensor]
# Names of a data plane's collectives, each with its arguments but the timeout and ``block``.
Operations = Sequence[tuple[str, tuple[Any, ...]]]

ANY_RANK = -1  # receive from whoever sends first


@dataclass(frozen=True)
class LinkStats:
    """Statistics of one transport of a group.

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

    def __add__(self, other: LinkStats) -> LinkStats:
        sent_bytes, busy_s = self.sent_bytes + other.sent_bytes, self.busy_s + other.busy_s
        return LinkStats(self.transport, self.reason, sent_bytes, busy_s)


@dataclass(frozen=True)
class PlaneStats:
    """Statistics of one group; ``links`` if it uses several transports."""

    plane: str
    jobs: int
    payload_bytes: int
    waiting_s: float
    links: tuple[LinkStats, ...] = ()

    def __add__(self, other: PlaneStats) -> PlaneStats:
        links: dict[tuple[str, str], LinkStats] = {}
        for link in (*self.links, *other.links):
            key = link.transport, link.reason
            links[key] = links[key] + link if key in links else link
        return PlaneStats(
            self.plane,
            self.jobs + other.jobs,
            self.payload_bytes + other.payload_bytes,
            self.waiting_s + other.waiting_s,
            tuple(links.values()),
        )


class Plane(Protocol):
    """The data plane of one rank in one group: collectives and messages.

    With ``block`` a collective returns None when it is done, or raises. Otherwise it returns at
    once, with a ticket, or None if it is done; so do messages. All raise MismatchError,
    OperationTimeoutError or PeerLostError; the last two break the group. Tensors are dense,
    contiguous and on the CPU, of a dtype of ``_dtypes.NATIVE`` where they are reduced.
    """

    name: str

    def all_reduce(
        self, output: Tensor, source: Tensor, op: Op, timeout_s: float, block: bool
    ) -> Ticket | None:
        """Write the reduction of all ranks' ``source`` to every rank's ``output``, which may be
        ``source``.
        """

    def reduce(
        self, tensor: Tensor, op: Op, root: int, timeout_s: float, block: bool
    ) -> Ticket | None:
        """Replace ``tensor`` by the reduction on ``root`` only; other ranks' tensors do not
        change.
        """

    def reduce_scatter(
        self, output: Tensor, inputs: Tensors, op: Op, timeout_s: float, block: bool
    ) -> Ticket | None:
        """Write the reduction of all ranks' ``inputs[rank]`` to ``output``; all have its size."""

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float, block: bool) -> Ticket | None:
        """Replace ``tensor`` by that of ``root``."""

    def all_gather(
        self, outputs: Tensors, tensor: Tensor, timeout_s: float, block: bool
    ) -> Ticket | None:
        """Write rank i's tensor to ``outputs[i]``. Sizes may differ between ranks."""

    def gather(
        self, outputs: Tensors, tensor: Tensor, root: int, timeout_s: float, block: bool
    ) -> Ticket | None:
        """Write rank i's tensor to ``outputs[i]`` on ``root``; other ranks' ``outputs`` are
        empty.
        """

    def scatter(
        self, output: Tensor, inputs: Tensors, root: int, timeout_s: float, block: bool
    ) -> Ticket | None:
        """Write ``root``'s ``inputs[rank]`` to ``output``; other ranks' ``inputs`` are empty."""

    def all_to_all(
        self, outputs: Tensors, inputs: Tensors, timeout_s: float, block: bool
    ) -> Ticket | None:
        """Write rank i's ``inputs[rank]`` to ``outputs[i]``. Sizes may differ between pairs of
        ranks.
        """

    def barrier(self, timeout_s: float, block: bool) -> Ticket | None: ...

    def coalesced(
        self, operations: Operations, digest: int, timeout_s: float, block: bool
    ) -> Ticket | None:
        """Run collectives as one call, whose number and ``digest`` are equal on all ranks: nothing
        is written if they differ.
        """

    def send(self, tensor: Tensor, to: int, tag: int, timeout_s: float) -> Transfer | None:
        """Send without blocking; messages of a pair of ranks and tag arrive in order."""

    def receive(self, tensor: Tensor, source: int, tag: int, timeout_s: float) -> Transfer | None:
        """Receive without blocking; from any rank if ``source`` is ANY_RANK."""

    def wait_transfer(self, transfer: Transfer, timeout_s: float) -> bool:
        """Wait for a message; return False after ``timeout_s``. Raises its error."""

    def stats(self) -> PlaneStats: ...

    def close(self) -> None:
        """Leave the group: operations in progress fail, here and on ranks that wait for this one.
        Idempotent.
        """

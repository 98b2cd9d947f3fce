"""The contract of a data plane, which moves bytes for the c10d interface, and its statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from torch import Tensor

from torchrelay._group import Collective, Op, Ticket, Transfer
from torchrelay.errors import UnavailableError

__all__ = ["LinkStats", "NoPlane", "Plane", "PlaneStats", "Tensors"]

Tensors = Sequence[Tensor]


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
    """The data plane of one rank in one group. Its methods are those of ``_group.Group``, whose
    messages may also be done at once: then there is no Transfer.
    """

    def run(
        self, calls: Sequence[Collective], timeout_s: float, may_block: bool
    ) -> Ticket | None: ...

    def all_reduce(self, output: Tensor, source: Tensor, op: Op, timeout_s: float) -> None: ...

    def send(self, tensor: Tensor, to: int, tag: int, timeout_s: float) -> Transfer | None: ...

    def receive(
        self, tensor: Tensor, source: int, tag: int, timeout_s: float
    ) -> Transfer | None: ...

    def wait_transfer(self, transfer: Transfer, timeout_s: float) -> bool: ...

    def stats(self) -> PlaneStats: ...

    @property
    def failure(self) -> Exception | None: ...

    def close(self) -> None: ...


class NoPlane:
    """The data plane of a group that has no members, because of ``reason``."""

    failure = None

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def _refuse(self, *_: object) -> NoReturn:
        raise UnavailableError(
            f"sml: this group {self._reason}; call reconfigure with a fresh uuid"
        )

    run = all_reduce = send = receive = wait_transfer = _refuse

    def stats(self) -> PlaneStats:
        return PlaneStats("none", 0, 0, 0.0)

    def close(self) -> None:
        pass

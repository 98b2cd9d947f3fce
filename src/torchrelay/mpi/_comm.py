"""What other modules use of communicators, and their methods' modules inherit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torchrelay.mpi._transport import Transport

__all__ = ["CartComm", "Comm", "SharedState"]


class SharedState(Protocol):
    """State that a communicator and its copies share."""

    control: Transport
    ended: set[int]
    is_freed: bool
    rank: int
    size: int


class Comm(Protocol):
    """A communicator: its ranks, and the transport between them."""

    transport: Transport
    lease: SharedState
    rank: int
    size: int
    name: str
    convention: str
    unreachable_policy: str | None
    is_reverse: bool
    number: int

    @property
    def reverse(self) -> Comm: ...
    def replace(
        self, convention: str | None = None, unreachable_policy: str | None = None
    ) -> Comm: ...
    def check_rank(self, rank: int) -> int: ...
    def check_dest(self, rank: int, tag: int) -> tuple[int, int]: ...
    def check_source(self, rank: int, tag: int) -> tuple[int, int]: ...


class CartComm(Comm, Protocol):
    """A communicator whose ranks form a grid."""

    faces: Transport
    dims: Sequence[int]
    neighbors: Any

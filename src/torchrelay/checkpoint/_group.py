"""Communication between the ranks of a save or load: a process group, or a single process.

An error that one rank raises inside :meth:`Group.together` is raised on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from torchrelay.checkpoint._failures import describe, rebuild
from torchrelay.errors import ArgumentError, PeerLostError, TorchRelayError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Group", "group_of"]

T = TypeVar("T")
U = TypeVar("U")


class Group:
    """The ranks of a process group; without a group, this process only."""

    def __init__(self, group: ProcessGroup | None, ranks: tuple[int, ...], rank: int) -> None:
        self._group = group
        self.ranks = ranks  # global ranks, in the group's order
        self.rank = rank  # this process's place in it
        self.is_coordinator = rank == 0

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def global_rank(self) -> int:
        return self.ranks[self.rank]

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value, in the group's order. Blocks until all have called."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with self._lost_peers("gathering"):
            dist.all_gather_object(found, value, group=self._group)
        return found

    def together(self, local: Callable[[], T]) -> list[T]:
        """Call ``local`` on every rank; return all results on every rank.

        Raises:
            TorchRelayError: ``local`` raised on some rank; the first such error, on every rank.
        """
        outcomes: list[Any] = self.all_gather(self._outcome(local))
        for outcome in outcomes:
            _result(outcome)
        return outcomes

    def coordinate(self, local: Callable[[], T]) -> T:
        """Call ``local`` on the coordinator; return or raise its outcome on every rank."""
        result: T = _result(self._broadcast(self._outcome(local) if self.is_coordinator else None))
        return result

    def conclude(self, local: Callable[[], T], finish: Callable[[list[T]], U]) -> U:
        """Call ``local`` on every rank, and ``finish`` with all results on the coordinator.

        Only the coordinator receives the results; every rank gets what ``finish`` returns.

        Raises:
            TorchRelayError: ``local`` raised on some rank, or ``finish``; the first error, on every
                rank.
        """
        mine = self._outcome(local)
        outcomes = self._gather(mine)
        outcome: Any = None
        if self.is_coordinator:
            failed = (one for one in outcomes if isinstance(one, _Failure))
            outcome = next(failed, None) or self._outcome(lambda: finish(outcomes))
        outcome = self._broadcast(outcome)
        if (
            isinstance(outcome, _Failure)
            and outcome.rank == self.global_rank
            and isinstance(mine, _Failure)
        ):
            outcome = mine
        result: U = _result(outcome)
        return result

    def _outcome(self, local: Callable[[], T]) -> T | _Failure:
        try:
            return local()
        except Exception as error:
            return _Failure(error, self.global_rank)

    def _gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in the group's order; empty except on the coordinator."""
        if self.size == 1:
            return [value]
        found = [None] * self.size if self.is_coordinator else None
        with self._lost_peers("gathering"):
            dist.gather_object(value, found, dst=self.ranks[0], group=self._group)
        return found or []

    def _broadcast(self, value: Any) -> Any:
        """Return the coordinator's value."""
        if self.size == 1:
            return value
        found = [value]
        with self._lost_peers("waiting for the coordinator"):
            dist.broadcast_object_list(found, src=self.ranks[0], group=self._group)
        return found[0]

    @contextmanager
    def _lost_peers(self, what: str) -> Iterator[None]:
        try:
            yield
        except TorchRelayError:
            raise
        except (RuntimeError, dist.DistError) as error:
            raise PeerLostError(
                f"rank {self.global_rank}: another rank was lost while {what} for a checkpoint "
                f"({error}); earlier checkpoints are intact"
            ) from error


class _Failure:
    """An error in a form for other ranks; the rank that raised it raises the original."""

    def __init__(self, error: Exception, rank: int) -> None:
        self.rank = rank
        self._mine: Exception | None = error
        self._described = describe(error)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mine": None}

    @property
    def error(self) -> Exception:
        return self._mine or rebuild(self._described, self.rank)


def _result(outcome: T | _Failure) -> T:
    if isinstance(outcome, _Failure):
        raise outcome.error
    return outcome


def group_of(group: ProcessGroup | None, no_dist: bool = False) -> Group:
    """Return the participants: ``group``, else the default group, else this process.

    Raises:
        ArgumentError: both ``group`` and ``no_dist`` are given, or this process is not in
            ``group``.
    """
    if no_dist and group is not None:
        raise ArgumentError("no_dist=True is for this process alone: give it or group=, not both")
    if not dist.is_available() or not dist.is_initialized():
        return Group(None, (0,), 0)
    if no_dist:
        return Group(None, (dist.get_rank(),), 0)
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    if group == outside:
        raise ArgumentError(
            f"rank {dist.get_rank()} is not in group=; only ranks that are take part"
        )
    ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    return Group(group, ranks, ranks.index(dist.get_rank()))

"""How ranks of a save or load talk: a process group, or the null object of a process alone.

Errors travel: what one rank raises inside :meth:`Group.together` is raised on every rank.
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


class Group:
    """All ranks of a process group; alone without one."""

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
        """Every rank's value, in the group's order; blocks until all have called."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with self._lost_peers("gathering"):
            dist.all_gather_object(found, value, group=self._group)
        return found

    def together(self, local: Callable[[], T]) -> list[T]:
        """Calls ``local`` on every rank, and gives every rank all results.

        Raises:
            TorchRelayError: ``local`` raised on some rank; the first such error, on every rank.
        """
        return self._settle(self.all_gather(_outcome(local)))

    def coordinate(self, local: Callable[[], T]) -> T:
        """Calls ``local`` on the coordinator, and gives every rank its result, or its error."""
        outcome: list[Any] = [_outcome(local) if self.is_coordinator else None]
        if self.size > 1:
            with self._lost_peers("waiting for the coordinator"):
                dist.broadcast_object_list(outcome, src=self.ranks[0], group=self._group)
        result: T = self._settle(outcome, [self.ranks[0]])[0]
        return result

    def _settle(self, outcomes: list[Any], ranks: list[int] | None = None) -> list[Any]:
        for rank, outcome in zip(ranks or self.ranks, outcomes, strict=True):
            if isinstance(outcome, _Failure):
                raise outcome.error(rank)
        return outcomes

    @contextmanager
    def _lost_peers(self, what: str) -> Iterator[None]:
        try:
            yield
        except TorchRelayError:
            raise
        except (RuntimeError, dist.DistError) as error:
            raise PeerLostError(
                f"rank {self.global_rank}: another rank was lost while {what} for a checkpoint ({error}); what was "
                "committed before is unharmed"
            ) from error


class _Failure:
    """An error as it goes to other ranks; the rank that raised it raises the very same."""

    def __init__(self, error: Exception) -> None:
        self._mine: Exception | None = error
        self._described = describe(error)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mine": None}

    def error(self, rank: int) -> Exception:
        return self._mine or rebuild(self._described, rank)


def _outcome(local: Callable[[], T]) -> T | _Failure:
    try:
        return local()
    except Exception as error:
        return _Failure(error)


def group_of(group: ProcessGroup | None, no_dist: bool = False) -> Group:
    """The ranks that take part: those of ``group``, by default of the default group, alone without one.

    Raises:
        ArgumentError: both ``group`` and ``no_dist`` are given.
    """
    if no_dist and group is not None:
        raise ArgumentError("no_dist=True is for this process alone: give it or group=, not both")
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return Group(None, (0,), 0)
    ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    return Group(group, ranks, ranks.index(dist.get_rank()))

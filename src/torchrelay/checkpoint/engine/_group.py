"""Communication between the ranks of a save or load: a process group, or a single process. It is
the coordinator of a synchronous save.

An error that one rank raises inside :meth:`Group.together` is raised on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch.distributed as dist

from torchrelay.checkpoint.engine._engine import described
from torchrelay.errors import (
    ArgumentError,
    MismatchError,
    PeerLostError,
    TorchRelayError,
    from_json,
)
from torchrelay.world import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Group", "check_same", "group_of"]

T = TypeVar("T")
U = TypeVar("U")


class _Outcome(NamedTuple):
    """What a function returned on a rank, or the error that it raised, as JSON."""

    rank: int
    value: Any = None
    failure: dict[str, Any] | None = None


class Group:
    """The ranks of a process group; without a group, this process only."""

    def __init__(self, group: ProcessGroup | None, ranks: tuple[int, ...], rank: int) -> None:
        self._group = group
        self._error: Exception | None = None  # that this rank raised last
        self.ranks = ranks  # global ranks, in the group's order
        self.rank = rank  # this process's place in it
        self.is_coordinator = rank == 0

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def global_rank(self) -> int:
        return self.ranks[self.rank]

    def together(self, local: Callable[[], T]) -> list[T]:
        """Call ``local`` on every rank; return all results on every rank, in the group's order.

        Raises:
            TorchRelayError: ``local`` raised on some rank; the first such error, on every rank.
        """
        outcomes: list[Any] = [self._outcome(local)] * self.size
        if self.size > 1:
            with self._lost_peers("gathering"):
                dist.all_gather_object(outcomes, outcomes[self.rank], group=self._group)
        return [self._result(outcome, is_same=self.size > 1) for outcome in outcomes]

    def coordinate(self, local: Callable[[], T]) -> T:
        """Call ``local`` on the coordinator; return or raise its outcome on every rank."""
        return self.conclude(lambda: None, lambda _: local())

    def conclude(self, local: Callable[[], T], finish: Callable[[list[T]], U]) -> U:
        """Call ``local`` on every rank, and ``finish`` with all results on the coordinator.

        Only the coordinator receives the results; every rank gets what ``finish`` returns.

        Raises:
            TorchRelayError: ``local`` raised on some rank, or ``finish``; the first error, on every
                rank.
        """
        mine = self._outcome(local)
        outcomes: list[Any] = [mine] * self.size
        if self.size > 1:
            with self._lost_peers("gathering"):
                gathered = outcomes if self.is_coordinator else None
                dist.gather_object(mine, gathered, dst=self.ranks[0], group=self._group)
        found: list[Any] = [next((one for one in outcomes if one.failure is not None), None)]
        if self.is_coordinator and found == [None]:
            found = [self._outcome(lambda: finish([one.value for one in outcomes]))]
        if self.size > 1:
            with self._lost_peers("waiting for the coordinator"):
                dist.broadcast_object_list(found, src=self.ranks[0], group=self._group)
        result: U = self._result(found[0])
        return result

    def _outcome(self, local: Callable[[], Any]) -> _Outcome:
        self._error = None
        try:
            return _Outcome(self.global_rank, local())
        except Exception as error:
            self._error = error
            return _Outcome(self.global_rank, failure=described(error, self.global_rank))

    def _result(self, outcome: _Outcome, is_same: bool = False) -> Any:
        """Return the value, or raise the error; on the rank that raised it the original or, if the
        message ``is_same`` on all ranks and names that one, the cause.
        """
        if outcome.failure is None:
            return outcome.value
        original = self._error if outcome.rank == self.global_rank else None
        if original is not None and not is_same:
            raise original
        raise from_json(outcome.failure) from original

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


def group_of(group: ProcessGroup | None, no_dist: bool = False, *, for_save: bool = False) -> Group:
    """Return the participants: ``group``, else the default group, else this process.

    Raises:
        ArgumentError: both ``group`` and ``no_dist`` are given, or this process is not in
            ``group``; or, ``for_save``, a launcher has started several processes, which have no
            process group, so that each would replace what the others save.
    """
    if no_dist and group is not None:
        raise ArgumentError("no_dist=True is for this process alone: give it or group=, not both")
    if not dist.is_available() or not dist.is_initialized():
        world = World.from_environment() if for_save and not no_dist else World()
        if world.size > 1:
            raise ArgumentError(
                f"{world.launcher} has started {world.size} processes, but there is no process "
                "group, and each process would save alone: call "
                "torch.distributed.init_process_group() first, or pass no_dist=True if only "
                "one process saves, or each saves to a path of its own"
            )
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


def check_same(ranks: Sequence[int], opened: Sequence[tuple[str, str]]) -> None:
    """Compare the checkpoints that ranks have opened: their paths and fingerprints.

    Raises:
        MismatchError: they are not the same.
    """
    first = opened[0]
    for rank, other in zip(ranks, opened, strict=True):
        if other[1] != first[1]:
            raise MismatchError(
                f"the ranks read different checkpoints: rank {ranks[0]} has opened {first[0]} (id "
                f"{first[1][:16]}), rank {rank} {other[0]} (id {other[1][:16]}); all must read the "
                "same: let one rank choose, as load() does for the folder that holds the "
                "checkpoints"
            )

"""Ranks of a group that exchange small values through a store."""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from torchrelay._processes import remedy_of
from torchrelay._waiting import listed, nothing_to_check, wait_for_others
from torchrelay.errors import (
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    TorchRelayError,
    UnavailableError,
)

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["POLL_S", "Ranks", "are_there", "values_of"]

POLL_S = 0.01
_LONGEST_LEAVING_S = 5.0
_JOIN = "join the group"
_SAME_GROUPS = "are they running, and do they make the same groups in the same order?"


class Ranks:
    """The ranks of a group, which exchange small values through a store.

    A value belongs to a step, whose name is used once. All methods raise ``PeerLostError`` if the
    process that serves the store has exited.

    Args:
        store: used by the group's ranks only; None for a group of one.
        names: the ranks as users know them, for messages; default: the group's own ranks.

    Attributes:
        attempt: hexadecimal; equal on all ranks, and different for every other rendezvous.
        secret: of all ranks, who do not tell others; empty: they have none yet.
    """

    attempt, secret = "", b""
    news_s = 0.5  # for the cause of a rank that left while the group was made

    def __init__(
        self, store: Store | None = None, rank: int = 0, size: int = 1, names: Sequence[int] = ()
    ) -> None:
        self.store: Any = store
        self._whole: Any = store  # also of those among them
        self.rank = rank
        self.size = size
        self.names = list(names) or list(range(size))

    def gather(self, step: str, mine: Any, timeout_s: float, **waiting: Any) -> list[Any]:
        """Return what each rank passes for ``step``; anything that JSON can hold. Blocks.

        Args:
            waiting: ``call``, ``hint`` and ``check``, as for :meth:`wait`.

        Raises:
            OperationTimeoutError: ranks are missing after ``timeout_s``; ``ranks`` names them.
        """
        if self.size == 1:
            return [mine]
        self.announce(step, json.dumps(mine), **_news(waiting))
        return [json.loads(text) for text in self.wait(step, timeout_s, **waiting)]

    def agree(
        self, step: str, mine: Mapping[str, str], timeout_s: float, what: str, **waiting: Any
    ) -> None:
        """Compare the description ``mine`` of ``what`` the ranks make with that of each rank.

        Raises:
            MismatchError: one differs; on every rank.
            OperationTimeoutError: as :meth:`gather`.
        """
        for name, other in zip(
            self.names, self.gather(step, dict(mine), timeout_s, **waiting), strict=True
        ):
            different = [
                f"{field} is {value} here, {other.get(field)} there"
                for field, value in mine.items()
                if value != other.get(field)
            ]
            if different:
                self.leave(f"{step}/refused")
                raise MismatchError(
                    f"{self.name} and rank {name} made different {what}: {'; '.join(different)}"
                )

    def barrier(
        self, step: str, timeout_s: float, *, part: tuple[int, int] = (0, 1), **waiting: Any
    ) -> None:
        """Wait for all ranks. The name ``step`` can be used again.

        A process that replaces one of a rank takes part where that one would have.

        Args:
            part: the index of the calling thread among the threads of each rank that take part,
                and their number.
            waiting: ``call``, ``hint``, ``check`` and ``check_missing``, as for :meth:`wait`.

        Raises:
            OperationTimeoutError: as :meth:`gather`.
        """
        index, parts = part
        if self.size * parts == 1:
            return
        mine = self.rank * parts + index
        passed = f"{step}/passed/{mine}"
        news = _news(waiting)
        with self._store_errors(**news):
            number = self.store.add(passed, 0)
        self.announce(f"{step}/{number}", index=mine, **news)
        self.wait(f"{step}/{number}", timeout_s, parts=parts, **waiting)
        with self._store_errors(**news):
            self.store.add(passed, 1)
            if number:  # all have left the one before
                self.store.delete_key(f"{step}/{number - 1}/{mine}")

    def leave(self, step: str) -> None:
        """Leave for good. Rank 0, which may serve the store, waits some seconds for the others."""
        if self.size == 1:
            return
        with contextlib.suppress(RuntimeError):  # the store is gone: no rank waits any more
            left = self.store.add(step, 1)
            deadline_s = time.monotonic() + _LONGEST_LEAVING_S
            while self.rank == 0 and left < self.size and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
                left = self.store.add(step, 0)

    def announce(self, step: str, text: str = "", *, index: int | None = None, **news: Any) -> None:
        """Notify the others that this rank (or thread ``index``) has reached ``step``.

        Args:
            news: ``check`` and ``news_s``, as for :meth:`wait`.
        """
        if self.store is not None:
            with self._store_errors(**news):
                self.store.set(f"{step}/{self.rank if index is None else index}", text)

    def missing(self, step: str, indices: Iterable[int] | None = None) -> list[int]:
        """Return the ranks (or threads ``indices``) that have not announced ``step``."""
        awaited = range(self.size) if indices is None else indices
        return [index for index in awaited if not self.store.check([f"{step}/{index}"])]

    def wait(
        self,
        step: str,
        timeout_s: float,
        ranks: Sequence[int] | None = None,
        *,
        parts: int = 1,
        call: str = _JOIN,
        hint: str = _SAME_GROUPS,
        check: Callable[[], None] = nothing_to_check,
        check_missing: Callable[[Sequence[int]], None] = lambda _: None,
        news_s: float = 0.0,
    ) -> list[str]:
        """Wait until ``ranks`` (default: all) announced ``step``; return their texts.

        Args:
            parts: threads of each rank that announce it.
            call: what missing ranks did not do, for messages; ``hint``: what to look at.
            check: called often; raises if a rank was lost.
            check_missing: called rarely, with the missing ranks (or threads); may raise.
            news_s: if the store is lost, ``check`` may give the cause for so long.

        Raises:
            OperationTimeoutError: ranks are missing after ``timeout_s``; ``ranks`` names them.
        """
        awaited = range(self.size * parts) if ranks is None else ranks
        values = [f"{step}/{index}" for index in awaited]
        keys = list(values)
        missing = partial(self.missing, step, awaited)

        def absent() -> list[int]:
            late = missing()
            check_missing(late)
            return list(dict.fromkeys(self.names[index // parts] for index in late))

        def check_all() -> None:
            check()
            self._check_processes(missing)

        with self._store_errors(check, news_s):
            wait_for_others(
                lambda: are_there(self.store, keys),
                absent,
                partial(self._late, call=call, hint=hint),
                check_all,
                timeout_s,
                self._pause,
            )
            return [text.decode() for text in values_of(self.store, values)]

    def _pause(self, longest_s: float) -> None:
        """Wait before the next look at the store."""
        time.sleep(longest_s)

    def _check_processes(self, missing: Callable[[], Sequence[int]]) -> None:
        """Raise if one of the ranks ``missing`` can no longer come."""
        self._check_trouble()

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Notify the others of an error of this rank alone in this block, and raise theirs.

        Raises:
            UnavailableError: this rank or another one lacks what it needs.
        """
        try:
            yield
        except (MismatchError, OperationTimeoutError):  # which all ranks have
            raise
        except PeerLostError as error:
            if self.names[self.rank] in error.ranks:
                self.refuse(error)
            deadline_s = time.monotonic() + self.news_s
            with self._store_errors():
                while time.monotonic() < deadline_s:  # a rank that has left may have said why
                    self._check_trouble()
                    self._pause(POLL_S)
            raise
        except TorchRelayError as error:
            self.refuse(error)
            raise
        except Exception as error:
            remedy = f"; {remedy_of(error)}" if isinstance(error, OSError) else ""
            lacking = UnavailableError(f"making a group: {error or type(error).__name__}{remedy}")
            self.refuse(lacking)
            raise lacking from error

    def refuse(self, error: Exception) -> None:
        """Notify the others that this rank lacks what it needs: they need not wait for it."""
        if self.size > 1:
            with contextlib.suppress(RuntimeError):  # the store is gone, and they know
                self._set_trouble(f"{self.name} cannot be in the group: {error}")

    def _set_trouble(self, text: str) -> None:
        self._whole.set("trouble", text)

    def _check_trouble(self) -> None:
        """Raise if a rank cannot be in the group."""
        if self.size > 1 and self._whole.check(["trouble"]):
            raise UnavailableError(f"{self.name}: {self._whole.get('trouble').decode()}")

    def _late(
        self,
        names: Sequence[int],
        elapsed_s: float,
        call: str = _JOIN,
        hint: str = _SAME_GROUPS,
    ) -> str:
        return (
            f"{self.name}: {listed('rank', names)} did not {call} within {elapsed_s:.1f} s; {hint}"
        )

    @contextlib.contextmanager
    def _store_errors(
        self, check: Callable[[], None] = nothing_to_check, news_s: float = 0.0
    ) -> Iterator[None]:
        """Raise :class:`PeerLostError` if the store is lost; for ``news_s``, ``check`` may give the
        cause.
        """
        import torch.distributed as dist  # noqa: PLC0415 - as above

        try:
            yield
        except dist.DistNetworkError as error:
            deadline_s = time.monotonic() + news_s
            while time.monotonic() < deadline_s:
                check()
                time.sleep(POLL_S)
            raise PeerLostError(
                f"{self.name}: the store through which the ranks meet is gone: the process that "
                f"serves it, rank 0 or torchrun's agent, has exited ({error})",
                ranks=(0,),
            ) from error

    def among(self, ranks: Sequence[int]) -> Self:
        """Return the group of ``ranks``, for groups that have no rank in common. Does not block."""
        part = copy.copy(self)
        part.rank, part.size = ranks.index(self.rank), len(ranks)
        part.names = [self.names[rank] for rank in ranks]
        if self.store is not None:
            part.store = self._under(f"among/{ranks[0]}")
        return part

    def with_keys(self, prefix: str) -> Ranks:
        """Return the same ranks with keys of their own, which begin with ``prefix``."""
        store = None if self.store is None else self._under(prefix)
        return Ranks(store, self.rank, self.size, self.names)

    def _under(self, prefix: str) -> Any:
        """Return a store for a part of the ranks, whose keys begin with ``prefix``."""
        import torch.distributed as dist  # noqa: PLC0415 - as above

        return dist.PrefixStore(prefix, self.store)

    @property
    def name(self) -> str:
        """This rank, for messages."""
        return f"rank {self.names[self.rank]}"


def _news(waiting: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of the arguments of :meth:`Ranks.wait` tells the cause of a lost store."""
    return {name: waiting[name] for name in ("check", "news_s") if name in waiting}


def values_of(store: Any, keys: list[str]) -> list[bytes]:
    """Return the values of ``keys``, which exist, from a torch store."""
    return store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]


def are_there(store: Any, keys: list[str]) -> bool:
    """Return whether all ``keys`` are in the store, and remove those that have been seen from the
    list. Does not block, because threads of a process take turns with the store.
    """
    while keys:
        if not store.check(keys[-1:]):
            return False
        if store.check(keys):
            return True
        keys.pop()
    return True

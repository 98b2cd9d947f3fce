"""The Work objects that collectives return.

A failure must reach every kind of caller. ``wait()`` raises it; the future raises it too, from a
callback: a future that was given an exception directly crashes DDP and is ignored by functional
collectives.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from torchrelay._group import Ticket, Transfer
from torchrelay._torch import tensor_list_future
from torchrelay._waiting import FOREVER_S
from torchrelay.aggregation._plane import Plane
from torchrelay.errors import OperationTimeoutError

__all__ = ["DoneWork", "PendingWork", "PendingWorks", "TransferWork", "seconds"]

# A callback of a future may wait for a later collective (PowerSGD's do). It must block neither the
# thread that runs collectives nor the next completion, so each completion gets a thread; idle
# threads are reused, as a new one would take longer than a small sum.
_MAX_WAITING_CALLBACKS = 4096


def _new_completions() -> None:
    global _completions  # noqa: PLW0603 - threads do not survive a fork: a child gets its own
    _completions = ThreadPoolExecutor(_MAX_WAITING_CALLBACKS, "sml-completion")


_completions: ThreadPoolExecutor
_new_completions()
os.register_at_fork(after_in_child=_new_completions)


def _complete(source: torch.futures.Future[None]) -> None:
    try:
        _completions.submit(source.set_result, None)
    except RuntimeError:  # the interpreter is ending, and starts no more threads
        source.set_result(None)


def seconds(timeout: timedelta | None, default_s: float) -> float:
    """Return c10d's timeout in seconds; None and negative ones mean the default."""
    if timeout is None:
        return default_s
    # Not total_seconds(): in a finalizer, at the end of the process, it crashes Python 3.13.
    value_s = timeout.days * 86400 + timeout.seconds + timeout.microseconds / 1e6
    return value_s if value_s > 0 else default_s


class PendingWork(Work):
    """A collective in progress.

    Args:
        tickets: in the order they end.
        tensors: the outputs; the result of the future.
        finish: called once before the result is used: copies to outputs that were not contiguous.
            What it refers to stays alive until then.
    """

    def __init__(
        self,
        tickets: Sequence[Ticket],
        tensors: Sequence[torch.Tensor],
        finish: Callable[[], None] | None,
    ) -> None:
        super().__init__()
        self.tickets = tickets
        self._tensors = list(tensors)
        self._finish = finish
        self._finishing = threading.Lock()

    @property
    def in_progress(self) -> bool:
        return bool(self.tickets) and not self.tickets[-1].done

    def wait(self, timeout: timedelta | None = None) -> bool:
        timeout_s = seconds(timeout, FOREVER_S)
        for ticket in self.tickets:
            if not self._is_done_within(ticket, timeout_s):
                raise OperationTimeoutError(
                    f"wait(): the operation is not done after {timeout_s:g} s; it goes on, and "
                    "wait() can be called again"
                )
        self._finish_once()
        return True

    def _is_done_within(self, ticket: Ticket, timeout_s: float) -> bool:
        return ticket.wait(timeout_s)

    def _finish_once(self) -> None:
        with self._finishing:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()

    def is_completed(self) -> bool:
        return not self.in_progress

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the operation, or None. Does not wait."""
        if self.in_progress:
            return None
        try:
            for ticket in self.tickets:
                ticket.wait(0)
        except Exception as error:
            return error
        return None

    def synchronize(self) -> None:
        self.wait()

    def result(self, _: object = None) -> list[torch.Tensor]:
        self.wait()
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        source: torch.futures.Future[None] = torch.futures.Future()
        future: torch.futures.Future[Any] = source.then(self.result)
        if self._tensors and self._tensors[0].dtype is torch.float16:
            # DDP's built-in hook that compresses takes a list of tensors only.
            future = tensor_list_future(future, self._tensors)
        if self.in_progress:
            self.tickets[-1].when_done(lambda: _complete(source))
        else:
            source.set_result(None)
        return future


class DoneWork(PendingWork):
    """An operation that ended before its call returned."""

    def __init__(self, tensors: Sequence[torch.Tensor] = (), source: int = 0) -> None:
        super().__init__((), tensors, None)
        self._source = source

    def _source_rank(self) -> int:
        return self._source

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class TransferWork(PendingWork):
    """A send or receive in progress, driven by the thread that waits for it."""

    def __init__(
        self,
        plane: Plane,
        transfer: Transfer,
        tensors: Sequence[torch.Tensor],
        finish: Callable[[], None],
    ) -> None:
        super().__init__([transfer.ticket], tensors, finish)
        self._plane = plane
        self._transfer = transfer

    def _is_done_within(self, ticket: Ticket, timeout_s: float) -> bool:
        return self._plane.wait_transfer(self._transfer, timeout_s)

    def _source_rank(self) -> int:
        return self._transfer.source

    source_rank = _source_rank


class PendingWorks:
    """The operations of a group in progress: their tensors stay alive, also if the caller drops the
    Work.
    """

    def __init__(self) -> None:
        self._works: deque[PendingWork] = deque()
        self._coalescing: list[PendingWork] | None = None

    @property
    def is_coalescing(self) -> bool:
        return self._coalescing is not None

    def keep(self, work: PendingWork) -> PendingWork:
        works = self._works
        works.append(work)
        in_progress = 0
        # Each call adds one work and looks at two that go on, so one that stays hides no others.
        # Other threads may take works, and a destructor may call this. No work in progress is ever
        # outside of the queue, where Ctrl-C would end its memory.
        with suppress(IndexError, ValueError):
            while in_progress < 2:
                first = works[0]
                if first.in_progress:
                    works.rotate(-1)
                    in_progress += 1
                else:
                    works.remove(first)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def start_coalescing(self) -> None:
        self._coalescing = []

    def end_coalescing(self) -> Work:
        """Return one Work for all operations since :meth:`start_coalescing`."""
        works, self._coalescing = self._coalescing or [], None
        tickets = [ticket for work in works for ticket in work.tickets]

        def finish() -> None:
            for work in works:
                work.wait()

        return self.keep(PendingWork(tickets, [], finish))

    def clear(self) -> None:
        self._works.clear()

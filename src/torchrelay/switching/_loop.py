"""A thread that owns the daemon's state: it runs posted functions and reads the workers'
channels.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from torchrelay import _native
from torchrelay.errors import UnavailableError

__all__ = ["Loop", "seconds_until"]

T = TypeVar("T")


class Loop:
    """Runs everything in one thread, so that what it owns needs no lock."""

    def __init__(
        self, after_each: Callable[[], float | None], crashed: Callable[[Exception], None]
    ) -> None:
        """Make a loop; :meth:`start` runs it.

        Args:
            after_each: runs after every event; it returns in how many seconds to run at the latest.
            crashed: called with an uncaught error; the loop then ends.
        """
        self._after_each = after_each
        self._crashed = crashed
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._posted: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # between post() and the end
        self._ended = False
        self._origin = _native.Origin()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="torchrelay-switcher", daemon=True)

    @property
    def is_foreign(self) -> bool:
        """Whether this process was forked from the loop's and so lacks its thread."""
        return self._origin.is_forked

    def start(self) -> None:
        self._thread.start()

    def post(self, function: Callable[[], None]) -> bool:
        """Schedule `function` in the loop's thread; return False if the loop has ended.

        Raises:
            UnavailableError: this process was forked from the loop's.
        """
        if self.is_foreign:
            raise UnavailableError(
                "the switcher belongs to the process that made it, and this one was forked from "
                "that; make a switcher here, or call the parent's over HTTP"
            )
        with self._lock:
            if self._ended:
                return False
            self._posted.append(function)
            os.eventfd_write(self._wake, 1)
            return True

    def call(self, function: Callable[[], T], timeout_s: float = 60.0) -> T:
        """Run `function` in the loop's thread and return its value.

        Raises:
            UnavailableError: the loop has ended.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        if not self.post(run):
            raise UnavailableError("the switcher is closed")
        return future.result(timeout_s)

    def watch(self, descriptor: int, ready: Callable[[], None]) -> None:
        """Call `ready` whenever `descriptor` can be read."""
        self._selector.register(descriptor, selectors.EVENT_READ, ready)

    def unwatch(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(descriptor)

    def stop(self) -> None:
        """End after the current event; from the loop's own thread."""
        self._stopping = True

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            self._run_events()
        except Exception as error:
            self._crashed(error)
            raise
        finally:
            with self._lock:
                self._ended = True
            while self._posted:  # posted before the end; they find the daemon closed
                self._posted.popleft()()
            self._selector.close()
            os.close(self._wake)

    def _run_events(self) -> None:
        while True:
            wait_s = self._after_each()
            if self._stopping:
                return
            for key, _ in self._selector.select(wait_s):
                ready: Any = key.data or self._run_posted
                ready()

    def _run_posted(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        for _ in range(len(self._posted)):
            self._posted.popleft()()


def seconds_until(moment: float) -> float:
    """Return the seconds until `moment` of `time.monotonic()`, not negative."""
    return max(0.0, moment - time.monotonic())

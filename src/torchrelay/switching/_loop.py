"""The lock over the daemon's state, and the thread that reads the workers' channels."""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from torchrelay import _native
from torchrelay.errors import UnavailableError

__all__ = ["Loop", "seconds_until"]

T = TypeVar("T")


class Loop:
    """Lets one thread at a time change the daemon's state, and has the daemon decide after every
    change what to do next.

    A caller's own thread does what it can, so that a request passes through no other one: the
    loop's thread is for the other messages, and for timeouts.
    """

    def __init__(
        self,
        decide: Callable[[], float],
        crashed: Callable[[BaseException], None],
        ended: Callable[[], None],
    ) -> None:
        """Make a loop; :meth:`start` runs it.

        Args:
            decide: runs after every change; it returns the time of `time.monotonic()` at which to
                run again at the latest.
            crashed: called with an error of a decision or an event; it ends the loop.
            ended: called once, without the lock, when the loop has ended.
        """
        self.decide = decide
        self._crashed = crashed
        self._on_end = ended
        self._lock = threading.Lock()
        self._settled: list[Callable[[], object]] = []
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.watch(self._wake, self._clear_wake)
        self._wakes_at = 0.0  # of the thread, at the latest
        self._started = threading.Event()
        self._stopping = False
        self._error: BaseException | None = None
        self._origin = _native.Origin()
        self._thread = threading.Thread(target=self._run, name="torchrelay-switcher", daemon=True)

    @property
    def is_foreign(self) -> bool:
        """Whether this process was forked from the loop's and so lacks its thread."""
        return self._origin.is_forked

    @property
    def is_own_thread(self) -> bool:
        """Whether the calling thread is the loop's, which lives as long as the loop."""
        return threading.get_ident() == self._thread.ident

    def start(self) -> None:
        """Run; returns after the first decision, which is the loop's thread's own."""
        self._thread.start()
        self._started.wait()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Own the state within the block; then let the daemon decide. Not reentrant.

        Raises:
            UnavailableError: the loop has ended, or this process was forked from the loop's.
        """
        if self.is_foreign:
            raise UnavailableError(
                "the switcher belongs to the process that made it, and this one was forked from "
                "that; make a switcher here, or call the parent's over HTTP"
            )
        settled: list[Callable[[], object]] = []
        try:
            with self._lock:
                if self._stopping:
                    raise UnavailableError("the switcher is closed")
                try:
                    yield
                except Exception:
                    raise
                except BaseException as error:  # Ctrl-C, perhaps in the middle of a change
                    self._crash(error)
                    raise
                finally:
                    self._decide()
                    settled, self._settled = self._settled, settled
        finally:
            for function in settled:
                function()

    def call(self, function: Callable[[], T]) -> T:
        """Return the value of `function`, which owns the state. Raises as :meth:`changing`."""
        with self.changing():
            return function()

    def post(self, function: Callable[[], object]) -> None:
        """Run `function` as :meth:`call`, unless the loop has ended."""
        with contextlib.suppress(UnavailableError), self.changing():
            function()

    def handle(self, event: Callable[[], None]) -> None:
        """Run the handler of an event within :meth:`changing`; its error ends the loop."""
        try:
            event()
        except Exception as error:
            self._crash(error)

    def later(self, function: Callable[[], object]) -> None:
        """Run `function` when the state is free: it may run code of a caller, such as the callbacks
        of a future.
        """
        self._settled.append(function)

    def watch(self, descriptor: int, ready: Callable[[], None]) -> None:
        """Call `ready` whenever `descriptor` can be read."""
        self._readers[descriptor] = ready
        self._epoll.register(descriptor, select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        if self._readers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def stop(self) -> None:
        """End the loop; within :meth:`changing`."""
        os.eventfd_write(self._wake, 1)  # first, as the thread closes it once it sees the flag
        self._stopping = True

    def join(self) -> None:
        self._thread.join()

    def _decide(self) -> None:
        if self._stopping:
            return
        try:
            moment = self.decide()
        except BaseException as error:
            self._crash(error)
            if not isinstance(error, Exception):
                raise
            return
        if moment < self._wakes_at:
            self._wakes_at = moment
            if not self.is_own_thread:
                os.eventfd_write(self._wake, 1)

    def _crash(self, error: BaseException) -> None:
        self._error = error
        self._crashed(error)

    def _run(self) -> None:
        try:
            while not self._stopping:
                wait_s = seconds_until(self._wakes_at)
                ready = self._epoll.poll(None if math.isinf(wait_s) else wait_s)
                with contextlib.suppress(UnavailableError), self.changing():
                    self._wakes_at = math.inf  # the decision at the end of the block sets it
                    for descriptor, _ in ready:
                        if descriptor in self._readers:
                            self.handle(self._readers[descriptor])
                self._started.set()
        finally:
            self._started.set()
            self._on_end()
            self._epoll.close()
            os.close(self._wake)
        if self._error is not None:
            raise self._error

    def _clear_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)


def seconds_until(moment: float) -> float:
    """Return the seconds until `moment` of `time.monotonic()`, not negative."""
    return max(0.0, moment - time.monotonic())

"""The thread that owns the daemon's state, and futures that it completes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from torchrelay import _native
from torchrelay.errors import UnavailableError

try:
    import uvloop as events  # comes with the extra [serve], and takes half the time
except ImportError:
    events = asyncio  # type: ignore[misc]

__all__ = ["Owner", "OwnersFuture"]

T = TypeVar("T")

_log = logging.getLogger("torchrelay.switching")


class Owner:
    """An event loop in a thread of its own, which alone reads and changes the daemon's state. Other
    threads post functions to it.

    After each change the daemon decides what to do next.
    """

    def __init__(self, decide: Callable[[], float], crashed: Callable[[Exception], None]) -> None:
        """Make an owner; :meth:`start` runs it.

        Args:
            decide: runs after every change; it returns the time of `time.monotonic()` at which to
                run again at the latest.
            crashed: called with an error of a decision or an event, which ends the owner.
        """
        self.decide = decide
        self._crashed = crashed
        self.on_end: Callable[[], None] = lambda: None  # called once, when nothing runs any more
        # What other threads ask for, and who gets its error.
        self._posted: deque[tuple[Callable[[], object], Callable[[Exception], object]]] = deque()
        self._wakes_at = math.inf  # the time of the next decision, at the latest
        self._started = threading.Event()
        self._is_stopping = False
        self._is_over = False  # nobody takes what is posted
        self._error: Exception | None = None
        self._events: asyncio.AbstractEventLoop  # since it started
        self._ended: asyncio.Event
        self._guest: Future[Any] | None = None
        self._callbacks = ThreadPoolExecutor(1, "torchrelay-callbacks")
        self._origin = _native.Origin()
        self._thread = threading.Thread(target=self._live, name="torchrelay-switcher", daemon=True)

    @property
    def is_foreign(self) -> bool:
        """Whether this process was forked from the owner's and so lacks its thread."""
        return self._origin.is_forked

    @property
    def is_own_thread(self) -> bool:
        """Whether the calling thread is the owner's."""
        return threading.get_ident() == self._thread.ident and self._thread.is_alive()

    def start(self) -> None:
        """Run.

        Raises:
            UnavailableError: an event loop cannot be made.
        """
        self._thread.start()
        self._started.wait()
        if self._is_over:
            raise UnavailableError("the switcher could not start an event loop; its error is above")

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `coroutine` in the event loop, which ends after it; return its future."""
        self._guest = future = asyncio.run_coroutine_threadsafe(coroutine, self._events)
        return future

    def post(
        self,
        function: Callable[[], object],
        failed: Callable[[Exception], object] = lambda error: None,
    ) -> None:
        """Run `function`, which changes the state, in the owner's thread. `failed` is called with
        its error, or with UnavailableError if the owner has ended; there or here. Does not block.

        Raises:
            UnavailableError: this process was forked from the owner's.
        """
        if self.is_foreign:
            raise UnavailableError(
                "the switcher belongs to the process that made it, and this one was forked from "
                "that; make a switcher here, or call the parent's over HTTP"
            )
        self._posted.append((function, failed))
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._events.call_soon_threadsafe(self._take)
        if self._is_over:
            self._refuse()

    def post_event(self, event: Callable[[], object]) -> None:
        """Run the handler of an event in the owner's thread. Its error ends the owner; once that
        has ended, nothing happens.
        """
        self.post(event, self._event_failed)

    def call(self, function: Callable[[], T]) -> T:
        """Return the value of `function`, which changes the state.

        Raises:
            UnavailableError: the owner has ended, or this process was forked from its.
        """
        if self.is_own_thread:
            try:
                return function()
            finally:
                self._decide()
        future, answered = Future[T](), SimpleQueue[Future[T]]()
        future.add_done_callback(answered.put)
        self.post(lambda: future.set_result(function()), future.set_exception)
        return answered.get().result()  # a signal handler that interrupts this may call, too

    def read(self, function: Callable[[], T]) -> T:
        """As :meth:`call`, for a function that changes nothing."""
        return function() if self.is_own_thread else self.call(function)

    def check_can_wait(self) -> None:
        """Raise :class:`UnavailableError` in the owner's thread, for which others wait."""
        if self.is_own_thread:
            raise UnavailableError(
                "this call would wait in the thread that answers requests: in a coroutine of "
                "run(), await submit()"
            )

    def watch(self, descriptor: int, ready: Callable[[], object]) -> None:
        """Handle the event `ready` whenever `descriptor` can be read. In the owner's thread."""
        self._events.add_reader(descriptor, self._do, ready, self._event_failed)

    def unwatch(self, descriptor: int) -> None:
        """End :meth:`watch`, before the descriptor is closed."""
        self._events.remove_reader(descriptor)

    def stop(self) -> None:
        """End, after the coroutine of :meth:`run` if there is one. In the owner's thread."""
        self._is_stopping = True
        self._ended.set()

    def join(self) -> None:
        self._thread.join()

    def report(self, callback: Callable[[Future[Any]], object], future: Future[Any]) -> None:
        """Call a caller's callback, which may wait for the owner: in another thread than its."""
        if not self.is_own_thread:
            callback(future)
            return
        try:
            self._callbacks.submit(_call, callback, future)
        except RuntimeError:  # the interpreter ends, and starts no threads any more
            callback(future)

    # --- in the owner's thread

    def _take(self) -> None:
        for _ in range(len(self._posted)):  # of a thread that was interrupted before it woke this
            self._do(*self._posted.popleft())

    def _do(self, function: Callable[[], object], failed: Callable[[Exception], object]) -> None:
        if self._is_stopping:
            failed(_closed())
            return
        try:
            function()
        except Exception as error:
            failed(error)
        self._decide()

    def _decide(self) -> None:
        if self._is_stopping:
            return
        try:
            moment = self.decide()
        except Exception as error:
            self._crash(error)
            return
        if moment < self._wakes_at:
            self._wakes_at = moment
            self._events.call_at(moment, self._wake, moment)

    def _wake(self, moment: float) -> None:
        if moment == self._wakes_at:
            self._wakes_at = math.inf
            self._decide()

    def _event_failed(self, error: Exception) -> None:
        if not self._is_stopping:
            self._crash(error)

    def _crash(self, error: Exception) -> None:
        self._error = error
        try:
            self._crashed(error)
        finally:
            self.stop()

    def _live(self) -> None:
        try:
            events.run(self._run())
        finally:
            self.on_end()  # first: those who refuse what was posted may call callers' callbacks
            self._is_over = True
            self._started.set()
            self._refuse()
            self._callbacks.shutdown(wait=False)
        if self._error is not None:
            raise self._error

    async def _run(self) -> None:
        self._events, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        self._decide()
        await self._ended.wait()
        if self._guest is not None:
            await asyncio.wait([asyncio.wrap_future(self._guest)])

    def _refuse(self) -> None:
        """Refuse what nobody takes; in any thread."""
        while self._posted:
            try:
                _, failed = self._posted.popleft()
            except IndexError:  # another thread has taken the last
                return
            failed(_closed())


class OwnersFuture(Future[T]):
    """A future that the owner completes. Callbacks run in another thread than the owner's, one
    after the other, so that they may wait. A coroutine, in any event loop, can await it.
    """

    def __init__(self, owner: Owner) -> None:
        super().__init__()
        self._owner = owner

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        self.when_done(partial(self._owner.report, fn))

    def when_done(self, function: Callable[[Future[T]], object]) -> None:
        """Call `function` in the thread that completes this, which it must not hold up."""
        super().add_done_callback(function)

    def __await__(self) -> Generator[Any, None, T]:
        return self._awaited().__await__()

    async def _awaited(self) -> T:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake(*_: object) -> None:
            if not waiter.done():
                waiter.set_result(None)

        # In a coroutine of Owner.run, the same thread completes this, and nothing needs to wake it.
        is_own = self._owner.is_own_thread
        self.when_done(wake if is_own else lambda _: loop.call_soon_threadsafe(wake))
        try:
            await waiter
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result()


def _call(callback: Callable[[Future[Any]], object], future: Future[Any]) -> None:
    try:
        callback(future)
    except Exception:
        _log.exception("a callback of a request failed")


def _closed() -> UnavailableError:
    return UnavailableError("the switcher is closed")

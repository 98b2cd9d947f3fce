"""The lock over the daemon's state, and the event loop that reads the workers' channels."""

from __future__ import annotations

import asyncio
import math
import select
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from torchrelay import _native, _torch
from torchrelay.errors import UnavailableError

try:
    import uvloop as events  # comes with the extra [serve], and takes half the time
except ImportError:
    events = asyncio  # type: ignore[misc]

__all__ = ["Loop"]

T = TypeVar("T")


class Loop:
    """Lets one thread at a time change the daemon's state, and has the daemon decide after every
    change what to do next.

    A caller's own thread does what it can, so that a request passes through no other one. The
    thread of the event loop is for the other messages, for timeouts, and for the HTTP server.
    """

    def __init__(
        self, decide: Callable[[], float], crashed: Callable[[BaseException], None]
    ) -> None:
        """Make a loop; :meth:`start` runs it.

        Args:
            decide: runs after every change; it returns the time of `time.monotonic()` at which to
                run again at the latest.
            crashed: called with an error of a decision or an event; it ends the loop.
        """
        self.decide = decide
        self._crashed = crashed
        self.on_end: Callable[[], None] = lambda: None  # called once, without the lock
        self._lock = threading.RLock()  # so that a signal handler does not wait for its own thread
        self._owner = 0  # the thread that changes the state
        self._settled: list[Callable[[], object]] = []
        self._reporting: list[int] = []  # threads; one may be listed several times
        self.waiting: set[int] = set()  # threads in Daemon.run, which others may wait for
        self._channels = select.epoll()  # read by the event loop, changed by any thread
        self._readers: dict[int, Callable[[], None]] = {}
        self._wakes_at = math.inf  # the time of the next decision, at the latest
        self._started = threading.Event()
        self._stopping = False
        self._error: BaseException | None = None
        self._guest: Future[Any] | None = None
        self._origin = _native.Origin()
        self._thread = threading.Thread(
            target=lambda: events.run(self._run()), name="torchrelay-switcher", daemon=True
        )

    @property
    def is_foreign(self) -> bool:
        """Whether this process was forked from the loop's and so lacks its thread."""
        return self._origin.is_forked

    @property
    def is_own_thread(self) -> bool:
        """Whether the calling thread is the loop's, which lives as long as the loop."""
        return threading.get_ident() == self._thread.ident and self._thread.is_alive()

    def start(self) -> None:
        """Run; returns after the first decision, which is the loop's thread's own."""
        self._thread.start()
        self._started.wait()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `coroutine` in the event loop, which ends after it; return its future."""
        self._guest = future = asyncio.run_coroutine_threadsafe(coroutine, self._events)
        return future

    def call(self, function: Callable[[], T]) -> T:
        """Return the value of `function`, which owns the state; then let the daemon decide.

        Raises:
            UnavailableError: the loop has ended, this process was forked from the loop's, or a
                signal handler calls this in the middle of another call.
        """
        if self.is_foreign:
            raise UnavailableError(
                "the switcher belongs to the process that made it, and this one was forked from "
                "that; make a switcher here, or call the parent's over HTTP"
            )
        if _torch.fake_mode_active():  # it would make the daemon's tensors without memory
            with _torch.plain_torch():
                return self.call(function)
        settled: list[Callable[[], object]] = []
        try:
            with self._lock:
                if self._owner:
                    raise UnavailableError(
                        "a signal handler called the switcher in the middle of another call; set a "
                        "flag there, or start a thread"
                    )
                if self._stopping:
                    raise UnavailableError("the switcher is closed")
                self._owner = threading.get_ident()
                try:
                    return function()
                except Exception:
                    raise
                except BaseException as error:  # Ctrl-C, perhaps in the middle of a change
                    self._crash(error)
                    raise
                finally:
                    try:
                        self._decide()
                    finally:
                        settled, self._settled = self._settled, settled
                        self._owner = 0
        finally:
            if settled:
                self._report(settled)

    def post(self, function: Callable[[], object]) -> None:
        """Run `function` as :meth:`call`, unless the loop has ended."""
        try:
            self.call(function)
        except UnavailableError:
            return

    def handle(self, event: Callable[[], None]) -> None:
        """Run the handler of an event within :meth:`call`; its error ends the loop."""
        try:
            event()
        except Exception as error:
            self._crash(error)

    def later(self, function: Callable[[], object]) -> None:
        """Run `function` when the state is free: it may run code of a caller, such as the callbacks
        of a future.
        """
        self._settled.append(function)

    def check_can_wait(self) -> None:
        """Raise :class:`UnavailableError` in a thread that others wait for: the loop's, one that
        reports results, and, in a signal handler, one that changes the state or is in `waiting`.
        """
        thread = threading.get_ident()
        if (
            self.is_own_thread
            or thread == self._owner
            or thread in self._reporting
            or thread in self.waiting
        ):
            raise UnavailableError(
                "this call would wait in a thread that answers requests: in a future's callback or "
                "a coroutine of run(), use submit(); in a signal handler, set a flag or start a "
                "thread"
            )

    def watch(self, descriptor: int, ready: Callable[[], None]) -> None:
        """Call `ready` whenever `descriptor` can be read."""
        self._readers[descriptor] = ready
        self._channels.register(descriptor, select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        if self._readers.pop(descriptor, None) is not None:
            self._channels.unregister(descriptor)

    def stop(self) -> None:
        """End the loop; within :meth:`call`."""
        self._stopping = True
        self._events.call_soon_threadsafe(self._ended.set)

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
            self._events.call_soon_threadsafe(self._events.call_at, moment, self._wake, moment)

    def _report(self, settled: list[Callable[[], object]]) -> None:
        thread = threading.get_ident()
        self._reporting.append(thread)
        try:
            while settled:
                settled.pop(0)()
        finally:
            self._reporting.remove(thread)
            if settled:  # Ctrl-C in one of them
                self._report(settled)

    def _crash(self, error: BaseException) -> None:
        self._error = error
        self._crashed(error)

    async def _run(self) -> None:
        self._events, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self._events.add_reader(self._channels.fileno(), self.post, self._read)
        try:
            self.post(lambda: None)
            self._started.set()
            await self._ended.wait()
            if self._guest is not None:
                await asyncio.wait([asyncio.wrap_future(self._guest)])
        finally:
            self._events.remove_reader(self._channels.fileno())
            self._started.set()
            self.on_end()
            self._channels.close()
        if self._error is not None:
            raise self._error

    def _wake(self, moment: float) -> None:
        def clear() -> None:
            self._wakes_at = math.inf  # the decision behind this sets it

        if moment == self._wakes_at:
            self.post(clear)

    def _read(self) -> None:
        for descriptor, _ in self._channels.poll(0):
            if descriptor in self._readers:
                self.handle(self._readers[descriptor])

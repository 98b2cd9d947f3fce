"""Runs a group's operations in order of submission, for data planes written in Python."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from torchrelay import _native
from torchrelay.errors import PeerLostError, UnavailableError

__all__ = ["Completion", "Executor"]

_FOREVER_S = 1e9
_STOP_S = 10.0


class Completion:
    """The completion of one operation; a :class:`_plane.Ticket`. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._done = False
        self._error: BaseException | None = None
        self._then: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        return self._done

    def wait(self, timeout_s: float) -> bool:
        """Wait until the operation is done; return False after ``timeout_s``.

        Raises what the operation raised.
        """
        if not self._done:
            with self._changed:
                if not self._changed.wait_for(lambda: self._done, max(timeout_s, 0.0)):
                    return False
        if self._error is not None:
            raise self._error
        return True

    def error(self) -> tuple[int, str, list[int]] | None:
        if self._error is None:
            return None
        return 0, str(self._error), list(getattr(self._error, "ranks", ()))

    def when_done(self, function: Callable[[], None]) -> None:
        """Call ``function`` in the thread that ends the operation; at once if it is done."""
        with self._changed:
            if not self._done:
                self._then.append(function)
                return
        function()

    def finish(self, error: BaseException | None = None) -> None:
        """End the operation. Only the first call counts."""
        with self._changed:
            if self._done:
                return
            self._error, self._done = error, True
            then, self._then = self._then, []
            self._changed.notify_all()
        for function in then:
            function()


class Executor:
    """Runs jobs one at a time: in the caller's thread if it is free and the caller waits, else in
    its own.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._origin = _native.Origin()
        self._changed = threading.Condition()
        self._queue: deque[tuple[Callable[[], None], Completion]] = deque()
        self._running = False
        self._stopped = False
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return self._running

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that made the executor."""
        return self._origin.is_forked

    def run(self, job: Callable[[], None]) -> None:
        """Run ``job`` after those submitted before; blocks until it is done, and raises what it
        raises.
        """
        with self._changed:
            self.require_usable()
            is_free = not self._running and not self._queue
            if is_free:
                self._running = True
        if not is_free:
            self.submit(job).wait(_FOREVER_S)
            return
        try:
            job()
        finally:
            self._end()

    def submit(self, job: Callable[[], None]) -> Completion:
        """Queue ``job`` and return at once."""
        completion = Completion()
        with self._changed:
            self.require_usable()
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
            self._queue.append((job, completion))
            self._changed.notify_all()
        return completion

    def stop(self) -> None:
        """Fail what is queued and wait for the job that is running."""
        if self.is_forked:
            return
        with self._changed:
            self._stopped = True
            queue, self._queue = self._queue, deque()
            self._changed.notify_all()
        for _, completion in queue:
            completion.finish(self._stopped_error())
        if threading.current_thread() is not self._thread:
            with self._changed:
                self._changed.wait_for(lambda: not self._running, _STOP_S)

    def require_usable(self) -> None:
        """Raise if this process cannot run jobs: it is a forked child, or the group was
        destroyed.
        """
        if self.is_forked:
            raise UnavailableError(
                f"this group belongs to process {self._origin.pid}, from which this process was "
                "forked; start processes with spawn, or create a group in each of them"
            )
        if self._stopped:
            raise self._stopped_error()

    def _stopped_error(self) -> PeerLostError:
        return PeerLostError("the group was destroyed on this rank before the operation ended")

    def _end(self) -> None:
        with self._changed:
            self._running = False
            self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or (self._queue and not self._running))
                if self._stopped:
                    return
                job, completion = self._queue.popleft()
                self._running = True
            error: BaseException | None = None
            try:
                job()
            except BaseException as raised:
                error = raised
            self._end()
            completion.finish(error)
            del job, completion, error

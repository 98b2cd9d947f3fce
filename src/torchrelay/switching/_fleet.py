"""The worker processes: started, watched, replaced when they die."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from torchrelay.errors import PeerLostError, ProtocolError, SegmentError, UnavailableError
from torchrelay.switching._cache import SharedCache
from torchrelay.switching._channel import Message
from torchrelay.switching._loop import Loop, seconds_until
from torchrelay.switching._process import WorkerProcess

__all__ = ["Fleet"]

_log = logging.getLogger("torchrelay.switching")

_FAILED_STARTS = 3  # in a row, from which on requests fail instead of waiting
_BACKOFF_S = 0.5  # before the first retry; doubled for each further one
_MAX_BACKOFF_S = 30.0
_MAX_COUNTED = 100  # failures in a row that are counted


class Fleet:
    """Keeps `size` workers alive. Owned by the loop's thread."""

    def __init__(
        self,
        loop: Loop,
        cache: SharedCache,
        *,
        size: int,
        request_bytes: int,
        threads: int,
        start_timeout_s: float,
        on_message: Callable[[WorkerProcess, Message, list[int]], None],
        on_lost: Callable[[WorkerProcess, str], None],
    ) -> None:
        self._loop = loop
        self._cache = cache
        self._size = size
        self._request_bytes = request_bytes
        self._threads = threads
        self._start_timeout_s = start_timeout_s
        self._on_message = on_message
        self._on_lost = on_lost
        self._failed_starts = 0
        self._next_start = 0.0
        self._problem = ""
        self.workers: list[WorkerProcess] = []
        self.deaths = 0
        self.closing = False

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter(self.workers)

    @property
    def broken(self) -> UnavailableError | None:
        """The reason why there is no worker and will be none soon, if so."""
        if self._failed_starts < _FAILED_STARTS or any(one.ready for one in self.workers):
            return None
        return UnavailableError(
            f"the last {self._failed_starts} workers did not start ({self._problem}); their output "
            f"says why. The next start is tried within {_MAX_BACKOFF_S:g} s"
        )

    def fill(self) -> None:
        """Start workers until there are enough; after a failure, some time later."""
        while len(self.workers) < self._size and not self.closing:
            if time.monotonic() < self._next_start:
                return
            try:
                worker = WorkerProcess(self._cache, self._request_bytes, self._threads, self._size)
            except (OSError, SegmentError) as error:  # no memory, descriptors or processes are left
                self._start_failed(str(error))
                return
            self.workers.append(worker)
            self._loop.watch(worker.channel.fileno(), lambda worker=worker: self._read(worker))  # type: ignore[misc]

    def idle(self, model: str) -> WorkerProcess | None:
        """Return the best idle worker for `model`: one that has its module, and ran it last, else
        the one longest unused.
        """
        idle = [worker for worker in self.workers if worker.idle]
        return min(
            idle,
            key=lambda one: (model not in one.loaded, one.last_model != model, one.last_used),
            default=None,
        )

    def lose(self, worker: WorkerProcess, reason: str = "") -> None:
        """Kill a worker that is dead, stuck or useless, and start another."""
        if worker not in self.workers:
            return
        self.workers.remove(worker)
        self._loop.unwatch(worker.channel.fileno())
        if not reason:
            reason = worker.exit_reason()
        worker.kill()
        self.deaths += 1
        if not worker.ready:
            self._start_failed(reason)
        self._on_lost(worker, reason)
        self.fill()

    def check_starts(self) -> float:
        """Start and replace workers where that is due; return the time of the next check."""
        self.fill()
        now = time.monotonic()
        for worker in [one for one in self.workers if not one.ready]:
            if now - worker.started > self._start_timeout_s:
                self.lose(worker, f"was not ready after {self._start_timeout_s:g} s")
        starting = [one.started + self._start_timeout_s for one in self.workers if not one.ready]
        if len(self.workers) < self._size:
            starting.append(self._next_start)
        return min(starting, default=float("inf"))

    def became_ready(self, worker: WorkerProcess) -> None:
        worker.ready = True
        self._failed_starts = 0
        self._next_start = 0.0

    def close(self, timeout_s: float) -> None:
        """Ask all workers to end, and kill those that have not after `timeout_s`."""
        self.closing = True
        deadline = time.monotonic() + timeout_s
        for worker in self.workers:
            self._loop.unwatch(worker.channel.fileno())
            if worker.idle:
                worker.send({"op": "exit"})
        for worker in self.workers:
            if worker.idle:
                worker.wait(seconds_until(deadline))
            worker.kill()
        self.workers.clear()

    def _start_failed(self, reason: str) -> None:
        wait_s = min(_BACKOFF_S * 2**self._failed_starts, _MAX_BACKOFF_S)
        self._failed_starts = min(self._failed_starts + 1, _MAX_COUNTED)
        self._next_start, self._problem = time.monotonic() + wait_s, reason
        _log.warning("a worker did not start: %s; the next try is in %g s", reason, wait_s)

    def _read(self, worker: WorkerProcess) -> None:
        while worker in self.workers:
            try:
                received = worker.channel.receive(0)
            except PeerLostError:
                self.lose(worker)
                return
            except ProtocolError as error:
                self.lose(worker, f"sent a malformed message: {error}")
                return
            if received is None:
                return
            self._on_message(worker, *received)

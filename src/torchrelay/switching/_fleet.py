"""The worker processes: started, watched, replaced when they die."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from torchrelay.errors import PeerLostError, ProtocolError, UnavailableError
from torchrelay.switching._cache import SharedCache
from torchrelay.switching._channel import Message
from torchrelay.switching._loop import Loop, seconds_until
from torchrelay.switching._process import WorkerProcess

__all__ = ["Fleet"]

_MAX_FAILED_STARTS = 3


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
        self.workers: list[WorkerProcess] = []
        self.deaths = 0
        self.closing = False

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter(self.workers)

    @property
    def broken(self) -> UnavailableError | None:
        """The reason why no more workers are started, if any."""
        if self._failed_starts < _MAX_FAILED_STARTS:
            return None
        return UnavailableError(
            f"{self._failed_starts} workers in a row died while starting; their output says why"
        )

    def fill(self) -> None:
        """Start workers until there are enough."""
        while len(self.workers) < self._size and not self.broken and not self.closing:
            worker = WorkerProcess(self._cache, self._request_bytes, self._threads, self._size)
            self.workers.append(worker)
            self._loop.watch(worker.channel.fileno(), lambda worker=worker: self._read(worker))  # type: ignore[misc]

    def idle(self, model: str) -> WorkerProcess | None:
        """Return the best idle worker for `model`: one that ran it last, else the one longest
        unused.
        """
        idle = [worker for worker in self.workers if worker.idle]
        return min(idle, key=lambda one: (one.last_model != model, one.last_used), default=None)

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
        self._failed_starts = self._failed_starts + 1 if not worker.ready else self._failed_starts
        self._on_lost(worker, reason)
        self.fill()

    def check_starts(self) -> float:
        """Replace workers that do not become ready; return the time of the next check."""
        now = time.monotonic()
        for worker in [one for one in self.workers if not one.ready]:
            if now - worker.started > self._start_timeout_s:
                self.lose(worker, f"was not ready after {self._start_timeout_s:g} s")
        starting = [one.started + self._start_timeout_s for one in self.workers if not one.ready]
        return min(starting, default=float("inf"))

    def became_ready(self, worker: WorkerProcess) -> None:
        worker.ready = True
        self._failed_starts = 0

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

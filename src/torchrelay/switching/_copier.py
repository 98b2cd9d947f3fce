"""The thread that copies groups into the arena."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torchrelay.switching._contract import Copy, Link
from torchrelay.switching._planner import Costs

__all__ = ["Copier", "CopyJob", "measure_link"]

# Groups queued on a link ahead of the one waited for: enough to keep it busy, few enough to stop
# soon.
_AHEAD = 2
# What a message to a waiting process costs each side, about the same on all machines measured.
_WAKE_S = 40e-6


@dataclass
class CopyJob:
    """Groups of one model to copy into the arena, in order."""

    model: str
    groups: list[tuple[int, list[Copy]]]
    arrived: Callable[[CopyJob, int], object]  # called in the copier's thread, as `ended`
    ended: Callable[[CopyJob, Exception | None], object]
    cancelled: bool = False
    seconds: float = 0.0  # on the link
    pending: set[int] = field(default_factory=set)  # owned by the daemon's thread

    def __post_init__(self) -> None:
        self.pending = {group for group, _ in self.groups}

    @property
    def size_bytes(self) -> int:
        return sum(copy.source.numel() for _, copies in self.groups for copy in copies)


class Copier:
    """Runs copy jobs one after the other in a thread."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._jobs: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="torchrelay-copier", daemon=True)
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """End after the jobs submitted so far. Blocks."""
        self._jobs.put(None)
        self._thread.join()
        self._link.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            error: Exception | None = None
            start = time.perf_counter()
            try:
                self._copy(job)
            except Exception as caught:  # the daemon reports it; this thread goes on
                error = caught
            job.seconds = time.perf_counter() - start
            job.ended(job, error)

    def _copy(self, job: CopyJob) -> None:
        started: deque[tuple[int, Callable[[], None]]] = deque()
        groups = iter(job.groups)
        try:
            while True:
                while not job.cancelled and len(started) < _AHEAD:
                    following = next(groups, None)
                    if following is None:
                        break
                    started.append((following[0], self._link.start(following[1])))
                if not started:
                    return
                group, wait = started.popleft()
                wait()
                job.arrived(job, group)
        finally:
            # After an error others may get the space of a copy that is still on the link.
            for _, wait in started:
                with contextlib.suppress(Exception):
                    wait()


def measure_link(link: Link, source: torch.Tensor) -> Costs:
    """Return the rate and overhead of copies of `source` (uint8) to the start of the arena.

    `source` should be larger than the processor's caches. The arena's contents there are lost: for
    an arena that is not in use yet.
    """

    def median_s(size_bytes: int) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            link.start([Copy(source[:size_bytes], 0)])()
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2]

    small, large = min(4096, source.numel()), source.numel()
    overhead_s, whole_s = median_s(small), median_s(large)
    rate = max(large - small, 1) / max(whole_s - overhead_s, 1e-6)
    return Costs(rate, copy_overhead_s=overhead_s + _WAKE_S, group_overhead_s=_WAKE_S)

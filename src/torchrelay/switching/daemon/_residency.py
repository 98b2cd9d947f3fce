"""The place of models in the arena, and the thread that copies them there."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torchrelay.switching.daemon._owner import Owner
from torchrelay.switching.daemon._served import Served
from torchrelay.switching.device._arena import Arena
from torchrelay.switching.device._contract import Copy, WorkerLink

__all__ = ["Pinned", "Residency"]

_log = logging.getLogger("torchrelay.switching")

# Groups queued on a link ahead of the one waited for: enough to keep it busy, few enough to stop
# soon.
_AHEAD = 2


class Pinned(NamedTuple):
    """A model that is not evicted until :meth:`Arena.release`."""

    offsets: tuple[int, ...]  # of its groups, in bytes
    missing: list[int]  # groups that are still to arrive, in that order
    copied_bytes: int  # that this request had to copy


@dataclass
class _CopyJob:
    """Groups of one model to copy into the arena, in order."""

    model: str
    groups: dict[int, list[Copy]]
    pending: list[int]  # groups that have not arrived
    cancelled: bool = False


class Residency:
    """Places models and copies what is missing."""

    # Called with groups whose bytes others get, before that; with a model and a group that is in
    # place; and when a copy did not succeed.
    on_dropped: Callable[[list[tuple[str, int]]], None]
    on_arrived: Callable[[str, int], None]
    on_failed: Callable[[str, Exception], None]

    def __init__(
        self,
        owner: Owner,
        link: WorkerLink,
        size_bytes: int,
        granule_bytes: int,
        counts: Counter[str],
    ) -> None:
        self.arena = Arena(size_bytes, granule_bytes)
        self.seconds_copying = 0.0
        self._owner = owner
        self._link = link
        self._counts = counts
        self._copies: dict[str, _CopyJob] = {}
        self._copier = ThreadPoolExecutor(1, "torchrelay-copier")

    @property
    def is_copying(self) -> bool:
        return bool(self._copies)

    def is_resident(self, served: Served) -> bool:
        """Return whether the whole model is in the arena."""
        return self.arena.is_resident(served.name, len(served.grouped.groups))

    def is_unused(self, name: str) -> bool:
        """Return whether no request or copy uses the groups of `name`."""
        return name not in self._copies and not self.arena.is_pinned(name)

    def pin(self, served: Served) -> Pinned | None:
        """Keep the model in the arena and start copying what is missing.

        Returns None if the space is in use: try again after a copy or a request has ended.
        """
        name = served.name
        job = self._copies.get(name)
        if job is not None and job.cancelled:
            return None
        sizes = served.grouped.sizes
        placement = self.arena.reserve(name, sizes, priority=served.priority)
        if placement is None:
            return None
        self.report_dropped()
        self._counts["evicted_groups"] += len(placement.evicted)
        copied_bytes = 0
        if job is None and placement.missing:
            self.arena.reserve(name, sizes, priority=served.priority)  # the copy's own pin
            groups = {one: served.copies(one, placement.offsets[one]) for one in placement.missing}
            job = self._copies[name] = _CopyJob(name, groups, list(groups))
            copied_bytes = sum(copy.source.numel() for copies in groups.values() for copy in copies)
            self._counts["copied_bytes"] += copied_bytes
            self._copier.submit(self._run, job)
        return Pinned(placement.offsets, list(job.pending) if job else [], copied_bytes)

    def prefetch(self, served: Served) -> bool:
        """Start copying the model ahead of its request; False if the space is in use."""
        if self.pin(served) is None:
            return False
        self.arena.release(served.name)
        return True

    def keep(self, served: Served, running: str) -> bool:
        """Keep the model in the arena until :meth:`Arena.unkeep`, and start copying it; False if
        others are in the way, whose copies are stopped but for that of the model that is running.
        """
        if not self.arena.keep(served.name, served.grouped.sizes[0]):
            self.cancel_copies(keep=running)
            return False
        self.report_dropped()
        return self.prefetch(served)

    def report_dropped(self) -> None:
        """Call :attr:`on_dropped` if groups have lost their bytes since the last time."""
        if self.arena.dropped:
            dropped, self.arena.dropped = self.arena.dropped, []
            self.on_dropped(dropped)

    def cancel_copies(self, *, keep: str = "") -> None:
        """Stop the copies of every model but `keep` after the group on the link."""
        for name in self._copies:
            if name != keep:
                self.cancel_copy(name)

    def cancel_copy(self, name: str) -> None:
        """Stop the copy of one model, if there is one."""
        if name in self._copies:
            self._copies[name].cancelled = True

    def close(self) -> None:
        """Stop all copies and close the link. Blocks for the group on it."""
        self.cancel_copies()
        self._copier.shutdown()
        self._link.close()

    # --- in the copier's thread

    def _run(self, job: _CopyJob) -> None:
        error: Exception | None = None
        start = time.perf_counter()
        try:
            self._copy(job)
        except Exception as caught:  # the daemon reports it
            error = caught
        seconds = time.perf_counter() - start
        self._owner.post_event(partial(self._ended, job, error, seconds))

    def _copy(self, job: _CopyJob) -> None:
        started: deque[tuple[int, Callable[[], None]]] = deque()
        groups = iter(job.groups.items())
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
                self._owner.post_event(partial(self._arrived, job, group))
        finally:
            # After an error others may get the space of a copy that is still on the link.
            for _, wait in started:
                with contextlib.suppress(Exception):
                    wait()

    # --- events

    def _arrived(self, job: _CopyJob, group: int) -> None:
        self.arena.mark_ready(job.model, group)
        job.pending.remove(group)
        self.on_arrived(job.model, group)

    def _ended(self, job: _CopyJob, error: Exception | None, seconds: float) -> None:
        del self._copies[job.model]
        self.seconds_copying += seconds
        self.arena.release(job.model)
        if error is not None:
            _log.warning("model %r could not be copied to the arena: %s", job.model, error)
            self.on_failed(job.model, error)

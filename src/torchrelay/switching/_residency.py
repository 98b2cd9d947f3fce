"""The served models, their place in the arena, and the thread that copies them there."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torchrelay.errors import TorchRelayError
from torchrelay.switching._arena import Arena
from torchrelay.switching._contract import Copy, WorkerLink
from torchrelay.switching._layout import Grouped
from torchrelay.switching._owner import Owner
from torchrelay.switching._profile import Output
from torchrelay.switching._store import StoredModel

__all__ = ["Pinned", "Residency", "Served", "merged_copies"]

_log = logging.getLogger("torchrelay.switching")

# Groups queued on a link ahead of the one waited for: enough to keep it busy, few enough to stop
# soon.
_AHEAD = 2


@dataclass(eq=False)
class Served:
    """A model that is loaded or loading."""

    name: str = field(init=False)
    model: StoredModel
    grouped: Grouped
    priority: int
    key: tuple[int, int] = field(init=False)  # the version and plan that a worker must have loaded
    ready: Future[None] = field(default_factory=Future)
    is_settled: bool = False  # whether `ready` is done
    is_planned: bool = False  # whether the groups are those of a profile
    profiling: bool = False  # whether a worker has built it, for a profile
    regroup: Grouped | None = None  # applied once no copy or request uses the old groups
    runs_whole: bool = False  # requests start when all groups have arrived
    error: TorchRelayError | None = None
    lost_builds: int = 0  # in a row: workers that were lost as they built it
    outputs: tuple[Output, ...] = ()  # of its first run; empty before it
    # Of the replies so far, by kind: how many, and the seconds of their parts.
    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    _copies: dict[int, list[Copy]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name, self.key = self.model.name, (self.model.version, 0)

    def apply_regroup(self) -> None:
        """Use the groups of `regroup` from now on. Workers that have the module with other groups
        build it again: its tensors never move.
        """
        assert self.regroup is not None
        if self.regroup != self.grouped:
            self.grouped, self.key = self.regroup, (self.model.version, self.key[1] + 1)
            self._copies.clear()
        else:
            self.settle()
        self.regroup, self.is_planned = None, True

    def settle(self) -> None:
        """Let requests run."""
        if not self.ready.done():
            self.is_settled = True
            self.ready.set_result(None)

    def fail(self, error: TorchRelayError) -> None:
        """Fail those that wait for the model to be ready."""
        if not self.ready.done():
            self.is_settled = True
            self.ready.set_exception(error)

    def copies(self, group: int, offset_bytes: int) -> list[Copy]:
        """Return the copies that move `group` to `offset_bytes` of the arena."""
        if group not in self._copies:
            self._copies[group] = merged_copies(self.model, self.grouped, group)
        return [Copy(copy.source, offset_bytes + copy.offset_bytes) for copy in self._copies[group]]


def merged_copies(model: StoredModel, grouped: Grouped, group: int) -> list[Copy]:
    """Return the copies of a group to the start of the arena, one for all storages that follow one
    another.

    Most groups hold storages in the order of the store, so that a model of a thousand tensors takes
    a few copies.
    """
    runs: list[tuple[int, int, int]] = []  # start and end in the store, offset in the group
    for storage, offset in grouped.places(group):
        start, size_bytes = model.offsets[storage], model.layout.storages[storage]
        if not size_bytes:
            continue
        if runs and start - runs[-1][0] == offset - runs[-1][2]:
            runs[-1] = (runs[-1][0], start + size_bytes, runs[-1][2])
        else:
            runs.append((start, start + size_bytes, offset))
    return [Copy(model.bytes(start, end), offset) for start, end, offset in runs]


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

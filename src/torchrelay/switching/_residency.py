"""The models in the arena, and the copies in progress to it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from torchrelay.switching._arena import Arena
from torchrelay.switching._contract import Link
from torchrelay.switching._copier import Copier, CopyJob
from torchrelay.switching._loop import Loop
from torchrelay.switching._served import Served

__all__ = ["Pinned", "Residency"]

_log = logging.getLogger("torchrelay.switching")


@dataclass(frozen=True)
class Pinned:
    """A model that is not evicted until :meth:`Residency.unpin`."""

    offsets: tuple[int, ...]  # of its groups, in bytes
    missing: list[int]  # groups that are still to arrive, in that order
    copied_bytes: int  # that this request had to copy


class Residency:
    """Places models and copies what is missing. The loop's lock protects it."""

    def __init__(
        self,
        loop: Loop,
        link: Link,
        size_bytes: int,
        counts: Counter[str],
        *,
        on_arrived: Callable[[str, int], None],
        on_failed: Callable[[str, Exception], None],
    ) -> None:
        """`on_arrived` is called with model and group, `on_failed` when a copy did not succeed."""
        self.arena = Arena(size_bytes)
        self._loop = loop
        self._counts = counts
        self._on_group = on_arrived
        self._on_failed = on_failed
        self._copier = Copier(link)
        self._copies: dict[str, CopyJob] = {}
        self.seconds_copying = 0.0

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
        self._counts["evicted_groups"] += len(placement.evicted)
        copied_bytes = 0
        if job is None and placement.missing:
            self.arena.reserve(name, sizes, priority=served.priority)  # the copy's own pin
            job = self._start_copy(served, placement.offsets, placement.missing)
            copied_bytes = job.size_bytes
        missing = [group for group, _ in job.groups if group in job.pending] if job else []
        return Pinned(placement.offsets, missing, copied_bytes)

    def unpin(self, name: str) -> None:
        """Undo one :meth:`pin`."""
        self.arena.release(name)

    def prefetch(self, served: Served) -> bool:
        """Start copying the model ahead of its request; False if the space is in use."""
        if self.pin(served) is None:
            return False
        self.unpin(served.name)
        return True

    def cancel_copies(self, *, keep: str = "") -> None:
        """Stop the copies of every model but `keep` after the group on the link."""
        for name, job in self._copies.items():
            job.cancelled = job.cancelled or name != keep

    def cancel_copy(self, name: str) -> None:
        """Stop the copy of one model, if there is one."""
        if name in self._copies:
            self._copies[name].cancelled = True

    def close(self) -> None:
        """Stop all copies and close the link, without the lock. Blocks for the group on it."""
        self.cancel_copies()
        self._copier.close()

    def _start_copy(
        self, served: Served, offsets: tuple[int, ...], missing: tuple[int, ...]
    ) -> CopyJob:
        job = CopyJob(
            served.name,
            [(group, served.copies(group, offsets[group])) for group in missing],
            arrived=lambda job, group: self._loop.post(lambda: self._on_arrived(job, group)),
            ended=lambda job, error: self._loop.post(lambda: self._on_ended(job, error)),
        )
        self._copies[job.model] = job
        self._counts["copied_bytes"] += job.size_bytes
        self._copier.submit(job)
        return job

    def _on_arrived(self, job: CopyJob, group: int) -> None:
        self.arena.mark_ready(job.model, group)
        job.pending.discard(group)
        self._on_group(job.model, group)

    def _on_ended(self, job: CopyJob, error: Exception | None) -> None:
        del self._copies[job.model]
        self.seconds_copying += job.seconds
        self.arena.release(job.model)
        if error is not None:
            _log.warning("model %r could not be copied to the arena: %s", job.model, error)
            self._on_failed(job.model, error)

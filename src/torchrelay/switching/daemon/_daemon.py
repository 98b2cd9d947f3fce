"""The daemon: takes requests, models and tasks, and decides what happens next."""

from __future__ import annotations

import math
import time
from collections import Counter
from concurrent.futures import Future
from typing import Any

from torchrelay.config import Switching
from torchrelay.errors import NotFoundError, TorchRelayError, UnavailableError
from torchrelay.switching.daemon._catalog import Catalog
from torchrelay.switching.daemon._dispatcher import Dispatcher
from torchrelay.switching.daemon._fleet import Fleet
from torchrelay.switching.daemon._owner import Owner
from torchrelay.switching.daemon._planner import Costs
from torchrelay.switching.daemon._queue import Request, RequestQueue
from torchrelay.switching.daemon._residency import Residency
from torchrelay.switching.daemon._scheduler import TrainingHandle, TrainingScheduler
from torchrelay.switching.daemon._served import Served, State
from torchrelay.switching.daemon._shares import Shares
from torchrelay.switching.device._cache import SharedCache
from torchrelay.switching.device._contract import WorkerLink
from torchrelay.switching.generate._scheduler import SliceScheduler
from torchrelay.switching.generate._sequences import Sequence
from torchrelay.switching.models._code import digest_of
from torchrelay.switching.models._store import ModelStore, StoredModel

__all__ = ["COUNTERS", "Daemon"]

#: What a switcher counts, and what each number means.
COUNTERS = {
    "served": "Requests answered",
    "failed": "Requests that failed in a worker",
    "rejected": "Requests refused: queue full, unknown model, shutting down",
    "expired": "Requests cancelled or past their deadline while waiting",
    "retried": "Requests run again because their worker died",
    "copied_bytes": "Bytes copied to the arena",
    "evicted_groups": "Groups evicted from the arena",
    "prefetches": "Models copied ahead of their request",
    "tokens": "Tokens generated",
    "slices": "Times that a model that generates had the device",
    "recomputed_tokens": "Tokens computed again because their keys and values were lost",
}

_EXIT_S = 5.0  # how long workers may take to exit


class Daemon:
    """The parts of a switcher, and the decisions between them.

    All of it, parts included, belongs to the thread of `owner`, to which others post.
    """

    def __init__(
        self,
        store: ModelStore,
        cache: SharedCache,
        link: WorkerLink,
        costs: Costs,
        options: Switching,
    ) -> None:
        self.options = options
        self._store = store
        self.queue = RequestQueue(options.queue_limit)
        self.counts = Counter(dict.fromkeys(COUNTERS, 0))
        self.owner = Owner(self.decide, self._crashed)
        self.is_draining = False
        self._draining_until = math.inf
        self._ended: UnavailableError | None = None
        self.failure: UnavailableError | None = None  # an error of the daemon itself, that ended it
        sizes = cache.size_bytes, cache.memory.granule_bytes
        self.residency = Residency(self.owner, link, *sizes, self.counts)
        self.owner.on_end = self.residency.close
        self.fleet = Fleet(self.owner, cache, options)
        self.residency.on_dropped = self.fleet.unmap
        self.training = TrainingScheduler(self.fleet)
        parts = self.residency, self.fleet
        self.catalog = Catalog(self.owner, self.queue, *parts, link, costs, options)
        shares = Shares(options.slice_s)
        common = self.catalog, *parts, shares, self.counts, options
        self.dispatcher = Dispatcher(*common, self.queue)
        self.generation = SliceScheduler(*common)
        self.catalog.on_failed = self.generation.fail_model
        self.residency.on_arrived = self._on_arrived
        self.residency.on_failed = self._on_copy_failed

    def add_model(self, model: StoredModel, priority: int, is_pinned: bool) -> Future[None]:
        """Serve `model`; the future is done when a request can run."""
        self._check_open()
        return self.catalog.add(model, priority, is_pinned)

    def submit(self, request: Request) -> None:
        """Queue `request`, or fail its future.

        Raises:
            ArgumentError: its inputs are not the model's.
        """
        served = self.catalog.models.get(request.model)
        if served is not None:
            served.model.check_inputs(request.inputs)
        try:
            self._check_open()
            self._check_model(request.model)
            self.queue.push(request)
        except TorchRelayError as error:
            self.counts["rejected"] += 1
            request.fail(error)

    def generate(self, sequence: Sequence) -> None:
        """Take a sequence to generate.

        Raises:
            ArgumentError: its prompt is not one of the model, which must be one that generates.
            NotFoundError, OverloadedError, UnavailableError: as of a request.
        """
        try:
            self._check_open()
            self._check_model(sequence.model)
            sequence.check(self.catalog.models[sequence.model].model)
            self.generation.submit(sequence)
        except TorchRelayError:
            self.counts["rejected"] += 1
            raise

    def forget(self, request: Request) -> None:
        """Remove a cancelled request."""
        self.counts["expired"] += self.queue.remove(request)
        request.claim()

    def is_ready(self, served: Served) -> bool:
        """Return whether the model can answer."""
        return served.state is State.READY and self.failure is None and not self.fleet.broken

    def error_of(self, served: Served) -> TorchRelayError | None:
        """Return why the model cannot answer, if it cannot."""
        return served.error or self.fleet.broken

    def train(self, task: TrainingHandle) -> None:
        """Queue a training task."""
        self._check_open()
        self.training.waiting.append(task)

    def drain(self, grace_s: float) -> None:
        """Refuse new requests, and end when the queued ones are done or `grace_s` has passed."""
        self.is_draining, self._draining_until = True, time.monotonic() + grace_s
        self.dispatcher.fills_batches = False
        self.training.pause()

    def decide(self) -> float:
        """Do what can be done now; return the time of the next decision at the latest."""
        if self.is_draining and self._is_drained():
            self._end(UnavailableError("the switcher was closed before it was done"))
            return math.inf
        running = self._running
        self.catalog.retire(running)
        self.residency.report_dropped()
        self.catalog.build(self._make_way)
        for request, error in self.queue.take_expired():
            self.counts["expired"] += 1
            request.fail(error)
        if self.fleet.next_check() <= time.monotonic():
            self.fleet.check()
        broken = self.fleet.broken
        if broken is not None:
            self.catalog.fail_all(broken)
        if self.catalog.keep(running, self._make_way):
            self._start_next()
        return min(
            self.generation.wakes_at,
            self.queue.next_deadline,
            self.fleet.next_check(),
            self.dispatcher.batch_starts_at,
            self._draining_until,
        )

    def _start_next(self) -> None:
        """Start what has its turn, if nothing runs; copy what comes after it."""
        if self.dispatcher.run is None and self.generation.decide(
            self.dispatcher.rank(), self.training.pause
        ):
            self.dispatcher.start_next(self.training.pause)
        if self._running:
            self._prefetch()
        elif not (self.queue or self.generation.sequences or self.is_draining):
            self.training.start_next()

    def _make_way(self) -> None:
        """Let whatever runs for long end soon, as a worker is needed."""
        self.training.pause()
        self.generation.pause()

    @property
    def _running(self) -> str:
        """The model that runs, or ""."""
        return self.dispatcher.model or self.generation.model

    @property
    def _is_busy(self) -> bool:
        return any((self.dispatcher.run, self.training.running, self.generation.run))

    def _on_arrived(self, model: str, group: int) -> None:
        self.dispatcher.on_arrived(model, group)
        self.generation.on_arrived(model, group)

    def _on_copy_failed(self, model: str, error: Exception) -> None:
        self.dispatcher.on_copy_failed(model, error)
        self.generation.on_copy_failed(model, error)

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended
        if self.is_draining:
            raise UnavailableError("the switcher is shutting down")

    def _check_model(self, name: str) -> None:
        served = self.catalog.models.get(name)
        if served is None:
            loaded = f"loaded are {', '.join(sorted(self.catalog.models)) or 'none'}"
            if name in self._store.names():
                raise NotFoundError(f"model {name!r} is not loaded: call load({name!r}); {loaded}")
            raise NotFoundError(f"there is no model {name!r}; {loaded}")
        error = self.error_of(served)
        if error is not None:
            raise error

    def _prefetch(self) -> None:
        """Copy the model of the next request while the running one computes, if there is space."""
        if self.residency.is_copying:
            return
        queued = (one.model for one in self.queue if one.model != self._running)
        name = next(queued, "") or self.generation.next_model()
        if not name:
            return
        served = self.catalog.models[name]
        if self.catalog.can_run(served) and not self.residency.is_resident(served):
            self.counts["prefetches"] += self.residency.prefetch(served)

    # --- for people and monitors: JSON values only

    def status(self) -> dict[str, Any]:
        """Return a snapshot."""
        return {
            "time": time.time(),
            "device": str(self.fleet.cache.device),
            "arena_bytes": self.residency.arena.size_bytes,
            "blocks": [
                {
                    "offset": block.offset_bytes,
                    "bytes": block.size_bytes,
                    "model": block.model,
                    "group": block.group,
                }
                for block in self.residency.arena.blocks()
            ],
            "models": [self._model(served) for _, served in sorted(self.catalog.models.items())],
            "workers": self.fleet.status(),
            "worker_deaths": self.fleet.deaths,
            "queue": [
                {
                    "model": request.model,
                    "priority": request.priority,
                    "waiting_s": time.monotonic() - request.arrived,
                }
                for request in self.queue
            ],
            "sequences": self.generation.status(),
            "training": [_task(task) for task in [self.training.running] if task is not None],
            "paused_training": [_task(task) for task in self.training.waiting],
            "link": {
                "bytes_per_s": self.catalog.costs.bytes_per_s,
                "copy_overhead_s": self.catalog.costs.copy_overhead_s,
                "seconds_copying": self.residency.seconds_copying,
            },
            "counts": dict(self.counts),
            "switches": list(self.dispatcher.history)[::-1],
        }

    def _model(self, served: Served) -> dict[str, Any]:
        name, error = served.name, self.error_of(served)
        return {
            "name": name,
            "version": served.model.version,
            "code": digest_of(served.model.factory.code),
            "state": "failed" if error else served.state.value,
            "error": str(error or ""),
            "bytes": served.model.size_bytes,
            "groups": len(served.grouped.groups),
            "resident": self.residency.is_resident(served),
            "pinned": self.residency.arena.is_pinned(name),
            "requests": dict(served.counts),
            "seconds": {kind: dict(parts) for kind, parts in served.seconds.items()},
        }

    def _crashed(self, error: Exception) -> None:
        """Fail everything: an error of the daemon must not leave callers waiting."""
        self.failure = UnavailableError(f"the switcher failed: {type(error).__name__}: {error}")
        self._end(self.failure)

    # --- the end

    def _is_drained(self) -> bool:
        is_busy = self._is_busy or self.queue or self.generation.sequences
        return not is_busy or time.monotonic() >= self._draining_until

    def _end(self, error: UnavailableError) -> None:
        self._ended = error
        run, is_busy = self.dispatcher.run, self._is_busy
        self.catalog.fail_all(error)
        self.generation.fail_all(error)
        for request in run.requests if run is not None else []:
            request.fail(error)
        self.training.fail_all(error)
        self.fleet.close(timeout_s=0.0 if is_busy else _EXIT_S)
        self.owner.stop()


def _task(task: TrainingHandle) -> dict[str, Any]:
    return {"task": task.name, "step": task.step, "steps": task.steps}

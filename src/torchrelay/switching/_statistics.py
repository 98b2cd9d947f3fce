"""The daemon's state for people and monitors: JSON values only."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torchrelay.switching._cache import SharedCache
from torchrelay.switching._fleet import WorkerProcess
from torchrelay.switching._residency import Served
from torchrelay.switching._scheduler import TrainingHandle

if TYPE_CHECKING:
    from torchrelay.switching._daemon import Daemon

__all__ = ["COUNTERS", "status"]

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
}


def status(daemon: Daemon, cache: SharedCache) -> dict[str, Any]:
    """Return a snapshot; within the loop's lock."""
    return {
        "time": time.time(),
        "device": str(cache.device),
        "arena_bytes": daemon.residency.arena.size_bytes,
        "blocks": [
            {
                "offset": block.offset_bytes,
                "bytes": block.size_bytes,
                "model": block.model,
                "group": block.group,
            }
            for block in daemon.residency.arena.blocks()
        ],
        "models": [_model(daemon, served) for _, served in sorted(daemon.catalog.models.items())],
        "workers": [_worker(daemon, worker) for worker in daemon.fleet],
        "worker_deaths": daemon.fleet.deaths,
        "queue": [
            {
                "model": request.model,
                "priority": request.priority,
                "waiting_s": time.monotonic() - request.arrived,
                "client": request.client,
            }
            for request in daemon.queue
        ],
        "training": [_task(task) for task in [daemon.training.running] if task is not None],
        "paused_training": [_task(task) for task in daemon.training.waiting],
        "link": {
            "bytes_per_s": daemon.catalog.costs.bytes_per_s,
            "copy_overhead_s": daemon.catalog.costs.copy_overhead_s,
            "seconds_copying": daemon.residency.seconds_copying,
        },
        "counts": dict(daemon.counts),
        "switches": list(daemon.dispatcher.history)[::-1],
    }


def _model(daemon: Daemon, served: Served) -> dict[str, Any]:
    name = served.name
    state = "failed" if served.error else "ready" if served.ready.done() else "loading"
    return {
        "name": name,
        "version": served.model.version,
        "state": state,
        "error": str(served.error) if served.error else "",
        "bytes": served.model.size_bytes,
        "groups": len(served.grouped.groups),
        "resident": daemon.residency.is_resident(served),
        "pinned": daemon.residency.arena.is_pinned(name),
        "requests": dict(served.counts),
        "seconds": dict(served.seconds),
    }


def _worker(daemon: Daemon, worker: WorkerProcess) -> dict[str, Any]:
    if not worker.ready:
        state = "starting"
    elif worker.loading:
        state = "loading"
    elif worker is daemon.dispatcher.worker:
        state = "running"
    else:
        state = "training" if worker.request_id else "standby"
    return {"pid": worker.pid, "state": state, "model": worker.last_model}


def _task(task: TrainingHandle) -> dict[str, Any]:
    return {"task": task.name, "step": task.step, "steps": task.steps}

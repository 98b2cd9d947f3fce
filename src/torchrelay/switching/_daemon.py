"""The daemon: decides which request runs next, on which worker, and completes it."""

from __future__ import annotations

import logging
import math
import platform
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchrelay.errors import (
    NotFoundError,
    OperationTimeoutError,
    PeerLostError,
    SegmentError,
    TorchRelayError,
    UnavailableError,
)
from torchrelay.switching._cache import SharedCache
from torchrelay.switching._catalog import Catalog
from torchrelay.switching._channel import Message, error_of
from torchrelay.switching._contract import Link, align
from torchrelay.switching._fleet import Fleet
from torchrelay.switching._loop import Loop, seconds_until
from torchrelay.switching._planner import Costs
from torchrelay.switching._process import WorkerProcess
from torchrelay.switching._queue import Reply, Request, RequestQueue
from torchrelay.switching._residency import Pinned, Residency
from torchrelay.switching._scheduler import TrainingScheduler
from torchrelay.switching._served import Served
from torchrelay.switching._store import StoredModel
from torchrelay.switching._tasks import Task

__all__ = ["Daemon", "Options"]

_log = logging.getLogger("torchrelay.switching")

_MAX_ATTEMPTS = 2
_HISTORY = 100
_PROFILE_PRIORITY = 1 << 30
_EXIT_S = 5.0  # what workers get to end by themselves


@dataclass(frozen=True)
class Options:
    """The options of a switcher."""

    workers: int
    request_bytes: int
    queue_limit: int
    client_limit: int
    run_timeout_s: float
    start_timeout_s: float
    prefetch: bool
    grouping: str
    threads: int
    profiles: Path | None


class Daemon:
    """Runs one request at a time. Everything is in the loop's thread unless it says otherwise."""

    def __init__(self, cache: SharedCache, link: Link, costs: Costs, options: Options) -> None:
        self.options = options
        self.queue = RequestQueue(options.queue_limit, options.client_limit)
        self.history: deque[dict[str, Any]] = deque(maxlen=_HISTORY)
        self.counts: Counter[str] = Counter()
        self.running: tuple[Request, WorkerProcess] | None = None
        self.loop = Loop(self._turn, self._crashed)
        self._next_id = 1
        self._draining_until: float | None = None
        self._ended: UnavailableError | None = None
        self.failure: UnavailableError | None = (
            None  # an error in the daemon itself, which ended it
        )
        self.residency = Residency(
            self.loop,
            link,
            cache.size_bytes,
            self.counts,
            arrived=self._on_arrived,
            failed=self._on_copy_failed,
        )
        self.fleet = Fleet(
            self.loop,
            cache,
            size=options.workers,
            request_bytes=options.request_bytes,
            threads=options.threads,
            start_timeout_s=options.start_timeout_s,
            on_message=self._on_message,
            on_lost=self._on_lost,
        )
        self.training = TrainingScheduler(self.fleet)
        self.catalog = Catalog(
            self.residency,
            self.fleet,
            link,
            costs,
            grouping=options.grouping,
            profile_folder=options.profiles,
            profiled_on=f"{platform.node()}-{cache.device}-{options.threads}",
            request_profile=self._request_profile,
            failed=self._fail_waiting,
        )

    # --- asked for by callers

    def start(self) -> None:
        """Start the workers and the loop; from the caller's thread."""
        self.loop.post(self.fleet.fill)
        self.loop.start()

    def add_model(self, model: StoredModel, priority: int) -> Future[None]:
        """Serve `model`; the future is done when a request can run."""
        self._check_open()
        return self.catalog.add(model, priority)

    def submit(self, request: Request) -> None:
        """Queue `request`, or fail its future."""
        self._expire()  # a request whose client has gone must not count against this one
        request.request_id = self._new_id()
        try:
            self._check(request)
            self.queue.push(request)
        except TorchRelayError as error:
            self.counts["rejected"] += 1
            _fail(request.future, error)

    def train(self, task: Task) -> None:
        """Queue a training task."""
        self._check_open()
        self.training.submit(task)

    def drain(self, grace_s: float) -> None:
        """Refuse new requests, and end when the queued ones are done or `grace_s` has passed."""
        self._draining_until = time.monotonic() + grace_s
        self.training.pause()

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended
        if self._draining_until is not None:
            raise UnavailableError("the switcher is shutting down")

    def _check(self, request: Request) -> None:
        self._check_open()
        served = self.catalog.models.get(request.model)
        if served is None:
            names = ", ".join(sorted(self.catalog.models)) or "none"
            raise NotFoundError(f"there is no model {request.model!r}; loaded are {names}")
        if served.error is not None:
            raise served.error
        if self.fleet.broken is not None:
            raise self.fleet.broken

    def _request_profile(self, model: StoredModel) -> None:
        inputs = {spec.name: spec.example_tensor() for spec in model.inputs}
        self.queue.push_back(
            Request(
                model.name,
                inputs,
                Future(),
                priority=_PROFILE_PRIORITY,
                profiling=True,
                request_id=self._new_id(),
            )
        )

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    # --- decisions, after every event

    def _turn(self) -> float | None:
        """Do what can be done now; return the seconds until the next turn at the latest."""
        if self._draining_until is not None and self._drained():
            self._end(UnavailableError("the switcher was closed before it was done"))
            return None
        self.catalog.retire(self.running[0].model if self.running is not None else "")
        self.catalog.build()
        self._expire()
        if self.fleet.broken is not None:
            self._fail_everything(self.fleet.broken)
        if self.running is None:
            self._start_next()
        if self.running is not None and self.options.prefetch:
            self._prefetch(self.running[0].model)
        if self.running is None and not len(self.queue) and self._draining_until is None:
            self.training.start_next(self._new_id())
        return self._next_timeout()

    def _expire(self) -> None:
        self.queue.expire(lambda _: self.counts.update(["expired"]))

    def _start_next(self) -> None:
        for request in self.queue.ordered():
            served = self.catalog.models[request.model]
            is_ready = request.profiling or served.ready.done()
            if self.catalog.is_leaving(request.model) or not is_ready:
                continue
            worker = self.fleet.idle(request.model)
            self.training.pause()
            if worker is None:
                return
            pinned = self.residency.pin(served)
            if pinned is None:
                self.residency.cancel_copies(keep=request.model)
                return
            self.queue.remove(request)
            if request.future.running() or request.future.set_running_or_notify_cancel():
                self._run(request, served, worker, pinned)
                return
            self.residency.unpin(request.model)

    def _run(self, request: Request, served: Served, worker: WorkerProcess, pinned: Pinned) -> None:
        self.running = (request, worker)
        request.started = time.monotonic()
        request.first_group = 0.0 if pinned.missing else request.started
        request.overlaps = bool(pinned.missing) and not served.runs_whole
        request.copied_bytes = pinned.copied_bytes
        worker.request_id = request.request_id
        if worker.loaded.get(request.model) != served.key:
            self.catalog.send_build(worker, served)
        buffer, descriptors = worker.buffers.announce()
        worker.send(
            {
                "op": "profile" if request.profiling else "infer",
                "id": request.request_id,
                "model": request.model,
                "offsets": pinned.offsets,
                "missing": pinned.missing,
                "whole": served.runs_whole,
                "buffer": buffer,
                "inputs": worker.buffers.current.write(request.inputs, 0),
                "outputs_at": _packed_bytes(request.inputs),
            },
            descriptors,
        )

    def _prefetch(self, running: str) -> None:
        """Copy the model of the next request while the running one computes, if there is space."""
        if self.residency.is_copying:
            return
        following = (one.model for one in self.queue.ordered() if one.model != running)
        name = next(following, None)
        if name is None or not self.catalog.can_copy(name):
            return
        served = self.catalog.models[name]
        if not self.residency.is_resident(served):
            self.counts["prefetches"] += self.residency.prefetch(served)

    def _next_timeout(self) -> float | None:
        moments = [
            self.queue.next_deadline(),
            self.fleet.check_starts(),
            self.catalog.check_builds(self.options.start_timeout_s),
        ]
        if self.running is not None:
            request, worker = self.running
            limit = request.started + self.options.run_timeout_s
            if time.monotonic() > limit:
                self._time_out(request, worker)
                return 0.0
            moments.append(limit)
        if self._draining_until is not None:
            moments.append(self._draining_until)
        moment = min(moments)
        return None if math.isinf(moment) else seconds_until(moment)

    def _time_out(self, request: Request, worker: WorkerProcess) -> None:
        limit = f"computed for more than {self.options.run_timeout_s:g} s"
        request.attempts = _MAX_ATTEMPTS
        text = f"model {request.model!r} {limit}; its worker was ended"
        _fail(request.future, OperationTimeoutError(text))
        self.fleet.lose(worker, limit)

    # --- events

    def _on_message(self, worker: WorkerProcess, message: Message, descriptors: list[int]) -> None:
        operation = message["op"]
        if operation == "ready":
            self.fleet.became_ready(worker)
        elif operation in ("loaded", "load_failed"):
            self.catalog.on_built(worker, message)
        elif self.training.on_message(worker, message, descriptors):
            return
        elif self.running is not None and worker is self.running[1]:
            request = self.running[0]
            if message["id"] == request.request_id:
                self._on_result(request, worker, message)

    def _on_arrived(self, model: str, group: int) -> None:
        if self.running is not None and self.running[0].model == model:
            request, worker = self.running
            request.first_group = request.first_group or time.monotonic()
            worker.send({"op": "arrived", "id": request.request_id, "group": group})

    def _on_copy_failed(self, model: str, error: Exception) -> None:
        if self.running is not None and self.running[0].model == model:
            request, worker = self.running
            failure = SegmentError(f"copying model {model!r} to the arena failed: {error}")
            _fail(request.future, failure)
            if request.profiling:
                self.catalog.fail(model, failure)
            worker.send({"op": "cancel", "id": request.request_id})

    def _on_result(self, request: Request, worker: WorkerProcess, message: Message) -> None:
        self.running = None
        self.residency.unpin(request.model)
        worker.last_model = request.model
        worker.release()
        if message["op"] == "failed" and request.profiling:
            self.catalog.on_profile_failed(request.model, error_of(message))
        elif message["op"] == "failed":
            self.counts["failed"] += 1
            _fail(request.future, error_of(message))
        elif message["op"] == "result" and request.profiling:
            self.catalog.on_profiled(request.model, message)
        elif message["op"] == "result":
            try:
                self._reply(request, worker, message)
            except Exception as error:  # a failure of one request must not end the others
                text = f"the reply of model {request.model!r} could not be read: {error}"
                _fail(request.future, UnavailableError(text))

    def _reply(self, request: Request, worker: WorkerProcess, message: Message) -> None:
        served = self.catalog.models.get(request.model)
        reply = Reply(
            request.model,
            served.model.version if served is not None else 0,
            worker.buffers.take(message["outputs"]),
            queue_s=request.started - request.arrived,
            switch_s=request.first_group - request.started + message["bind_s"],
            compute_s=message["compute_s"],
            copied_bytes=request.copied_bytes,
        )
        if not request.future.done():
            request.future.set_result(reply)
        self._record(reply, time.monotonic() - request.started, worker.pid, served)

    def _record(self, reply: Reply, total_s: float, pid: int, served: Served | None) -> None:
        kind = "cold" if reply.copied_bytes else "resident"
        if served is not None:
            served.counts[kind] += 1
            served.seconds[kind] = served.seconds.get(kind, 0.0) + total_s
        self.counts["served"] += 1
        self.history.append(
            {
                "model": reply.model,
                "kind": kind,
                "worker": pid,
                "at": time.time(),
                "queue_ms": reply.queue_s * 1e3,
                "switch_ms": reply.switch_s * 1e3,
                "compute_ms": reply.compute_s * 1e3,
                "total_ms": total_s * 1e3,
                "copied_bytes": reply.copied_bytes,
            }
        )

    def _on_lost(self, worker: WorkerProcess, reason: str) -> None:
        _log.warning("worker %d was lost: %s", worker.pid, reason)
        self.catalog.on_lost(worker, reason)
        self.training.on_lost(worker, reason)
        if self.running is not None and self.running[1] is worker:
            request = self.running[0]
            self.running = None
            self.residency.unpin(request.model)
            served = self.catalog.models.get(request.model)
            if worker.broke_memory and request.overlaps and served is not None:
                # It may have read weights without operators before they arrived.
                served.runs_whole = True
            elif worker.buffers.current.started == request.request_id:
                # A worker that dies before it starts the request costs the request no attempt.
                request.attempts += 1
            self._retry(
                request, f"worker {worker.pid} {reason} while it ran model {request.model!r}"
            )

    def _retry(self, request: Request, text: str) -> None:
        if request.attempts < _MAX_ATTEMPTS and request.model in self.catalog.models:
            self.counts["retried"] += 1
            self.queue.push_back(request)
            return
        error = PeerLostError(f"{text}; tried {request.attempts} times")
        if request.profiling:
            self.catalog.on_profile_failed(request.model, error)
        self.counts["failed"] += 1
        _fail(request.future, error)

    # --- failures and the end

    def _fail_waiting(self, model: str, error: TorchRelayError) -> None:
        for request in self.queue.ordered():
            if request.model == model:
                self.queue.remove(request)
                _fail(request.future, error)

    def _fail_everything(self, error: TorchRelayError) -> None:
        for request in self.queue.ordered():
            self.queue.remove(request)
            _fail(request.future, error)
        for served in self.catalog.models.values():
            served.fail(error)

    def _drained(self) -> bool:
        assert self._draining_until is not None
        busy = self.running is not None or self.training.running is not None or len(self.queue)
        return not busy or time.monotonic() >= self._draining_until

    def _crashed(self, error: Exception) -> None:
        """Fail everything: an error in this file must not leave callers waiting."""
        self.failure = UnavailableError(f"the switcher failed: {type(error).__name__}: {error}")
        self._end(self.failure)

    def _end(self, error: UnavailableError) -> None:
        self._ended = error
        is_busy = self.running is not None or self.training.running is not None
        self._fail_everything(error)
        if self.running is not None:
            _fail(self.running[0].future, error)
        self.training.fail_all(error)
        self.fleet.close(timeout_s=0.0 if is_busy else _EXIT_S)
        self.residency.close()
        self.loop.stop()


def _packed_bytes(inputs: Mapping[str, torch.Tensor]) -> int:
    return sum(align(tensor.nbytes) for tensor in inputs.values())


def _fail(future: Future[Any], error: TorchRelayError) -> None:
    """Set the error unless the future is done or cancelled."""
    if not future.done() and (future.running() or future.set_running_or_notify_cancel()):
        future.set_exception(error)

"""The daemon's state and decisions: residency, the running request, prefetch, training."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchrelay import errors, telemetry
from torchrelay.errors import (
    CapacityError,
    ModelError,
    NotFoundError,
    OperationTimeoutError,
    PeerLostError,
    SegmentError,
    TorchRelayError,
    UnavailableError,
)
from torchrelay.switching._arena import Arena
from torchrelay.switching._cache import SharedCache
from torchrelay.switching._channel import Message
from torchrelay.switching._contract import Link
from torchrelay.switching._copier import Copier, CopyJob
from torchrelay.switching._fleet import Fleet
from torchrelay.switching._groups import Grouped
from torchrelay.switching._loop import Loop, seconds_until
from torchrelay.switching._planner import Costs
from torchrelay.switching._process import WorkerProcess
from torchrelay.switching._profile import Profile, ProfileCache
from torchrelay.switching._queue import Reply, Request, RequestQueue
from torchrelay.switching._served import Served
from torchrelay.switching._store import StoredModel
from torchrelay.switching._tasks import Task
from torchrelay.switching._wire import pack, unpack

__all__ = ["Daemon", "Options"]

_MAX_ATTEMPTS = 2
_HISTORY = 100


@dataclass(frozen=True)
class Options:
    """What a switcher was started with."""

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
    """Everything here runs in the loop's thread unless it says otherwise."""

    def __init__(self, cache: SharedCache, link: Link, costs: Costs, options: Options) -> None:
        self.options = options
        self.arena = Arena(cache.size_bytes)
        self.costs = costs
        self.models: dict[str, Served] = {}
        self.queue = RequestQueue(options.queue_limit, options.client_limit)
        self.history: deque[dict[str, Any]] = deque(maxlen=_HISTORY)
        self.counts: Counter[str] = Counter()
        self.running: tuple[Request, WorkerProcess] | None = None
        self.training: tuple[Task, WorkerProcess, bool] | None = None  # True: asked to pause
        self.tasks: deque[Task] = deque()
        self.loop = Loop(self._pump)
        self._cache = cache
        self._link = link
        self._copier = Copier(link)
        self._copies: dict[str, CopyJob] = {}
        self._leaving: dict[str, StoredModel] = {}
        self._profiles = ProfileCache(options.profiles)
        self._next_id = 1
        self._draining_until: float | None = None
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

    # --- asked for by callers

    def start(self) -> None:
        """Start the workers and the loop; from the caller's thread."""
        self.loop.post(self.fleet.fill)
        self.loop.start()

    def add_model(self, model: StoredModel, priority: int) -> Future[None]:
        """Serve `model`; the future is done when its first request can run."""
        if sum(Grouped.one_group(model.layout).sizes()) > self.arena.size_bytes:
            raise CapacityError(
                f"model {model.name!r} takes {model.size_bytes} bytes, the arena has {self.arena.size_bytes}; "
                "start with larger arena_bytes"
            )
        if model.name in self.models:
            self.remove_model(model.name, "was replaced")
        served = Served(model, Grouped.one_group(model.layout), priority, Future())
        self.models[model.name] = served
        return served.ready

    def remove_model(self, name: str, reason: str = "was unloaded") -> None:
        served = self.models.pop(name, None)
        if served is None:
            raise NotFoundError(f"there is no model {name!r} to unload")
        error = NotFoundError(f"model {name!r} {reason}")
        for request in self.queue.ordered():
            if request.model == name:
                self.queue.remove(request)
                _fail(request.future, error)
        if not served.ready.done():
            served.ready.set_exception(error)
        self._leaving[name] = served.model

    def submit(self, request: Request) -> None:
        """Queue `request`, or fail its future."""
        self._expire()  # a request whose client has gone must not count against this one
        try:
            self._check(request)
            self.queue.push(request)
        except TorchRelayError as error:
            self.counts["rejected"] += 1
            _fail(request.future, error)

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def train(self, task: Task) -> None:
        if self._draining_until is not None:
            task.future.set_exception(UnavailableError("the switcher is shutting down"))
            return
        self.tasks.append(task)

    def cancel_task(self, task: Task) -> None:
        task.cancelled = True
        if task in self.tasks:
            self.tasks.remove(task)
            task.future.cancel()
            task.close()
        elif self.training is not None and self.training[0] is task:
            self._pause_training()

    def drain(self, grace_s: float) -> None:
        """Take no more requests and end when those queued are done, or `grace_s` has passed."""
        self._draining_until = time.monotonic() + grace_s
        self._pause_training()

    def _check(self, request: Request) -> None:
        if self._draining_until is not None:
            raise UnavailableError("the switcher is shutting down")
        served = self.models.get(request.model)
        if served is None:
            names = ", ".join(sorted(self.models)) or "none"
            raise NotFoundError(f"there is no model {request.model!r}; loaded are {names}")
        if served.error is not None:
            raise served.error
        if self.fleet.broken is not None:
            raise self.fleet.broken

    # --- decisions, after every event

    def _pump(self) -> float | None:
        if self._draining_until is not None and self._drained():
            self._end()
            return None
        self._retire_models()
        self._load_models()
        self._expire()
        if self.fleet.broken is not None:
            self._fail_everything(self.fleet.broken)
        if self.running is None:
            self._start_next()
        if self.running is not None and self.options.prefetch:
            self._prefetch()
        self._schedule_training()
        return self._next_timeout()

    def _expire(self) -> None:
        self.queue.expire(lambda _: self.counts.update(["expired"]))

    def _next_timeout(self) -> float | None:
        moments = [self.queue.next_deadline(), self.fleet.check_starts()]
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
        request.attempts = _MAX_ATTEMPTS
        _fail(
            request.future,
            OperationTimeoutError(
                f"model {request.model!r} computed for more than {self.options.run_timeout_s:g} s; "
                "its worker was ended"
            ),
        )
        self.fleet.lose(worker, f"computed for more than {self.options.run_timeout_s:g} s")

    def _retire_models(self) -> None:
        """Give back what unloaded or regrouped models hold, once nobody uses it."""
        for name, model in list(self._leaving.items()):
            if name in self._copies:
                in_use = self.running is not None and self.running[0].model == name
                self._copies[name].cancelled |= not in_use
            elif not self.arena.is_pinned(name):
                self.arena.evict(name)
                self._link.unregister(model.segment.tensor((model.size_bytes,), torch.uint8))
                del self._leaving[name]
                for worker in self.fleet:
                    worker.loaded.pop(name, None)
                    worker.unwanted.add(name)
        for worker in self.fleet:
            if worker.idle and worker.unwanted:
                for name in worker.unwanted - set(self.models):
                    self._send(worker, {"op": "unload", "model": name})
                worker.unwanted.clear()
        for served in self.models.values():
            name = served.model.name
            if served.regroup is not None and name not in self._copies and not self.arena.is_pinned(name):
                self.arena.evict(name)
                served.apply_regroup()
                if not served.ready.done():
                    served.ready.set_result(None)

    def _load_models(self) -> None:
        """Have idle workers build modules, and profile models that are built."""
        for worker in list(self.fleet):
            for served in self.models.values():
                if not worker.idle or served.model.name in self._leaving:
                    break
                if served.error is None and worker.loaded.get(served.model.name) != served.key:
                    worker.loading.add(served.model.name)
                    self._send_load(worker, served)

    def _send_load(self, worker: WorkerProcess, served: Served) -> None:
        model, known = served.model, worker.loaded.get(served.model.name)
        replace = known is None or known[0] != model.version
        worker.loaded[model.name] = served.key
        self._send(
            worker,
            {
                "op": "load",
                "model": model.name,
                "replace": replace,
                "factory": model.factory.reference,
                "kwargs": model.factory.kwargs,
                "seed": model.factory.seed,
                "layout": model.layout.to_json() if replace else None,
                "groups": served.grouped.to_json(),
            },
        )

    def _start_next(self) -> None:
        for request in self.queue.ordered():
            served = self.models[request.model]
            if request.model in self._leaving or not (request.profiling or served.ready.done()):
                continue
            worker = self.fleet.idle(request.model)
            if self.training is not None:
                self._pause_training()
            if worker is None:
                return
            copied = self._copy_in(served, for_request=request)
            if copied is None:
                for name, job in self._copies.items():
                    job.cancelled = job.cancelled or name != request.model
                return
            self.queue.remove(request)
            if not request.future.running() and not request.future.set_running_or_notify_cancel():
                self.arena.release(request.model)
                continue
            self._run(request, served, worker, *copied)
            return

    def _copy_in(
        self, served: Served, for_request: Request | None
    ) -> tuple[tuple[int, ...], list[int]] | None:
        """Reserve the model's groups and start copying what is missing.

        Returns the groups' offsets and those still missing in the order of their arrival, with the model pinned
        for `for_request`; None if the space is in use.
        """
        name = served.model.name
        job = self._copies.get(name)
        if job is not None and job.cancelled:
            return None
        sizes = served.grouped.sizes()
        placement = self.arena.reserve(name, sizes, priority=served.priority)
        if placement is None:
            return None
        self.counts["evicted_groups"] += len(placement.evicted)
        if job is None and placement.missing:
            job = self._copy_job(served, placement.offsets, placement.missing)
            self._copies[name] = job
            self.arena.reserve(name, sizes, priority=served.priority)  # the copy's own pin
            if for_request is not None:
                for_request.copied_bytes = job.size_bytes
            self.counts["copied_bytes"] += job.size_bytes
            self._copier.submit(job)
        if for_request is None:
            self.arena.release(name)
        return placement.offsets, [g for g, _ in job.groups if g in job.pending] if job is not None else []

    def _copy_job(self, served: Served, offsets: tuple[int, ...], missing: tuple[int, ...]) -> CopyJob:
        groups = [(group, served.copies(group, offsets[group])) for group in missing]
        loop = self.loop
        return CopyJob(
            served.model.name,
            groups,
            arrived=lambda job, group: loop.post(lambda: self._on_arrived(job, group)),
            ended=lambda job, error: loop.post(lambda: self._on_copied(job, error)),
        )

    def _run(
        self,
        request: Request,
        served: Served,
        worker: WorkerProcess,
        offsets: tuple[int, ...],
        missing: list[int],
    ) -> None:
        request.started = time.monotonic()
        request.first_group = 0.0 if missing else request.started
        self.running = (request, worker)
        worker.request_id = request.request_id
        if worker.loaded.get(request.model) != served.key:
            self._send_load(worker, served)
        inputs = pack(worker.requests, request.inputs, 0)
        self._send(
            worker,
            {
                "op": "profile" if request.profiling else "infer",
                "id": request.request_id,
                "model": request.model,
                "offsets": offsets,
                "missing": missing,
                "inputs": inputs,
                "outputs_at": _packed_bytes(request.inputs),
            },
        )

    def _prefetch(self) -> None:
        """Copy the model of the next request while the running one computes, if there is space."""
        assert self.running is not None
        if self._copies:
            return
        for request in self.queue.ordered():
            if request.model != self.running[0].model:
                served = self.models[request.model]
                ready = served.ready.done() and served.regroup is None and request.model not in self._leaving
                if ready and not self.arena.is_resident(request.model, len(served.grouped.groups)):
                    self.counts["prefetches"] += self._copy_in(served, None) is not None
                return

    # --- training

    def _schedule_training(self) -> None:
        if self.training is not None or self.running is not None or not self.tasks or len(self.queue):
            return
        worker = self.fleet.idle("")
        if worker is None or self._draining_until is not None:
            return
        task = self.tasks.popleft()
        worker.request_id = self.new_id()
        self.training = (task, worker, False)
        self._send(
            worker,
            {
                "op": "train",
                "id": worker.request_id,
                "task": task.name,
                "factory": task.factory.reference,
                "kwargs": task.factory.kwargs,
                "seed": task.factory.seed,
                "steps": task.steps,
                "save_every": task.save_every,
            },
            task.state,
        )

    def _pause_training(self) -> None:
        if self.training is None or self.training[2]:
            return
        task, worker, _ = self.training
        self.training = (task, worker, True)
        self._send(worker, {"op": "pause", "id": worker.request_id})

    def _on_training(self, worker: WorkerProcess, message: Message, descriptors: list[int]) -> None:
        assert self.training is not None
        task = self.training[0]
        task.advance(message["step"], *descriptors)
        if message["op"] == "saved":
            return
        self._release_worker(worker)
        self.training = None
        if message["op"] == "trained":
            task.finish()
        elif task.cancelled:
            task.close()
            task.future.cancel()
        elif self._draining_until is not None:
            self._fail_task(task, UnavailableError("the switcher was closed before the task was done"))
        else:
            task.preemptions += 1
            self.tasks.appendleft(task)

    def _fail_task(self, task: Task, error: TorchRelayError) -> None:
        task.close()
        if not task.future.done():
            task.future.set_exception(error)

    # --- events

    def _on_message(self, worker: WorkerProcess, message: Message, descriptors: list[int]) -> None:
        operation = message["op"]
        if operation == "ready":
            self.fleet.became_ready(worker)
        elif operation in ("loaded", "load_failed"):
            self._on_loaded(worker, message)
        elif operation in ("saved", "paused", "trained"):
            self._on_training(worker, message, descriptors)
        elif self.training is not None and worker is self.training[1]:
            task = self.training[0]
            self._release_worker(worker)
            self.training = None
            self._fail_task(task, _error_of(message))
        elif self.running is not None and worker is self.running[1] and message["id"] == worker.request_id:
            if operation == "started":  # a worker that dies before costs the request no attempt
                self.running[0].attempts += 1
            else:
                self._on_result(self.running[0], worker, message)

    def _on_loaded(self, worker: WorkerProcess, message: Message) -> None:
        worker.loading.discard(message["model"])
        served = self.models.get(message["model"])
        if served is None or served.profiling or served.ready.done():
            return
        if message["op"] == "load_failed":
            self._fail_model(served, _error_of(message))
            return
        served.profiling = True
        profile = self._profiles.load(self._profile_key(served))
        if profile is not None:
            self._use_profile(served, profile)
            return
        model = served.model
        request = Request(self.new_id(), model.name, {}, Future(), profiling=True, priority=1 << 30)
        request.inputs = {spec.name: spec.example() for spec in model.inputs}
        self.queue.push_back(request)

    def _profile_key(self, served: Served) -> str:
        device = f"{self._cache.device.type}-{torch.get_num_threads()}-{self.options.threads}"
        return f"{served.model.fingerprint()}-{device}-{torch.__version__}".replace("/", "_")

    def _use_profile(self, served: Served, profile: Profile) -> None:
        policy = self.options.grouping
        served.regroup = Grouped.of_profile(served.model.layout, profile, self.costs, policy)

    def _fail_model(self, served: Served, error: TorchRelayError) -> None:
        served.error = error
        if not served.ready.done():
            served.ready.set_exception(error)
        for request in self.queue.ordered():
            if request.model == served.model.name:
                self.queue.remove(request)
                _fail(request.future, error)

    def _on_arrived(self, job: CopyJob, group: int) -> None:
        self.arena.mark_ready(job.model, group)
        job.pending.discard(group)
        if self.running is not None and self.running[0].model == job.model:
            request, worker = self.running
            request.first_group = request.first_group or time.monotonic()
            self._send(worker, {"op": "arrived", "id": request.request_id})

    def _on_copied(self, job: CopyJob, error: Exception | None) -> None:
        del self._copies[job.model]
        self.arena.release(job.model)
        if error is None:
            return
        telemetry.event("switching.copy_failed", model=job.model, error=str(error))
        if self.running is not None and self.running[0].model == job.model:
            request, worker = self.running
            _fail(request.future, SegmentError(f"copying model {job.model!r} to the arena failed: {error}"))
            self._send(worker, {"op": "cancel", "id": request.request_id})

    def _on_result(self, request: Request, worker: WorkerProcess, message: Message) -> None:
        self._finish(request, worker)
        served = self.models.get(request.model)
        if message["op"] == "failed" and not request.profiling:
            self.counts["failed"] += 1
            _fail(request.future, _error_of(message))
        elif request.profiling and served is not None:
            if message["op"] == "failed":
                self._fail_model(served, _error_of(message))
            elif "profile" in message:
                profile = Profile.from_json(message["profile"])
                self._profiles.save(self._profile_key(served), profile)
                self._use_profile(served, profile)
        elif message["op"] == "result":
            self._reply(request, worker, message, served)

    def _reply(
        self, request: Request, worker: WorkerProcess, message: Message, served: Served | None
    ) -> None:
        outputs = unpack(worker.requests, message["outputs"])
        reply = Reply(
            request.model,
            served.model.version if served is not None else 0,
            outputs,
            queue_s=request.started - request.arrived,
            switch_s=request.first_group - request.started + message["bind_s"],
            compute_s=message["compute_s"],
            copied_bytes=request.copied_bytes,
        )
        self._record(reply, request, worker, served)
        if not request.future.done():
            request.future.set_result(reply)

    def _record(self, reply: Reply, request: Request, worker: WorkerProcess, served: Served | None) -> None:
        total_s = time.monotonic() - request.started
        kind = "cold" if reply.copied_bytes else "resident"
        if served is not None:
            served.counts[kind] += 1
            served.seconds[kind] = served.seconds.get(kind, 0.0) + total_s
        self.counts["served"] += 1
        telemetry.count("switching.requests", model=request.model, kind=kind)
        self.history.append(
            {
                "model": request.model,
                "kind": kind,
                "worker": worker.pid,
                "at": time.time(),
                "queue_ms": reply.queue_s * 1e3,
                "switch_ms": reply.switch_s * 1e3,
                "compute_ms": reply.compute_s * 1e3,
                "total_ms": total_s * 1e3,
                "copied_bytes": reply.copied_bytes,
            }
        )

    def _finish(self, request: Request, worker: WorkerProcess) -> None:
        self.running = None
        self.arena.release(request.model)
        worker.last_model = request.model
        self._release_worker(worker)

    def _release_worker(self, worker: WorkerProcess) -> None:
        worker.request_id = 0
        worker.last_used = time.monotonic()

    def _on_lost(self, worker: WorkerProcess, reason: str) -> None:
        telemetry.event("switching.worker_lost", pid=worker.pid, reason=reason)
        if self.running is not None and self.running[1] is worker:
            request = self.running[0]
            self.running = None
            self.arena.release(request.model)
            self._retry(request, f"worker {worker.pid} {reason} while it ran model {request.model!r}")
        if self.training is not None and self.training[1] is worker:
            task = self.training[0]
            self.training = None
            task.losses += 1
            if task.cancelled:
                task.close()
                task.future.cancel()
            elif task.losses > _MAX_ATTEMPTS:
                text = f"worker {worker.pid} {reason} while it ran task {task.name!r}, for the {task.losses}. time"
                self._fail_task(task, PeerLostError(text))
            else:
                self.tasks.appendleft(task)

    def _retry(self, request: Request, text: str) -> None:
        served = self.models.get(request.model)
        if request.attempts < _MAX_ATTEMPTS and served is not None:
            self.counts["retried"] += 1
            self.queue.push_back(request)
            return
        error = PeerLostError(f"{text}; tried {request.attempts} times")
        if request.profiling and served is not None:
            self._fail_model(served, error)
        self.counts["failed"] += 1
        _fail(request.future, error)

    def _fail_everything(self, error: TorchRelayError) -> None:
        for request in self.queue.ordered():
            self.queue.remove(request)
            _fail(request.future, error)
        for served in self.models.values():
            if not served.ready.done():
                served.ready.set_exception(error)

    def _send(self, worker: WorkerProcess, message: Message, descriptors: Any = ()) -> None:
        """Send; a dead worker is noticed when its channel is read."""
        try:
            worker.channel.send(message, descriptors)
        except PeerLostError:
            telemetry.event("switching.send_failed", pid=worker.pid)

    # --- the end

    def _drained(self) -> bool:
        assert self._draining_until is not None
        busy = self.running is not None or self.training is not None or len(self.queue)
        return not busy or time.monotonic() >= self._draining_until

    def _end(self) -> None:
        error = UnavailableError("the switcher was closed before the request was done")
        self._fail_everything(error)
        if self.running is not None:
            _fail(self.running[0].future, error)
        for task in [*self.tasks, *([self.training[0]] if self.training else [])]:
            self._fail_task(task, UnavailableError("the switcher was closed before the task was done"))
        for job in self._copies.values():
            job.cancelled = True
        busy = self.running is not None or self.training is not None
        self.fleet.close(timeout_s=0.0 if busy else 5.0)
        self._copier.close()
        self.loop.stop()


def _packed_bytes(inputs: Mapping[str, torch.Tensor]) -> int:
    return sum(-(-tensor.nbytes // 512) * 512 for tensor in inputs.values())


def _fail(future: Future[Any], error: TorchRelayError) -> None:
    """Set the error unless the future is done or cancelled."""
    if not future.done() and (future.running() or future.set_running_or_notify_cancel()):
        future.set_exception(error)


def _error_of(message: Message) -> TorchRelayError:
    """Make the worker's error again, of the same type."""
    kind = getattr(errors, str(message["error"]), ModelError)
    error: TorchRelayError = kind(str(message["text"]))
    return error

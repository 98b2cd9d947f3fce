"""The request that runs: its start on a worker, and its result, loss or timeout."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torchrelay.errors import (
    ModelError,
    OperationTimeoutError,
    PeerLostError,
    SegmentError,
    TorchRelayError,
    UnavailableError,
    from_json,
)
from torchrelay.switching import _messages
from torchrelay.switching._catalog import Catalog
from torchrelay.switching._contract import align
from torchrelay.switching._fleet import Fleet
from torchrelay.switching._process import WorkerProcess
from torchrelay.switching._queue import Reply, Request, RequestQueue
from torchrelay.switching._residency import Pinned, Residency
from torchrelay.switching._served import Served

__all__ = ["Dispatcher"]

_MAX_ATTEMPTS = 2
_HISTORY = 100


class Dispatcher:
    """Runs one request at a time. The loop's lock protects it."""

    def __init__(
        self,
        queue: RequestQueue,
        catalog: Catalog,
        residency: Residency,
        fleet: Fleet,
        counts: Counter[str],
        *,
        run_timeout_s: float,
        later: Callable[[Callable[[], object]], None],
    ) -> None:
        """`later` runs a function when the lock is free."""
        self.request: Request | None = None  # what runs
        self.worker: WorkerProcess | None = None  # where
        self.history: deque[dict[str, Any]] = deque(maxlen=_HISTORY)
        self._served: Served | None = None
        self._queue = queue
        self._catalog = catalog
        self._residency = residency
        self._fleet = fleet
        self._counts = counts
        self._run_timeout_s = run_timeout_s
        self._later = later

    @property
    def model(self) -> str:
        """The model of the request that runs, or ""."""
        return self.request.model if self.request is not None else ""

    def start_next(self, pause_training: Callable[[], None]) -> None:
        """Start the first request that can run, if a worker and space in the arena are free."""
        for request in self._queue:
            served = self._catalog.models[request.model]
            if self._catalog.is_leaving(request.model) or not (
                request.profiled or served.ready.done()
            ):
                continue
            worker = self._fleet.idle(request.model)
            pause_training()
            if worker is None:
                return
            pinned = self._residency.pin(served)
            if pinned is None:
                self._residency.cancel_copies(keep=request.model)
                return
            self._queue.remove(request)
            if request.future.running() or request.future.set_running_or_notify_cancel():
                self._start(request, served, worker, pinned)
                return
            self._residency.unpin(request.model)

    def check_time(self) -> float:
        """End a request that computes for too long; return the time of the next check."""
        if self.request is None or self.worker is None:
            return math.inf
        limit = self.request.started + self._run_timeout_s
        if time.monotonic() <= limit:
            return limit
        reason = f"computed for more than {self._run_timeout_s:g} s"
        self.request.attempts = _MAX_ATTEMPTS
        text = f"model {self.request.model!r} {reason}; its worker was ended"
        self.fail(self.request, OperationTimeoutError(text))
        self._fleet.lose(self.worker, reason)
        return 0.0

    def fail(self, request: Request, error: TorchRelayError) -> None:
        """Set the request's error, unless it has a result or was cancelled."""
        future = request.future

        def fail() -> None:
            if not future.done() and (future.running() or future.set_running_or_notify_cancel()):
                future.set_exception(error)

        self._later(fail)

    # --- events

    def on_arrived(self, model: str, group: int) -> None:
        """Pass on that a group of a model is in place."""
        if self.request is not None and self.worker is not None and self.model == model:
            self.request.first_group = self.request.first_group or time.monotonic()
            self.worker.send(_messages.Arrived(self.request.request_id, group))

    def on_copy_failed(self, model: str, error: Exception) -> None:
        """Fail the request whose model could not be copied."""
        if self.request is not None and self.worker is not None and self.model == model:
            failure = SegmentError(f"copying model {model!r} to the arena failed: {error}")
            self.fail(self.request, failure)
            if self.request.profiled is not None:
                self._catalog.fail(self.request.profiled, failure)
            self.worker.send(_messages.Stop(self.request.request_id))

    def on_message(self, message: object) -> None:
        """Complete the request that runs."""
        request, worker, served = self._ended()
        worker.last_model = request.model
        worker.release()
        if isinstance(message, _messages.Failed):
            error = from_json(message.error, ModelError)
            if request.profiled is not None:
                self._catalog.on_profile_failed(request.profiled, error)
                return
            self._counts["failed"] += 1
            self.fail(request, error)
        elif isinstance(message, _messages.Result) and request.profiled is not None:
            if message.profile is not None:
                self._catalog.on_profiled(request.profiled, message.profile)
        elif isinstance(message, _messages.Result):
            try:
                self._reply(request, worker, served, message)
            except Exception as error:  # a failure of one request must not end the others
                text = f"the reply of model {request.model!r} could not be read: {error}"
                self.fail(request, UnavailableError(text))

    def on_lost(self, worker: WorkerProcess, reason: str) -> None:
        """Run the request again whose worker has died, or fail it."""
        if self.worker is not worker:
            return
        request, _, served = self._ended()
        if worker.broke_memory and request.overlaps:
            # It may have read weights without operators before they arrived.
            served.runs_whole = True
        elif worker.buffers.current.started == request.request_id:
            # A worker that dies before it starts the request costs the request no attempt.
            request.attempts += 1
        wanted = request.profiled or self._catalog.models.get(request.model)
        is_served = wanted is not None and self._catalog.models.get(request.model) is wanted
        if request.attempts < _MAX_ATTEMPTS and is_served:
            self._counts["retried"] += 1
            self._queue.push_back(request)
            return
        error = PeerLostError(
            f"worker {worker.pid} {reason} while it ran model {request.model!r}; tried "
            f"{request.attempts} times"
        )
        if request.profiled is not None:
            self._catalog.on_profile_failed(request.profiled, error)
        self._counts["failed"] += 1
        self.fail(request, error)

    def _start(
        self, request: Request, served: Served, worker: WorkerProcess, pinned: Pinned
    ) -> None:
        self.request, self.worker, self._served = request, worker, served
        request.started = time.monotonic()
        request.first_group = 0.0 if pinned.missing else request.started
        request.overlaps = bool(pinned.missing) and not served.runs_whole
        request.copied_bytes = pinned.copied_bytes
        worker.request_id = request.request_id
        if worker.loaded.get(request.model) != served.key:
            self._catalog.send_build(worker, served)
        buffer, descriptors = worker.buffers.announce()
        run = _messages.Run(
            request.request_id,
            request.model,
            pinned.offsets,
            pinned.missing,
            whole=served.runs_whole or request.profiled is not None,
            buffer=buffer,
            inputs=worker.buffers.current.write(request.inputs, 0),
            outputs_at=sum(align(tensor.nbytes) for tensor in request.inputs.values()),
            is_profile=request.profiled is not None,
        )
        worker.send(run, descriptors)

    def _ended(self) -> tuple[Request, WorkerProcess, Served]:
        request, worker, served = self.request, self.worker, self._served
        assert request is not None and worker is not None and served is not None
        self.request = self.worker = self._served = None
        self._residency.unpin(request.model)
        return request, worker, served

    def _reply(
        self, request: Request, worker: WorkerProcess, served: Served, result: _messages.Result
    ) -> None:
        reply = Reply(
            request.model,
            served.model.version,
            worker.buffers.take(result.outputs),
            queue_s=request.started - request.arrived,
            switch_s=request.first_group - request.started + result.bind_s,
            compute_s=result.compute_s,
            copied_bytes=request.copied_bytes,
        )
        self._later(lambda: _set_result(request.future, reply))
        total_s = time.monotonic() - request.started
        kind = "cold" if reply.copied_bytes else "resident"
        served.counts[kind] += 1
        served.seconds[kind] = served.seconds.get(kind, 0.0) + total_s
        self._counts["served"] += 1
        self.history.append(
            {
                "model": reply.model,
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


def _set_result(future: Future[Reply], reply: Reply) -> None:
    if not future.done():  # the end of the daemon may have come first
        future.set_result(reply)

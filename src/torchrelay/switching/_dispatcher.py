"""The request that runs: its start on a worker, and its result, loss or timeout."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchrelay.config import Switching
from torchrelay.errors import (
    ModelError,
    NotFoundError,
    SegmentError,
    TorchRelayError,
    UnavailableError,
    from_json,
)
from torchrelay.switching import _messages
from torchrelay.switching._batching import gather, merge, split, waits_until
from torchrelay.switching._catalog import Catalog
from torchrelay.switching._contract import align
from torchrelay.switching._fleet import Fleet, WorkerProcess
from torchrelay.switching._loop import Loop
from torchrelay.switching._queue import Reply, Request, RequestQueue
from torchrelay.switching._residency import Pinned, Residency, Served

__all__ = ["Dispatcher"]

_MAX_ATTEMPTS = 2
_HISTORY = 100


@dataclass(eq=False)
class _Run:
    """A request on a worker."""

    request: Request
    worker: WorkerProcess
    served: Served
    copied_bytes: int
    overlaps: bool  # it runs while its model is copied, or is profiled as if it did
    started: float
    first_group: float  # when the first missing group was in place; 0: not yet


@dataclass(eq=False)
class Dispatcher:
    """Runs one request at a time. The loop's lock protects it."""

    catalog: Catalog
    queue: RequestQueue
    residency: Residency
    fleet: Fleet
    counts: Counter[str]
    loop: Loop
    options: Switching
    fills_batches: bool = True  # False: nothing more comes to join one
    batch_starts_at: float = math.inf  # the latest for one that waits for more requests
    history: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    _run: _Run | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.residency.on_arrived = self._on_arrived
        self.residency.on_failed = self._on_copy_failed

    @property
    def request(self) -> Request | None:
        """What runs."""
        return self._run.request if self._run is not None else None

    @property
    def worker(self) -> WorkerProcess | None:
        """Where it runs."""
        return self._run.worker if self._run is not None else None

    @property
    def model(self) -> str:
        """The model of the request that runs, or ""."""
        return self._run.request.model if self._run is not None else ""

    def start_next(self, pause_training: Callable[[], None]) -> None:
        """Start the first request that can run, if none does and a worker and space are free."""
        if self._run is not None:
            return
        self.batch_starts_at = math.inf
        for request in self.queue:
            served = self.catalog.models[request.model]
            if self.catalog.is_leaving(request.model) or not (
                request.is_profile or served.ready.done()
            ):
                continue
            batch = self._gather(request, served)
            if not batch:
                continue
            worker = self.fleet.idle(request.model)
            pause_training()
            if worker is None:
                return
            pinned = self.residency.pin(served)
            if pinned is None:
                self.residency.cancel_copies(keep=request.model)
                return
            running = []
            for one in batch:
                self.queue.remove(one)
                if one.future.running() or one.future.set_running_or_notify_cancel():
                    running.append(one)
            if running:
                self._start(self._merged(running), served, worker, pinned)
                return
            self.residency.unpin(request.model)

    def fail(self, request: Request, error: TorchRelayError) -> None:
        """Set the request's error, unless it has a result or was cancelled.

        The requests of a batch run again, each alone.
        """
        ends = isinstance(error, UnavailableError | NotFoundError)
        if request.parts and not ends and request.model in self.catalog.models:
            for part in request.parts:
                if not part.is_alone:  # of two failures of one run, the first counts
                    part.is_alone = True
                    self.queue.push_back(part)
            return
        for one in request.parts or (request,):
            self.loop.later(partial(one.fail, error))

    # --- events

    def _on_arrived(self, model: str, group: int) -> None:
        """Pass on that a group of a model is in place."""
        if self._run is not None and self.model == model:
            self._run.first_group = self._run.first_group or time.monotonic()
            self._run.worker.send(_messages.Arrived(self._run.request.request_id, group))

    def _on_copy_failed(self, model: str, error: Exception) -> None:
        """Fail the request whose model could not be copied."""
        if self._run is not None and self.model == model:
            text = f"copying model {model!r} to the arena failed: {error}"
            self.fail(self._run.request, SegmentError(text))
            self._run.worker.send(_messages.Stop(self._run.request.request_id))

    def on_message(self, message: object) -> None:
        """Complete the request that runs."""
        run = self._ended()
        run.worker.last_model = run.request.model
        run.worker.release()
        if isinstance(message, _messages.Failed):
            self.counts["failed"] += not (run.request.is_profile or run.request.parts)
            self.fail(run.request, from_json(message.error, ModelError))
        elif isinstance(message, _messages.Result):
            try:
                result = message.profile if run.request.is_profile else self._reply(run, message)
            except Exception as error:  # a failure of one request must not end the others
                text = f"the reply of model {run.request.model!r} could not be read: {error}"
                self.fail(run.request, UnavailableError(text))
            else:
                self.loop.later(lambda: run.request.succeed(result))

    def on_lost(self, worker: WorkerProcess) -> None:
        """Run the request again whose worker has died, or fail it."""
        if self.worker is not worker:
            return
        run = self._ended()
        request = run.request
        if worker.broke_memory and run.overlaps:
            # It may have read weights without operators before they arrived.
            run.served.runs_whole = True
        elif worker.buffers.current.started == request.request_id:
            # A worker that dies before it starts the request costs the request no attempt.
            request.attempts += 1
        can_retry = request.attempts < _MAX_ATTEMPTS and not worker.is_late
        if can_retry and request.model in self.catalog.models and not request.parts:
            self.counts["retried"] += 1
            self.queue.push_back(request)
            return
        self.counts["failed"] += not (request.is_profile or request.parts)
        did = f"ran model {request.model!r}; tried {request.attempts} times"
        self.fail(request, worker.loss(did))

    def _gather(self, request: Request, served: Served) -> list[Request]:
        """Return the requests to run with `request`; none while more may join them."""
        if served.model.max_batch_size < 2:
            return [request]
        batch = gather(request, self.queue, served.model, self.options.request_bytes)
        until = waits_until(batch, served.model)
        if time.monotonic() >= until or not self.fills_batches:
            return batch
        self.batch_starts_at = min(self.batch_starts_at, until)
        return []

    def _merged(self, requests: list[Request]) -> Request:
        if len(requests) == 1:
            return requests[0]
        batch = merge(requests)
        batch.future.set_running_or_notify_cancel()
        batch.future.add_done_callback(lambda future: _split(batch.parts, future))
        return batch

    def _start(
        self, request: Request, served: Served, worker: WorkerProcess, pinned: Pinned
    ) -> None:
        self.batch_starts_at = math.inf
        now = time.monotonic()
        overlaps = (bool(pinned.missing) or request.is_profile) and not served.runs_whole
        first_group = 0.0 if pinned.missing else now
        self._run = _Run(request, worker, served, pinned.copied_bytes, overlaps, now, first_group)
        worker.request_id = request.request_id
        worker.expect_answer(self.options.run_timeout_s)
        if worker.loaded.get(request.model) != served.key:
            self.catalog.send_build(worker, served)
        message = _messages.Run(
            request.request_id,
            request.model,
            pinned.offsets,
            pinned.missing,
            whole=served.runs_whole,
            buffer=worker.buffers.index,
            inputs=worker.buffers.current.write(request.inputs, 0),
            outputs_at=sum(align(tensor.nbytes) for tensor in request.inputs.values()),
            is_profile=request.is_profile,
        )
        worker.send(message)

    def _ended(self) -> _Run:
        run, self._run = self._run, None
        assert run is not None
        self.residency.unpin(run.request.model)
        return run

    def _reply(self, run: _Run, result: _messages.Result) -> Reply:
        reply = Reply(
            run.request.model,
            run.served.model.version,
            run.worker.buffers.take(result.outputs),
            queue_s=run.started - run.request.arrived,
            switch_s=run.first_group - run.started + result.bind_s,
            compute_s=result.compute_s,
            copied_bytes=run.copied_bytes,
        )
        total_s = time.monotonic() - run.started
        requests = len(run.request.parts) or 1
        run.served.counts[reply.kind] += requests
        run.served.seconds[reply.kind] += total_s
        self.counts["served"] += requests
        self.history.append(
            {
                "model": reply.model,
                "kind": reply.kind,
                "requests": requests,
                "worker": run.worker.pid,
                "at": time.time(),
                "queue_ms": reply.queue_s * 1e3,
                "switch_ms": reply.switch_s * 1e3,
                "compute_ms": reply.compute_s * 1e3,
                "total_ms": total_s * 1e3,
                "copied_bytes": reply.copied_bytes,
            }
        )
        return reply


def _split(parts: tuple[Request, ...], future: Future[Reply]) -> None:
    """Answer the requests of a batch."""
    try:
        for part, reply in zip(parts, split(future.result(), parts), strict=True):
            part.succeed(reply)
    except TorchRelayError as error:
        for part in parts:
            part.fail(error)

"""The request that runs: its start on a worker, and its result, loss or timeout.

Requests to a model with dynamic batching that differ in their first dimension only run as one.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch

from torchrelay.errors import (
    ArgumentError,
    ModelError,
    TorchRelayError,
    UnavailableError,
    from_json,
)
from torchrelay.switching.daemon._fleet import WorkerProcess
from torchrelay.switching.daemon._queue import Reply, Request, RequestQueue
from torchrelay.switching.daemon._residency import Pinned
from torchrelay.switching.daemon._runs import Run, Runs
from torchrelay.switching.daemon._served import Served, State
from torchrelay.switching.daemon._shares import Rank
from torchrelay.switching.models._store import StoredModel
from torchrelay.switching.worker import _messages

__all__ = ["Dispatcher"]

_MAX_ATTEMPTS = 2
_HISTORY = 100


@dataclass(eq=False)
class RunningBatch(Run):
    """A request, or a batch of them, on a worker."""

    requests: list[Request]
    copied_bytes: int


@dataclass(eq=False)
class Dispatcher(Runs[RunningBatch]):
    """Runs one request at a time."""

    activity = "running"

    queue: RequestQueue
    fills_batches: bool = True  # False: nothing more comes to join one
    batch_starts_at: float = math.inf  # the latest for one that waits for more requests
    history: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_HISTORY))

    def rank(self) -> Rank | None:
        """Return the rank of the first request that can run; None if there is none."""
        for request in self.queue:
            if self.catalog.can_run(self.catalog.models[request.model], request.is_profile):
                return self.shares.rank(request.priority, request.model)
        return None

    def start_next(self, pause_training: Callable[[], None]) -> None:
        """Start the first request that can run, if none does and a worker and space are free."""
        if self.run is not None:
            return
        self.batch_starts_at = math.inf
        for request in self.queue:
            served = self.catalog.models[request.model]
            if not self.catalog.can_run(served, request.is_profile):
                continue
            batch = self._batch(request, served)
            if not batch:
                continue
            place = self.place(served, pause_training)
            if place is None:
                return
            # What was removed before, cancelled or failed, is not claimed again.
            running = [one for one in batch if self.queue.remove(one) and one.claim()]
            if running and self._start(running, served, *place):
                return
            self.residency.arena.release(request.model)

    # --- events

    def on_answer(self, run: RunningBatch, message: object, _: list[int]) -> None:
        """Complete what runs."""
        worker = self.end().worker
        worker.last_model = run.served.name
        worker.release()
        is_profile = run.requests[0].is_profile
        if isinstance(message, _messages.Failed):
            self.counts["failed"] += not is_profile and len(run.requests) == 1
            self.fail_run(run, from_json(message.error, ModelError))
        elif isinstance(message, _messages.Result):
            try:
                result = message.profile if is_profile else self._reply(run, message)
            except Exception as error:  # a failure of one request must not end the others
                text = f"the reply of model {run.served.name!r} could not be read: {error}"
                self.fail_run(run, UnavailableError(text))
            else:
                _answer(run.requests, result)

    def retry(self, run: RunningBatch) -> None:
        """Run the requests again whose worker has died, or fail them."""
        worker, request, is_batch = run.worker, run.requests[0], len(run.requests) > 1
        # A worker that dies before it starts the request costs the request no attempt.
        has_started = worker.buffers.current.started == run.run_id
        request.attempts += has_started and not (run.broke_memory or is_batch)
        can_retry = request.attempts < _MAX_ATTEMPTS and not worker.is_late and not is_batch
        if can_retry and run.served.state is not State.LEAVING and not request.future.done():
            self.counts["retried"] += 1
            self.queue.push_back(request)
        else:
            self.counts["failed"] += not (request.is_profile or is_batch)
            did = f"ran model {request.model!r}; tried {request.attempts} times"
            self.fail_run(run, worker.loss(did))

    def fail_run(self, run: RunningBatch, error: TorchRelayError) -> None:
        """Fail what runs; the requests of a batch run again, each alone."""
        if len(run.requests) == 1 or run.served.state is State.LEAVING:
            for one in run.requests:
                one.fail(error)
            return
        for one in run.requests:
            if not one.is_alone:  # of two failures of one run, the first counts
                one.is_alone = True
                self.queue.push_back(one)

    def _batch(self, request: Request, served: Served) -> list[Request]:
        """Return the requests to run with `request`; none while more may join them."""
        if served.model.max_batch_size < 2:
            return [request]
        batch = _gather(request, self.queue, served.model, self.options.request_bytes)
        until = _waits_until(batch, served.model)
        if time.monotonic() >= until or not self.fills_batches:
            return batch
        self.batch_starts_at = min(self.batch_starts_at, until)
        return []

    def _start(
        self, requests: list[Request], served: Served, worker: WorkerProcess, pinned: Pinned
    ) -> bool:
        """Return whether the inputs could be written, so that `requests` run now."""
        self.batch_starts_at = math.inf
        is_profile = requests[0].is_profile
        is_split = bool(pinned.missing) and len(pinned.offsets) > 1
        overlaps = (is_split or is_profile) and not served.runs_whole
        run = RunningBatch(worker, served, overlaps, requests, pinned.copied_bytes)
        try:
            written, end = worker.buffers.current.write(_merged_inputs(requests), 0)
        except Exception as error:  # of one request, which must not end the others
            text = f"the inputs of model {served.name!r} could not be read: {error}"
            self.fail_run(run, ArgumentError(text))
            return False
        self.shares.start(served.name)
        self.begin(run)
        message = _messages.Run(
            run.run_id,
            served.name,
            pinned.offsets,
            pinned.missing,
            whole=served.runs_whole,
            buffer=worker.buffers.index,
            inputs=written,
            outputs_at=end,
            is_profile=is_profile,
        )
        worker.send(message)
        return True

    def _reply(self, run: RunningBatch, result: _messages.Result) -> Reply:
        first_group = min(run.arrived.values(), default=run.started)
        reply = Reply(
            run.served.name,
            run.served.model.version,
            run.worker.buffers.take(result.outputs),
            queue_s=run.started - run.requests[0].arrived,
            # Binding goes on meanwhile; that of a model that arrives whole ends later.
            switch_s=max(first_group - run.started, result.bind_s),
            compute_s=result.compute_s,
            copied_bytes=run.copied_bytes,
        )
        total_s = time.monotonic() - run.started
        requests, kind = len(run.requests), reply.kind
        run.served.counts[kind] += requests
        seconds: Any = run.served.seconds[kind]
        seconds["queue"] += sum(run.started - one.arrived for one in run.requests)
        seconds["switch"] += requests * reply.switch_s
        seconds["compute"] += requests * reply.compute_s
        self.counts["served"] += requests
        self.history.append(
            {
                "model": reply.model,
                "kind": kind,
                "requests": requests,
                "worker": run.worker.pid,
                "at": time.time(),
                "queue_ms": reply.queue_s * 1e3,
                "switch_ms": reply.switch_s * 1e3,
                "compute_ms": reply.compute_s * 1e3,
                "total_ms": total_s * 1e3,
                "copied_bytes": reply.copied_bytes,
                "groups": [_timeline(run, group, *times) for group, times in result.waits.items()],
            }
        )
        return reply


def _timeline(run: RunningBatch, group: int, needed: float, computed: float) -> dict[str, Any]:
    """Return when a missing group was in place, when an operator needed it, and when computing of
    it began, all since `run` started.
    """
    times = {"arrived": run.arrived[group], "needed": needed, "computes": computed}
    since = {f"{name}_ms": (at - run.started) * 1e3 for name, at in times.items()}
    return {"group": group, "bytes": run.served.grouped.sizes[group], **since}


def _gather(
    first: Request, waiting: Iterable[Request], model: StoredModel, limit_bytes: int
) -> list[Request]:
    """Return `first` and those of the `waiting` requests that can run together with it.

    Args:
        limit_bytes: what the inputs may take.
    """
    batch, rows, size_bytes = [first], first.rows, first.size_bytes
    if not _can_join(first):
        return batch
    for one in waiting:
        joins = one is not first and one.model == first.model and _can_join(one)
        if not joins or one.shape != first.shape:
            continue
        if rows + one.rows <= model.max_batch_size and size_bytes + one.size_bytes <= limit_bytes:
            batch.append(one)
            rows, size_bytes = rows + one.rows, size_bytes + one.size_bytes
    return batch


def _waits_until(batch: Sequence[Request], model: StoredModel) -> float:
    """Return when `batch` starts at the latest, for more requests to join it; at once if it is
    full, or if one would miss its deadline.
    """
    oldest = min(request.arrived for request in batch)
    until = oldest + model.max_delay_us * 1e-6
    is_full = sum(request.rows for request in batch) >= model.max_batch_size
    is_urgent = min(request.deadline for request in batch) <= until
    return -math.inf if is_full or is_urgent or not _can_join(batch[0]) else until


def _merged_inputs(parts: Sequence[Request]) -> dict[str, torch.Tensor]:
    """Return the inputs of a run of `parts`."""
    if len(parts) == 1:
        return parts[0].inputs
    return {name: torch.cat([one.inputs[name] for one in parts]) for name in parts[0].inputs}


def _split(reply: Reply, parts: Sequence[Request]) -> list[Reply]:
    """Return the reply of each part.

    Raises:
        ModelError: an output has another first dimension than the inputs.
    """
    ends = list(accumulate((part.rows for part in parts), initial=0))
    for name, output in reply.outputs.items():
        if not output.dim() or len(output) != ends[-1]:
            raise ModelError(
                f"output {name!r} of model {reply.model!r} has the shape {tuple(output.shape)} for "
                f"a batch of {ends[-1]}, and cannot be split; serve the model without "
                "max_batch_size"
            )
    started = time.monotonic() - reply.switch_s - reply.compute_s
    return [
        reply._replace(
            outputs={name: output[start:end] for name, output in reply.outputs.items()},
            queue_s=max(0.0, started - part.arrived),
        )
        for part, (start, end) in zip(parts, pairwise(ends), strict=True)
    ]


def _can_join(request: Request) -> bool:
    return bool(request.rows) and not (request.is_alone or request.is_profile)


def _answer(requests: list[Request], result: Any) -> None:
    """Set the results of what ran together."""
    try:
        results = _split(result, requests) if len(requests) > 1 else [result]
    except ModelError as error:
        for request in requests:
            request.fail(error)
    else:
        for request, one in zip(requests, results, strict=True):
            request.succeed(one)

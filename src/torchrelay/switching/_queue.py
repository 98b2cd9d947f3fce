"""Requests that wait for a worker: by priority, then deadline, then arrival."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from torchrelay.errors import OperationTimeoutError, OverloadedError

__all__ = ["Reply", "Request", "RequestQueue"]

# A request with a later deadline, or none, counts as having one this long after its arrival, so
# that a stream of requests with deadlines cannot starve it.
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Reply:
    """The outputs of one request, with its times.

    Large outputs lie in memory shared with a worker, which does not use it while a tensor over it
    exists. Clone what is kept for long.
    """

    model: str
    version: int
    outputs: dict[str, torch.Tensor]
    queue_s: float
    switch_s: float  # from the start on a worker to the first group in place
    compute_s: float
    copied_bytes: int  # 0 if the model was resident


@dataclass
class Request:
    """One call of a model. Owned by the daemon's thread once it is queued."""

    model: str
    inputs: dict[str, torch.Tensor]
    future: Future[Reply]
    priority: int = 0
    deadline: float = math.inf  # of time.monotonic()
    client: str = ""
    profiling: bool = False
    request_id: int = 0
    attempts: int = 0
    arrived: float = field(default_factory=time.monotonic)
    started: float = 0.0
    copied_bytes: int = 0
    overlaps: bool = False  # it runs while its model is copied
    first_group: float = 0.0  # when the first missing group was in place


class RequestQueue:
    """A bounded priority queue. Not thread-safe: the daemon's thread owns it."""

    def __init__(self, limit: int, client_limit: int) -> None:
        self._limit = limit
        self._client_limit = client_limit
        self._heap: list[tuple[int, float, int, Request]] = []
        self._order = itertools.count()
        self._clients: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, request: Request) -> None:
        """Queue `request`.

        Raises:
            OverloadedError: the queue, or the client's share of it, is full.
        """
        if len(self._heap) >= self._limit:
            raise OverloadedError(
                f"{len(self._heap)} requests are waiting, the limit; try again later"
            )
        if request.client and self._clients[request.client] >= self._client_limit:
            raise OverloadedError(
                f"client {request.client!r} has {self._client_limit} requests waiting, its limit; "
                "try again later"
            )
        self._insert(request)

    def push_back(self, request: Request) -> None:
        """Queue a request again, ignoring the limits."""
        self._insert(request)

    def ordered(self) -> list[Request]:
        """Return the requests in the order in which they will be served."""
        return [entry[3] for entry in sorted(self._heap, key=lambda entry: entry[:3])]

    def remove(self, request: Request) -> None:
        self._heap = [entry for entry in self._heap if entry[3] is not request]
        heapq.heapify(self._heap)
        self._forget(request)

    def next_deadline(self) -> float:
        return min((entry[3].deadline for entry in self._heap), default=math.inf)

    def expire(self, gone: Callable[[Request], None]) -> None:
        """Remove cancelled and expired requests; `gone` is called for each."""
        now = time.monotonic()
        for request in self.ordered():
            late = request.deadline <= now
            if late or request.future.cancelled():
                self.remove(request)
                if late and request.future.set_running_or_notify_cancel():
                    request.future.set_exception(
                        OperationTimeoutError(
                            f"a request to {request.model!r} waited {now - request.arrived:.3f} s "
                            "and missed its deadline"
                        )
                    )
                gone(request)

    def _insert(self, request: Request) -> None:
        due = min(request.deadline, request.arrived + _PATIENCE_S)
        entry = (-request.priority, due, next(self._order), request)
        heapq.heappush(self._heap, entry)
        self._clients[request.client] += 1

    def _forget(self, request: Request) -> None:
        self._clients[request.client] -= 1
        if self._clients[request.client] <= 0:
            del self._clients[request.client]

"""Requests that wait for a worker: by priority, then deadline, then arrival."""

from __future__ import annotations

import itertools
import math
import time
from bisect import insort
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from torchrelay.errors import OperationTimeoutError, OverloadedError
from torchrelay.switching._served import Served

__all__ = ["Reply", "Request", "RequestQueue", "new_id"]

# A request with a later deadline, or none, counts as having one this long after its arrival, so
# that a stream of requests with deadlines cannot starve it.
_PATIENCE_S = 10.0

new_id = itertools.count(1).__next__


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


@dataclass(eq=False)
class Request:
    """One call of a model. Owned by the daemon once it is queued."""

    model: str
    inputs: dict[str, torch.Tensor]
    future: Future[Reply] = field(default_factory=Future)
    priority: int = 0
    deadline: float = math.inf  # of time.monotonic()
    client: str = ""
    profiled: Served | None = None  # what it profiles, if it is no caller's
    request_id: int = field(default_factory=new_id)
    attempts: int = 0
    arrived: float = field(default_factory=time.monotonic)
    started: float = 0.0
    copied_bytes: int = 0
    overlaps: bool = False  # it runs while its model is copied
    first_group: float = 0.0  # when the first missing group was in place

    @property
    def rank(self) -> tuple[int, float, int]:
        """Its place in the queue: the least is served first."""
        due = min(self.deadline, self.arrived + _PATIENCE_S)
        return -self.priority, due, self.request_id


class RequestQueue:
    """A bounded priority queue. The loop's lock protects it."""

    def __init__(self, limit: int, client_limit: int) -> None:
        self._limit = limit
        self._client_limit = client_limit
        self._waiting: list[Request] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """Return the requests in the order in which they will be served; the queue may change
        meanwhile.
        """
        return iter(list(self._waiting))

    def push(self, request: Request) -> None:
        """Queue `request`.

        Raises:
            OverloadedError: the queue, or the client's share of it, is full.
        """
        if len(self._waiting) >= self._limit:
            raise OverloadedError(
                f"{len(self._waiting)} requests are waiting, the limit; try again later"
            )
        client = request.client
        if client and sum(one.client == client for one in self._waiting) >= self._client_limit:
            raise OverloadedError(
                f"client {client!r} has {self._client_limit} requests waiting, its limit; "
                "try again later"
            )
        self.push_back(request)

    def push_back(self, request: Request) -> None:
        """Queue a request again, ignoring the limits."""
        insort(self._waiting, request, key=lambda one: one.rank)

    def remove(self, request: Request) -> None:
        self._waiting.remove(request)

    def next_deadline(self) -> float:
        return min((request.deadline for request in self._waiting), default=math.inf)

    def take_expired(self) -> list[tuple[Request, OperationTimeoutError]]:
        """Remove and return the cancelled and expired requests, with the error of an expired
        one.
        """
        now = time.monotonic()
        expired = [one for one in self if one.deadline <= now or one.future.cancelled()]
        for request in expired:
            self.remove(request)
        text = "a request to {!r} waited {:.3f} s and missed its deadline"
        return [
            (one, OperationTimeoutError(text.format(one.model, now - one.arrived)))
            for one in expired
        ]

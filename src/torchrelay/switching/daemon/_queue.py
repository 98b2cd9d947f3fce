"""Requests that wait for a worker: by priority, then deadline, then arrival."""

from __future__ import annotations

import itertools
import math
import time
from bisect import insort
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from torchrelay.errors import OperationTimeoutError, OverloadedError
from torchrelay.switching.device._contract import align

__all__ = ["Reply", "Request", "RequestQueue", "new_id"]

# A request with a later deadline, or none, counts as having one this long after its arrival, so
# that a stream of requests with deadlines cannot starve it.
_PATIENCE_S = 10.0

new_id = itertools.count(1).__next__


class Reply(NamedTuple):
    """The outputs of one request, with its times.

    Large outputs lie in memory shared with a worker, which does not use it while a tensor over it
    exists. Clone what is kept for long.
    """

    model: str
    version: int
    outputs: dict[str, torch.Tensor]
    queue_s: float
    # From the start on a worker until the first group, or a model that arrives whole, is in place.
    switch_s: float
    compute_s: float
    copied_bytes: int  # 0 if the model was resident

    @property
    def kind(self) -> str:
        """Whether the model was "resident" or "cold"."""
        return "cold" if self.copied_bytes else "resident"


@dataclass(eq=False)
class Request:
    """One call of a model, the daemon's own once it is posted."""

    model: str
    inputs: dict[str, torch.Tensor]
    future: Future[Any] = field(default_factory=Future)  # of a Reply, or of a Profile
    priority: int = 0
    deadline: float = math.inf  # of time.monotonic()
    is_profile: bool = False  # asks for the model's profile, and may run before it is ready
    request_id: int = field(default_factory=new_id)
    attempts: int = 0
    arrived: float = field(default_factory=time.monotonic)
    is_alone: bool = False  # runs in no batch (again)
    _is_claimed: bool = False  # once, and then for good

    @cached_property
    def rank(self) -> tuple[int, float, int]:
        """Its place in the queue: the least is served first."""
        due = min(self.deadline, self.arrived + _PATIENCE_S)
        return -self.priority, due, self.request_id

    @cached_property
    def rows(self) -> int:
        """The first dimension of its inputs; 0 if they have none in common."""
        sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in self.inputs.values()}
        return sizes.pop() if len(sizes) == 1 else 0

    @cached_property
    def size_bytes(self) -> int:
        """What its inputs take in a request buffer."""
        return sum([align(tensor.nbytes) for tensor in self.inputs.values()])

    @cached_property
    def shape(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """What requests of one batch have in common."""
        return {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in self.inputs.items()}

    def claim(self) -> bool:
        """Mark the request as running; return False if it has a result or was cancelled.

        Whoever waits for several futures learns of a cancelled one here.
        """
        if not self._is_claimed:
            self._is_claimed = True
            return self.future.set_running_or_notify_cancel()
        return self.future.running()

    def succeed(self, result: object) -> None:
        """Set the result, unless there is an error."""
        if self.claim():
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        """Set the error, unless there is a result or the request was cancelled."""
        if self.claim():
            self.future.set_exception(error)


class RequestQueue:
    """A bounded priority queue."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: list[Request] = []
        self.next_deadline = math.inf  # of those that wait, or an earlier one that was met

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
            OverloadedError: the queue is full.
        """
        if len(self._waiting) >= self._limit:
            raise OverloadedError(
                f"{len(self._waiting)} requests are waiting, the limit; try again later"
            )
        self.push_back(request)

    def push_back(self, request: Request) -> None:
        """Queue a request again, ignoring the limits."""
        insort(self._waiting, request, key=attrgetter("rank"))
        self.next_deadline = min(self.next_deadline, request.deadline)

    def remove(self, request: Request) -> bool:
        """Take `request` off the queue, if it is there; return whether it was."""
        if request not in self._waiting:
            return False
        self._waiting.remove(request)
        return True

    def take_expired(self) -> list[tuple[Request, OperationTimeoutError]]:
        """Remove and return the expired requests, with their errors."""
        now = time.monotonic()
        if self.next_deadline > now:
            return []
        expired = [one for one in self._waiting if one.deadline <= now]
        self._waiting = [one for one in self._waiting if one.deadline > now]
        self.next_deadline = min((one.deadline for one in self._waiting), default=math.inf)
        text = "a request to {!r} waited {:.3f} s and missed its deadline"
        return [
            (one, OperationTimeoutError(text.format(one.model, now - one.arrived)))
            for one in expired
        ]

"""A data plane that communicates nothing, to measure a training step without communication.

Sums are computed as if every rank had the same values; other collectives keep each rank's own. An
operation takes as long as its bytes would on a link of the given bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrelay._native import Op
from torchrelay.aggregation._plane import Operations, PlaneStats, Tensors
from torchrelay.config import Aggregation

__all__ = ["DummyPlane"]


def _operation(effect: Callable[..., None]) -> Callable[..., None]:
    """Return a collective of :class:`Plane` from its effect. Of its tensors, the larger side
    counts.
    """

    def run(self: DummyPlane, *arguments: Any) -> None:
        *own, _, _ = arguments  # without the timeout and ``block``
        with torch.inference_mode():  # which also writes to inference tensors
            effect(self, *own)
        self._spend(max((_size_bytes(argument) for argument in own), default=0))

    return run


def _size_bytes(argument: Any) -> int:
    if isinstance(argument, Tensor):
        return argument.nbytes
    return sum(map(_size_bytes, argument)) if isinstance(argument, Sequence) else 0


def _copy(output: Tensor, source: Tensor) -> None:
    if output.numel() == source.numel():
        output.view(-1).copy_(source.view(-1))


class DummyPlane:
    """A :class:`_plane.Plane` that never waits for another rank, and never fails."""

    name = "dummy"

    def __init__(self, rank: int, size: int, settings: Aggregation) -> None:
        self._rank = rank
        self._size = size
        self._settings = settings
        self._jobs = 0
        self._payload_bytes = 0
        self._waiting_s = 0.0

    def _spend(self, size_bytes: int) -> None:
        self._jobs += 1
        self._payload_bytes += size_bytes
        if self._settings.dummy_bandwidth > 0:
            pause_s = size_bytes * 8 / (self._settings.dummy_bandwidth * 1e6)
            self._waiting_s += pause_s
            time.sleep(pause_s)

    def _combine(self, tensor: Tensor, op: Op) -> None:
        if not self._settings.dummy_process_packets:
            return
        if op is Op.SUM:
            tensor.mul_(self._size)
        elif op is Op.PRODUCT:
            tensor.pow_(self._size)
        elif op is Op.BXOR and self._size % 2 == 0:
            tensor.zero_()

    @_operation
    def all_reduce(self, output: Tensor, source: Tensor, op: Op) -> None:
        _copy(output, source)
        self._combine(output, op)

    @_operation
    def reduce(self, tensor: Tensor, op: Op, root: int) -> None:
        if root == self._rank:
            self._combine(tensor, op)

    @_operation
    def reduce_scatter(self, output: Tensor, inputs: Tensors, op: Op) -> None:
        _copy(output, inputs[self._rank])
        self._combine(output, op)

    @_operation
    def gather(self, outputs: Tensors, tensor: Tensor, root: int = 0) -> None:
        for output in outputs:
            _copy(output, tensor)

    all_gather = gather

    @_operation
    def scatter(self, output: Tensor, inputs: Tensors, root: int) -> None:
        if inputs:
            _copy(output, inputs[self._rank])

    @_operation
    def all_to_all(self, outputs: Tensors, inputs: Tensors) -> None:
        for output, source in zip(outputs, inputs, strict=True):
            _copy(output, source)

    @_operation
    def broadcast(self, *_: Any) -> None:
        """Keep each rank's own values."""

    barrier = broadcast

    def coalesced(self, operations: Operations, digest: int, timeout_s: float, block: bool) -> None:
        for operation, arguments in operations:
            getattr(self, operation)(*arguments, timeout_s, block)

    def send(self, tensor: Tensor, to: int, tag: int, timeout_s: float) -> None:
        self._spend(tensor.nbytes)

    receive = send

    def wait_transfer(self, transfer: object, timeout_s: float) -> bool:
        """Return True: no message is ever unfinished."""
        return True

    def stats(self) -> PlaneStats:
        return PlaneStats(self.name, self._jobs, self._payload_bytes, self._waiting_s)

    def close(self) -> None:
        """Do nothing: no resource is held."""

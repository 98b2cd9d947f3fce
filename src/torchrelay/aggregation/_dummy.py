"""A data plane that communicates nothing, to measure a training step without communication.

Sums are computed as if every rank had the same values; other collectives keep each rank's own. An
operation takes as long as its bytes would on a link of the given bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrelay._group import Collective, Kind, Op
from torchrelay.aggregation._plane import PlaneStats
from torchrelay.config import Aggregation

__all__ = ["DummyPlane"]

_REDUCTIONS = (Kind.all_reduce, Kind.reduce, Kind.reduce_scatter)
_PER_RANK = (Kind.reduce_scatter, Kind.scatter)  # whose inputs are


class DummyPlane:
    """A :class:`_plane.Plane` that never waits for another rank, and never fails."""

    failure = None

    def __init__(self, rank: int, size: int, settings: Aggregation) -> None:
        self._rank = rank
        self._size = size
        self._settings = settings
        self._jobs = 0
        self._payload_bytes = 0
        self._waiting_s = 0.0

    def run(self, calls: Sequence[Collective], timeout_s: float, may_block: bool) -> None:
        for call in calls:
            with torch.inference_mode():  # which also writes to inference tensors
                self._compute(call)
            sides = call.inputs, call.outputs
            self._spend(max(sum(tensor.nbytes for tensor in side) for side in sides))

    def all_reduce(self, output: Tensor, source: Tensor, op: Op, timeout_s: float) -> None:
        self.run([Collective(Kind.all_reduce, (source,), (output,), op)], timeout_s, True)

    def _compute(self, call: Collective) -> None:
        kind, sources, outputs, op, root, *_ = call
        if kind in _PER_RANK and sources:
            sources = sources[self._rank :][:1]
        if len(sources) == 1:  # each rank's own, for all
            sources = [*sources] * len(outputs)
        for output, source in zip(outputs, sources, strict=bool(sources)):
            if output.numel() == source.numel():
                output.view(-1).copy_(source.view(-1))
        if kind in _REDUCTIONS and root in (-1, self._rank):
            self._combine(outputs[0], op)

    def _combine(self, tensor: Tensor, op: Op) -> None:
        if not self._settings.dummy_process_packets:
            return
        if op is Op.BXOR:
            if self._size % 2 == 0:
                tensor.zero_()
        elif tensor.dtype is torch.bool:
            pass  # whose other reductions of equal values change nothing
        elif op in (Op.SUM, Op.PREMUL_SUM):
            tensor.mul_(self._size)
        elif op is Op.PRODUCT:
            tensor.pow_(self._size)

    def _spend(self, size_bytes: int) -> None:
        self._jobs += 1
        self._payload_bytes += size_bytes
        if self._settings.dummy_bandwidth > 0:
            pause_s = size_bytes * 8 / (self._settings.dummy_bandwidth * 1e6)
            self._waiting_s += pause_s
            time.sleep(pause_s)

    def send(self, tensor: Tensor, to: int, tag: int, timeout_s: float) -> None:
        self._spend(tensor.nbytes)

    receive = send

    def wait_transfer(self, transfer: object, timeout_s: float) -> bool:
        """Return True: no message is ever unfinished."""
        return True

    def stats(self) -> PlaneStats:
        return PlaneStats("dummy", self._jobs, self._payload_bytes, self._waiting_s)

    def close(self) -> None:
        """Do nothing: no resource is held."""

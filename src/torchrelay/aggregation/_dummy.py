"""A data plane that communicates nothing, to measure a training step without communication.

Sums are computed as if every rank had the same values; other collectives keep each rank's own. An
operation takes as long as its bytes would on a link of the given bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from torchrelay._native import Op
from torchrelay.aggregation._plane import PlaneStats
from torchrelay.config import Aggregation

__all__ = ["DummyPlane"]


class _Done:
    """Ticket and transfer of a finished operation."""

    done = True

    def __init__(self, source: int = 0) -> None:
        self.source = source

    @property
    def ticket(self) -> _Done:
        return self

    def wait(self, timeout_s: float) -> bool:
        return True

    def error(self) -> None:
        return None

    def when_done(self, function: Callable[[], None]) -> None:
        function()


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

    def _spend(self, size_bytes: int, block: bool = False) -> _Done | None:
        self._jobs += 1
        self._payload_bytes += size_bytes
        if self._settings.dummy_bandwidth > 0:
            pause_s = size_bytes * 8 / (self._settings.dummy_bandwidth * 1e6)
            self._waiting_s += pause_s
            time.sleep(pause_s)
        return None if block else _Done()

    def _combine(self, tensor: torch.Tensor, op: Op) -> None:
        if not self._settings.dummy_process_packets:
            return
        if op is Op.SUM:
            tensor.mul_(self._size)
        elif op is Op.PRODUCT:
            tensor.pow_(self._size)
        elif op is Op.BXOR and self._size % 2 == 0:
            tensor.zero_()

    def all_reduce(
        self, tensor: torch.Tensor, op: Op, timeout_s: float, block: bool
    ) -> _Done | None:
        self._combine(tensor, op)
        return self._spend(tensor.nbytes, block)

    def reduce(
        self, tensor: torch.Tensor, op: Op, root: int, timeout_s: float, block: bool
    ) -> _Done | None:
        if root == self._rank:
            self._combine(tensor, op)
        return self._spend(tensor.nbytes, block)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: Op,
        timeout_s: float,
        block: bool,
    ) -> _Done | None:
        output.view(-1).copy_(inputs[self._rank].view(-1))
        self._combine(output, op)
        return self._spend(output.nbytes * self._size, block)

    def broadcast(
        self, tensor: torch.Tensor, root: int, timeout_s: float, block: bool
    ) -> _Done | None:
        return self._spend(tensor.nbytes, block)

    def all_gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, timeout_s: float, block: bool
    ) -> _Done | None:
        for output in outputs:
            if output.numel() == tensor.numel():
                output.view(-1).copy_(tensor.view(-1))
        return self._spend(tensor.nbytes * self._size, block)

    def gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        root: int,
        timeout_s: float,
        block: bool,
    ) -> _Done | None:
        return self.all_gather(outputs, tensor, timeout_s, block)

    def scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        root: int,
        timeout_s: float,
        block: bool,
    ) -> _Done | None:
        if inputs:
            output.view(-1).copy_(inputs[self._rank].view(-1))
        return self._spend(output.nbytes, block)

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        timeout_s: float,
        block: bool,
    ) -> _Done | None:
        for output, source in zip(outputs, inputs, strict=True):
            if output.numel() == source.numel():
                output.view(-1).copy_(source.view(-1))
        return self._spend(sum(tensor.nbytes for tensor in inputs), block)

    def barrier(self, timeout_s: float, block: bool) -> _Done | None:
        return self._spend(0, block)

    def send(self, tensor: torch.Tensor, to: int, tag: int, timeout_s: float) -> _Done:
        self._spend(tensor.nbytes)
        return _Done(self._rank)

    def receive(self, tensor: torch.Tensor, source: int, tag: int, timeout_s: float) -> _Done:
        self._spend(tensor.nbytes)
        return _Done(max(source, 0))

    def wait_transfer(self, transfer: object, timeout_s: float) -> bool:
        return True

    def stats(self) -> PlaneStats:
        return PlaneStats(self.name, self._jobs, self._payload_bytes, self._waiting_s)

    def close(self) -> None:
        """Do nothing: no resource is held."""

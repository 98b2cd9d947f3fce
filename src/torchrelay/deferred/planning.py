"""What a materialization will cost, before it is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred import draws
from torchrelay.deferred.graph import Region
from torchrelay.deferred.modules import children_first, own_tensors
from torchrelay.deferred.operators import describe
from torchrelay.deferred.shards import check_shard, local_slices, sliced
from torchrelay.deferred.tensor import FakeTensor
from torchrelay.deferred.traces import Trace
from torchrelay.errors import ArgumentError

__all__ = ["Plan", "plan"]


@dataclass(frozen=True)
class Plan:
    """The cost of one rank's materialization.

    Attributes:
        tensors: how many tensors become real.
        size_bytes: the memory that they keep.
        peak_bytes: the most memory at once, what is needed for one tensor at a time included.
        seconds: an estimate, from short runs of the same operations here: good to a factor of about two.
    """

    tensors: int
    size_bytes: int
    peak_bytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors, {_size(self.size_bytes)} (at most {_size(self.peak_bytes)} at once), "
            f"about {self.seconds:.2g} s"
        )


def plan(module: torch.nn.Module, *, dtype: torch.dtype | None = None, shard: Any = None) -> Plan:
    """What ``materialize_module(module, dtype=dtype, shard=shard)`` will cost. Materializes nothing.

    Raises:
        ArgumentError: an argument is of the wrong kind, or slices do not fit.
    """
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"plan() takes a module, not {type(module).__name__}.")
    check_shard(shard)
    seen: set[int] = set()
    kept = extra = 0
    seconds = 0.0
    for prefix, submodule in children_first(module, ""):
        for name, own in own_tensors(submodule).items():
            tensor = getattr(own, "_local_tensor", own)
            if not isinstance(tensor, FakeTensor) or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            slices = local_slices(shard, prefix + name, tensor)
            region = tensor._region if slices is None else sliced(tensor, slices)
            result = (
                region.numel * (dtype if dtype and region.dtype.is_floating_point else region.dtype).itemsize
            )
            time_s, work = _cost(tensor, region)
            seconds += time_s
            kept += result
            extra = max(extra, work - (result if dtype in (None, region.dtype) else 0))
    return Plan(len(seen), kept, kept + extra, seconds)


def _cost(fake: FakeTensor, region: Region) -> tuple[float, int]:
    """Seconds, and bytes in use, for ``region`` of ``fake``: the operations on as much of each as is wanted."""
    trace = Trace.of_fake(fake)
    share = region.numel / max(1, fake._region.numel)
    seconds, work = 0.0, region.size_bytes
    for node in trace.nodes if trace is not None else ():
        for target in node.targets():
            rule = draws.rule_for(node.func, target.dtype, node.args) if describe(node.func).draws else None
            cut = rule is not None or describe(node.func).slices or not describe(node.func).draws
            count = target.numel * (share if cut else 1.0)
            seconds += count * _seconds_per_element(node.func, target.dtype)
            if not cut or target.storage is not region.storage:
                work = max(work, int(count) * target.dtype.itemsize + region.size_bytes)
    return seconds, work


_SAMPLE = 1 << 16
_generator = torch.Generator()
_measured: dict[Any, float] = {}


def _seconds_per_element(func: Any, dtype: torch.dtype) -> float:
    """The time that ``func`` takes on this machine; that of a multiplication, where it cannot be tried alone."""
    key = func, dtype
    if key not in _measured:
        sample = torch.ones(_SAMPLE, dtype=dtype)
        fill = getattr(torch.ops.aten, describe(func).name.removeprefix("aten::").partition(".")[0], None)
        trial = _TRIALS.get(fill)
        _measured[key] = _time(sample, trial or (lambda values: values.mul_(1)))
    return _measured[key]


_TRIALS: dict[Any, Callable[[torch.Tensor], Any]] = {
    torch.ops.aten.normal_: lambda values: values.normal_(generator=_generator),
    torch.ops.aten.randn: lambda values: values.normal_(generator=_generator),
    torch.ops.aten.uniform_: lambda values: values.uniform_(generator=_generator),
    torch.ops.aten.rand: lambda values: values.uniform_(generator=_generator),
    torch.ops.aten.bernoulli_: lambda values: values.bernoulli_(0.5, generator=_generator),
    torch.ops.aten.exponential_: lambda values: values.exponential_(generator=_generator),
}


def _time(sample: torch.Tensor, trial: Callable[[torch.Tensor], Any]) -> float:
    best = float("inf")
    with _torch.plain_torch():
        for _ in range(3):
            start = time.perf_counter()
            trial(sample)
            best = min(best, time.perf_counter() - start)
    return best / _SAMPLE


def _size(size_bytes: int) -> str:
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"

"""Estimate of the cost of a materialisation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred import _draws
from torchrelay.deferred._graph import Region
from torchrelay.deferred._modules import children_first, own_tensors
from torchrelay.deferred._operators import describe
from torchrelay.deferred._shards import check_shard, local_slices, sliced
from torchrelay.deferred._tensor import FakeTensor
from torchrelay.deferred._traces import Trace
from torchrelay.errors import ArgumentError

__all__ = ["Plan", "plan"]


@dataclass(frozen=True)
class Plan:
    """The cost of one rank's materialisation.

    Attributes:
        tensors: the number of tensors that become real.
        size_bytes: the memory that they keep.
        peak_bytes: the peak memory, including temporary memory for one tensor at a time.
        seconds: an estimate from short runs of the same operations on this CPU, within a factor of
            about five.
    """

    tensors: int
    size_bytes: int
    peak_bytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors, {_size(self.size_bytes)} (at most {_size(self.peak_bytes)} "
            f"at once), about {self.seconds:.2g} s"
        )


def plan(module: torch.nn.Module, *, dtype: torch.dtype | None = None, shard: Any = None) -> Plan:
    """Estimate the cost of ``materialize_module(module, dtype=dtype, shard=shard)``.

    Materialises nothing.

    Raises:
        ArgumentError: an argument has the wrong type, or slices do not fit.
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
                region.numel
                * (dtype if dtype and region.dtype.is_floating_point else region.dtype).itemsize
            )
            time_s, work = _cost(tensor, region)
            seconds += time_s
            kept += result
            extra = max(extra, work - (result if dtype in (None, region.dtype) else 0))
    return Plan(len(seen), kept, kept + extra, seconds)


def _cost(fake: FakeTensor, region: Region) -> tuple[float, int]:
    """Return seconds and bytes in use for ``region`` of ``fake``."""
    trace = Trace.of_fake(fake)
    share = region.numel / max(1, fake._region.numel)
    # Of a part of its columns, whole rows are drawn.
    drawn = (
        share if region.is_contiguous or not fake.dim() else region.size[0] / max(1, fake.shape[0])
    )
    seconds, work = region.numel * _seconds_per_element(_TOUCH, region.dtype), region.size_bytes
    for node in trace.nodes if trace is not None else ():
        for target in node.targets():
            draws_numbers = describe(node.func).draws
            rule = _draws.rule_for(node.func, target.dtype, node.args) if draws_numbers else None
            kind = _kind(node.func, rule)
            cut = (
                fake.device.type == "cpu" and rule is not None
                if draws_numbers
                else kind != _DECOMPOSITION
            )
            count = target.numel * ((drawn if draws_numbers else share) if cut else 1.0)
            steps = min(target.size[-2:]) / min(_MATRIX) if kind == _DECOMPOSITION else 1.0
            seconds += count * steps * _seconds_per_element(kind, target.dtype)
            if not cut or target.storage is not region.storage:
                work = max(work, int(count) * target.dtype.itemsize + region.size_bytes)
    return seconds, work


# of an orthogonal initialisation: an element costs as many steps as the shorter side
_DECOMPOSITION = "linalg_qr"
_MATRIX = (512, 1024)

# Size of a trial (for a decomposition: of its matrix), the time for all repeats, and their number.
_SAMPLE = math.prod(_MATRIX)
_TRIAL_S = 0.01
_LEAST_TRIES, _MOST_TRIES = 3, 16
_generator = torch.Generator()


def _kind(func: Any, rule: _draws.Rule | None) -> str:
    """Return the trial for ``func``; multiplication if it cannot be tried alone."""
    name = describe(func).name.partition("::")[2].partition(".")[0]
    if name == "trunc_normal" and rule is not None:
        return "normal_"  # nothing can be rejected
    name = _SAME_WORK.get(name, name)
    return name if name in _TRIALS else "mul_"


_SAME_WORK = {
    "randn": "normal_", "randn_like": "normal_", "rand": "uniform_", "rand_like": "uniform_",
    "bernoulli": "bernoulli_", "erfinv": "erfinv_", "randint": "random_",
}  # fmt: skip

_TOUCH = "touch"
_TRIALS: dict[str, Callable[[torch.Tensor], Any]] = {
    _TOUCH: lambda values: values.zero_(),
    "normal_": lambda values: values.normal_(generator=_generator),
    "uniform_": lambda values: values.uniform_(generator=_generator),
    "bernoulli_": lambda values: values.bernoulli_(0.5, generator=_generator),
    "exponential_": lambda values: values.exponential_(generator=_generator),
    "log_normal_": lambda values: values.log_normal_(generator=_generator),
    "random_": lambda values: values.random_(0, 2, generator=_generator),
    "trunc_normal": lambda values: _torch.trunc_normal(values, 0.0, 1.0, -2.0, 2.0, _generator),
    "erfinv_": lambda values: values.erfinv_(),
    _DECOMPOSITION: lambda values: torch.linalg.qr(values.view(_MATRIX)),
    "mul_": lambda values: values.mul_(1),
}


@cache
def _seconds_per_element(kind: str, dtype: torch.dtype) -> float:
    """Measure an operation, once per process.

    ``_TOUCH`` is the first write to fresh memory, which the others exclude. The shortest of a few
    trials counts: other programs can only make one longer.
    """
    if not dtype.is_floating_point or dtype.itemsize == 1:  # little can be done with eight bits
        kind, dtype = kind if kind in (_TOUCH, "random_") else "mul_", torch.int64
    samples: list[torch.Tensor] = []
    seconds: list[float] = []
    with _torch.plain_torch():
        while len(seconds) < _LEAST_TRIES or (
            sum(seconds) < _TRIAL_S and len(seconds) < _MOST_TRIES
        ):
            # All are kept until the end, so that the next one is fresh.
            samples.append(torch.empty(_SAMPLE, dtype=dtype, device="cpu"))
            if kind != _TOUCH:
                samples[-1].fill_(0.5)
            start = time.perf_counter()
            _TRIALS[kind](samples[-1])
            seconds.append(time.perf_counter() - start)
    return min(seconds) / _SAMPLE


def _size(size_bytes: int) -> str:
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"

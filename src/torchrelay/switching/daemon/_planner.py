"""The groups of a model, and the best ones for copying and computing in a pipeline.

Copying a group costs `copy_overhead_s` and its bytes over the link's rate; computing it costs
`group_overhead_s` and its layers' time. A group is computed once it is copied and the one before is
computed. PipeSwitch (Bai et al., OSDI 2020) searches the 2^(n-1) groupings with two pruning rules;
a recurrence over (groups, layers) is exact in polynomial time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from torchrelay.switching.device._contract import Copy, WorkerLink, align
from torchrelay.switching.models._layout import Grouped, ModelLayout
from torchrelay.switching.worker._profile import Profile

__all__ = ["Costs", "best_grouping", "grouped_by_profile", "measure_link", "pipeline_s"]

# What a message to a waiting process costs each side, about the same on all machines measured.
_WAKE_S = 40e-6


@dataclass(frozen=True)
class Costs:
    """Fixed costs of copying and computing a group."""

    bytes_per_s: float
    copy_overhead_s: float = 0.0
    group_overhead_s: float = 0.0


def best_grouping(
    size_bytes: Sequence[int], compute_s: Sequence[float], costs: Costs
) -> tuple[int, ...]:
    """Return the grouping of n layers that is computed first, in O(n^2) for each number of groups
    tried: group g holds the layers from `ends[g - 1]` (0 for the first) up to, without, `ends[g]`.

    Args:
        size_bytes: what each layer adds to the copies, in the order of execution.
        compute_s: what each layer takes to compute.
    """
    count = len(size_bytes)
    if count == 0:
        return ()
    copied = np.concatenate(([0.0], np.cumsum(np.asarray(size_bytes, float)))) / costs.bytes_per_s
    computed = np.concatenate(([0.0], np.cumsum(np.asarray(compute_s, float))))
    # finish[j]: when the first j layers are computed, split into as many groups as the round
    # counts.
    finish = np.full(count + 1, np.inf)
    finish[0] = 0.0
    earlier = np.tri(count + 1, k=-1, dtype=bool)  # [j, i]: group (i, j] is not empty
    best, choices, best_count = np.inf, [], 0
    for groups in range(1, count + 1):
        copy_end = groups * costs.copy_overhead_s + copied
        # With this many groups the last copy ends here at the earliest; more groups only end later.
        if copy_end[-1] + costs.group_overhead_s + computed[-1] - computed[-2] >= best:
            break
        start = np.maximum(finish[None, :], copy_end[:, None])
        options = np.where(earlier, start + costs.group_overhead_s - computed[None, :], np.inf)
        choice = options.argmin(axis=1)
        finish = options[np.arange(count + 1), choice] + computed
        choices.append(choice)
        if finish[-1] < best:
            best, best_count = float(finish[-1]), groups
    ends = [count]
    for choice in reversed(choices[1:best_count]):
        ends.append(int(choice[ends[-1]]))
    return tuple(reversed(ends))


def pipeline_s(
    ends: Sequence[int], size_bytes: Sequence[int], compute_s: Sequence[float], costs: Costs
) -> float:
    """Return when the last of the groups that end at `ends` is computed, from the start of the
    first copy.
    """
    copied_s = computed_s = 0.0
    for start, end in pairwise((0, *ends)):
        copied_s += costs.copy_overhead_s + sum(size_bytes[start:end]) / costs.bytes_per_s
        computed_s = max(computed_s, copied_s) + costs.group_overhead_s + sum(compute_s[start:end])
    return computed_s


def measure_link(link: WorkerLink, source: torch.Tensor) -> Costs:
    """Return the rate and overhead of copies of `source` (uint8) to the start of the arena.

    `source` should be larger than the processor's caches. The arena's contents there are lost: for
    an arena that is not in use yet.
    """

    def median_s(size_bytes: int) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            link.start([Copy(source[:size_bytes], 0)])()
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2]

    small, large = min(4096, source.numel()), source.numel()
    overhead_s, whole_s = median_s(small), median_s(large)
    rate = max(large - small, 1) / max(whole_s - overhead_s, 1e-6)
    return Costs(rate, copy_overhead_s=overhead_s + _WAKE_S, group_overhead_s=_WAKE_S)


def grouped_by_profile(
    layout: ModelLayout, profile: Profile, costs: Costs, policy: str = "best"
) -> Grouped:
    """Group the profiled layers: as the planner decides ("best"), into "one" group, or each on its
    own ("layer").

    Operators that may wait take longer. So a short model is computed first if it is one group,
    which needs none.
    """
    layers = [layer for layer in profile.layers if layer.storages]
    if not layers or policy == "one":
        return Grouped.one_group(layout)
    ends = tuple(range(1, len(layers) + 1))
    if policy == "best":
        sizes = [sum(align(layout.storages[one]) for one in layer.storages) for layer in layers]
        times = [layer.compute_s for layer in layers]
        ends = best_grouping(sizes, times, costs)
        one_group_s = pipeline_s((1,), [sum(sizes)], [profile.whole_s], costs)
        if pipeline_s(ends, sizes, times, costs) >= one_group_s:
            return Grouped.one_group(layout)
    groups = tuple(
        tuple(storage for layer in layers[start:end] for storage in layer.storages)
        for start, end in pairwise((0, *ends))
    )
    return Grouped(layout, groups)

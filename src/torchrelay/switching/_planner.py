"""The best grouping of a model's layers for copying and computing in a pipeline.

Copying a group costs `copy_overhead_s` and its bytes over the link's rate; computing it costs
`group_overhead_s` and its layers' time. A group is computed once it is copied and the one before is
computed. PipeSwitch (Bai et al., OSDI 2020) searches the 2^(n-1) groupings with two pruning rules;
a recurrence over (groups, layers) is exact in polynomial time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchrelay.errors import ArgumentError

__all__ = ["Costs", "Grouping", "best_grouping"]


@dataclass(frozen=True)
class Costs:
    """Fixed costs of copying and computing a group."""

    bytes_per_s: float
    copy_overhead_s: float = 0.0
    group_overhead_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or self.copy_overhead_s < 0 or self.group_overhead_s < 0:
            raise ArgumentError(f"{self}: the rate must be positive, the overheads not negative")


@dataclass(frozen=True)
class Grouping:
    """Group g holds the layers from `ends[g - 1]` (0 for the first) up to, without, `ends[g]`."""

    ends: tuple[int, ...]
    time_s: float

    def groups(self) -> list[range]:
        return [range(start, end) for start, end in zip((0, *self.ends), self.ends, strict=False)]


def best_grouping(size_bytes: Sequence[int], compute_s: Sequence[float], costs: Costs) -> Grouping:
    """Return the grouping of n layers that ends first, in O(n^2) for each number of groups tried.

    Args:
        size_bytes: what each layer adds to the copies, in the order of execution.
        compute_s: what each layer takes to compute.

    Raises:
        ArgumentError: the lengths differ, or a value is negative.
    """
    count = len(size_bytes)
    if count != len(compute_s) or any(value < 0 for value in (*size_bytes, *compute_s)):
        raise ArgumentError(
            f"{count} sizes and {len(compute_s)} times: need as many of each, none negative"
        )
    if count == 0:
        return Grouping((), 0.0)
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
    return Grouping(tuple(reversed(ends)), best)

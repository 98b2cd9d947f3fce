"""The planner's grouping is the best one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import pytest

from torchrelay.switching.daemon._planner import (
    Costs,
    best_grouping,
    grouped_by_profile,
    pipeline_s,
)
from torchrelay.switching.models._layout import ModelLayout
from torchrelay.switching.worker._profile import Layer, Profile


def pipelining_bound_s(
    ends: Sequence[int], size_bytes: Sequence[int], compute_s: Sequence[float], costs: Costs
) -> float:
    """Return the bound of a pipeline: max(copy, compute) plus the copy of the first group."""
    first = sum(size_bytes[: ends[0]]) / costs.bytes_per_s
    return max(sum(size_bytes) / costs.bytes_per_s, sum(compute_s)) + first


def brute_force(sizes: list[float], times: list[float], costs: Costs) -> float:
    """The best time of all 2^(n-1) groupings."""
    count = len(sizes)
    return min(
        pipeline_s([*cut, count], sizes, times, costs)  # type: ignore[arg-type]
        for groups in range(count)
        for cut in combinations(range(1, count), groups)
    )


@pytest.mark.parametrize("seed", range(20))
def test_equal_to_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 5, 20]) * draw.random() for _ in range(12)]
    times = [draw.choice([0, 1, 5, 20]) * draw.random() for _ in range(12)]
    costs = Costs(draw.choice([0.5, 1, 2]), draw.choice([0, 0.5, 3]), draw.choice([0, 0.5, 3]))
    best = best_grouping(sizes, times, costs)  # type: ignore[arg-type]
    time_s = pipeline_s(best, sizes, times, costs)  # type: ignore[arg-type]
    assert time_s == pytest.approx(brute_force(sizes, times, costs), rel=1e-12)
    assert best[-1] == 12 and list(best) == sorted(set(best))


def test_the_bound_of_a_pipeline_is_kept() -> None:
    layers, costs = ([100] * 30, [1.0] * 30), Costs(100.0, 0.5, 0.1)
    best = best_grouping(*layers, costs)
    assert 30 < pipelining_bound_s(best, *layers, costs) < pipeline_s(best, *layers, costs)


def test_without_overheads_every_layer_is_a_group_and_with_large_ones_there_is_one() -> None:
    times = [1.0] * 8
    ends = best_grouping([1] * 8, times, Costs(1.0))
    assert pipeline_s(ends, [1] * 8, times, Costs(1.0)) == 9.0
    assert best_grouping([1] * 8, times, Costs(1.0, 1e6, 0.0)) == (8,)


@pytest.mark.parametrize("policy", ["best", "one", "layer"])
def test_a_model_is_split_only_if_it_is_computed_earlier_for_it(policy: str) -> None:
    layout = ModelLayout((512,) * 4, ())
    costs = Costs(512.0)  # a second to copy a layer

    def is_split(whole_s: float) -> bool:
        # With waiting operators, all is computed 8 s after the start of the copies.
        profile = Profile(tuple(Layer((one,), 1.75) for one in range(4)), whole_s)
        return len(grouped_by_profile(layout, profile, costs, policy).groups) > 1

    assert is_split(4.1) == (policy != "one")  # after 4 s of copies
    assert is_split(3.9) == (policy == "layer")


def test_a_model_without_layers_has_no_groups() -> None:
    assert best_grouping([], [], Costs(1.0)) == ()

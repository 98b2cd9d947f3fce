"""Fair shares: whose turn it is."""

from __future__ import annotations

import random

from torchrelay.switching.daemon._shares import Shares


def turns(
    shares: Shares, weights: dict[str, float], seconds: float, draw: random.Random
) -> dict[str, float]:
    """Return the time each model gets in `seconds`, in slices of random lengths."""
    had = dict.fromkeys(weights, 0.0)
    while sum(had.values()) < seconds:
        name = min(weights, key=lambda one: shares.rank(0, one))
        shares.start(name)
        took = draw.uniform(0.1, 0.3)
        shares.charge(name, took, weights[name])
        had[name] += took
    return had


def test_models_get_time_by_their_weights() -> None:
    had = turns(Shares(), {"a": 1.0, "b": 1.0, "c": 2.0}, 100.0, random.Random(0))
    for name, share in (("a", 25.0), ("b", 25.0), ("c", 50.0)):
        assert abs(had[name] - share) < 0.6  # two slices


def test_a_model_that_comes_back_claims_no_time_that_it_did_not_ask_for() -> None:
    shares, draw = Shares(), random.Random(1)
    turns(shares, {"a": 1.0, "b": 1.0}, 10.0, draw)
    turns(shares, {"a": 1.0}, 50.0, draw)
    had = turns(shares, {"a": 1.0, "b": 1.0}, 10.0, draw)
    assert abs(had["a"] - had["b"]) < 1.0


def test_a_higher_priority_goes_first_whatever_it_had() -> None:
    shares = Shares()
    shares.charge("urgent", 100.0)
    assert shares.rank(1, "urgent") < shares.rank(0, "patient") < shares.rank(0, "urgent")

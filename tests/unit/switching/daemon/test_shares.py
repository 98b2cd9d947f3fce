"""Fair shares: whose turn it is."""

from __future__ import annotations

import itertools
import random

from torchrelay.switching.daemon._shares import Shares

TURN_S = 0.2


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
    had = turns(Shares(TURN_S), {"a": 1.0, "b": 1.0, "c": 2.0}, 100.0, random.Random(0))
    for name, share in (("a", 25.0), ("b", 25.0), ("c", 50.0)):
        assert abs(had[name] - share) < 0.6  # two slices


def test_a_model_that_comes_back_claims_no_time_that_it_did_not_ask_for() -> None:
    shares, draw = Shares(TURN_S), random.Random(1)
    turns(shares, {"a": 1.0, "b": 1.0}, 10.0, draw)
    turns(shares, {"a": 1.0}, 50.0, draw)
    had = turns(shares, {"a": 1.0, "b": 1.0}, 10.0, draw)
    assert abs(had["a"] - had["b"]) < 1.0


def test_no_model_waits_for_two_turns_of_another() -> None:
    """Turns end a little late, by a step or a part of a prompt."""
    for seed, count in itertools.product(range(20), (2, 3, 4)):
        shares, draw = Shares(TURN_S), random.Random(seed)
        names = [f"model {index}" for index in range(count)]
        draw.shuffle(names)
        had, order = dict.fromkeys(names, 0.0), list[str]()
        for _ in range(60):
            name = min(names, key=lambda one: shares.rank(0, one))
            took = shares.start(name) + draw.uniform(0.0, 0.4 * TURN_S)
            shares.charge(name, took)
            had[name] += took
            order.append(name)
        assert order == order[:count] * (60 // count)
        assert max(had.values()) - min(had.values()) < TURN_S / 2


def test_a_model_of_long_steps_gets_fewer_turns() -> None:
    shares, had = Shares(TURN_S), {"slow": 0.0, "fast": 0.0}
    for _ in range(200):
        name = min(had, key=lambda one: shares.rank(0, one))
        shares.start(name)
        took = 1.0 if name == "slow" else TURN_S
        shares.charge(name, took)
        had[name] += took
    assert abs(had["slow"] - had["fast"]) < 1.0 + TURN_S


def test_a_higher_priority_goes_first_whatever_it_had() -> None:
    shares = Shares(TURN_S)
    shares.charge("urgent", 100.0)
    assert shares.rank(1, "urgent") < shares.rank(0, "patient") < shares.rank(0, "urgent")

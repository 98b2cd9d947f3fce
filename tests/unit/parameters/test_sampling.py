"""Sampling: values, uniqueness and frequencies (chi-square) of every scheme and distribution."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch

from nodes import Server, Topology, Worker
from torchrelay.errors import ArgumentError, UnavailableError
from torchrelay.parameters._sampling import Sampling

SCHEMES = ["naive", "preloc", "pool", "local"]
LOW, HIGH = 10, 30
WEIGHTS = np.arange(20.0)  # the first key of the range is never drawn


def make(
    scheme: str, replacement: bool = True, distribution: str = "uniform", **fields: Any
) -> Worker:
    server = Server(50, length=2)
    server.enable_sampling_support(scheme, replacement, distribution, LOW, HIGH, seed=7, **fields)
    worker = Worker(0, server)
    worker.set(torch.arange(50), torch.arange(100.0))
    return worker


def drawn(worker: Worker, total: int, pieces: int = 1, start: int = 0) -> torch.Tensor:
    """One prepared sample, pulled in pieces; checks that the values are the keys'."""
    sample = worker.prepare_sample(total, start)
    keys = torch.full((total,), -1)
    for piece in keys.chunk(pieces):
        values = torch.empty(len(piece), 2)
        worker.pull_sample(sample, piece, values)
        assert torch.equal(values, torch.stack([2.0 * piece, 2.0 * piece + 1], 1))
    worker.finish_sample(sample)
    return keys


def expected_shares(distribution: str) -> np.ndarray[Any, Any]:
    if distribution == "uniform":
        return np.full(20, 1 / 20)
    if distribution == "weights":
        return WEIGHTS / WEIGHTS.sum()
    return np.array([math.log((k + 2) / (k + 1)) / math.log(21) for k in range(20)])


@pytest.mark.parametrize("distribution", ["uniform", "log-uniform", "weights"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_frequencies(scheme: str, distribution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRELAY_PARAMETERS_POOL_SIZE", "20000")
    if distribution == "weights":
        worker = make(scheme, weights=WEIGHTS)
    else:
        worker = make(scheme, distribution=distribution)
    keys = torch.cat([drawn(worker, 1000, pieces=3) for _ in range(20)])
    assert keys.min() >= LOW
    assert keys.max() < HIGH
    counts = torch.bincount(keys - LOW, minlength=20).numpy()
    expected = expected_shares(distribution) * len(keys)
    assert (counts[expected == 0] == 0).all()
    chi_square = float(((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum())
    assert chi_square < 43.8  # the 0.999 quantile for 19 degrees of freedom


@pytest.mark.parametrize("distribution", ["uniform", "log-uniform"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_without_replacement_no_key_comes_twice_in_a_sample(scheme: str, distribution: str) -> None:
    worker = make(scheme, replacement=False, distribution=distribution)
    for total in (1, 5, 20):
        assert len(drawn(worker, total, pieces=min(total, 3)).unique()) == total
    with pytest.raises(ArgumentError, match="20 keys to draw"):
        worker.prepare_sample(21, 0)


@pytest.mark.parametrize("scheme", ["naive", "preloc", "pool"])
def test_keys_of_tiny_weights_are_drawn_when_no_others_are_left(scheme: str) -> None:
    weights = np.full(20, 1.0)
    weights[3], weights[7], weights[9] = 1e-18, 1e-300, 0.0
    worker = make(scheme, replacement=False, weights=weights)
    assert set(drawn(worker, 17).tolist()).isdisjoint({LOW + 3, LOW + 7, LOW + 9})
    assert set(range(LOW, HIGH)) - set(drawn(worker, 18).tolist()) == {LOW + 7, LOW + 9}
    assert LOW + 9 not in drawn(worker, 19)


def test_draws_without_replacement_have_the_weights_that_are_left() -> None:
    """The probability of each ordered pair, from the keys that are left after the first."""
    weights = np.array([0.5, 0.3, 0.15, 0.05])
    sampling = Sampling("pool", False, "uniform", 0, 4, weights, seed=3)
    pairs = np.zeros((4, 4))
    draws = 20_000
    for _ in range(draws):
        keys = sampling.prepare(2).keys
        assert keys is not None
        pairs[keys[0], keys[1]] += 1
    expected = draws * np.outer(weights / (1 - weights), weights)
    apart = ~np.eye(4, dtype=bool)
    assert (pairs[~apart] == 0).all()
    chi_square = ((pairs - expected)[apart] ** 2 / expected[apart]).sum()
    assert chi_square < 31.3  # the 0.999 quantile for 11 degrees of freedom


def test_a_sample_may_span_two_passes_over_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRELAY_PARAMETERS_POOL_SIZE", "50")
    first, both = (
        Sampling("pool", True, "uniform", 0, 1000, seed=3).prepare(size).keys for size in (50, 80)
    )
    assert first is not None and both is not None
    assert np.array_equal(both[:50], first)
    assert set(both[50:]) <= set(first)


def test_samples_are_used_up_and_finished() -> None:
    worker = make("naive")
    sample = worker.prepare_sample(5, 0)
    keys, values = torch.empty(3, dtype=torch.int64), torch.empty(3, 2)
    worker.pull_sample(sample, keys, values)
    with pytest.raises(ArgumentError, match="2 of 5 left"):
        worker.pull_sample(sample, keys, values)
    worker.finish_sample(sample)
    with pytest.raises(ArgumentError, match="is finished"):
        worker.pull_sample(sample, keys, values)
    numpy_keys = np.empty(4, dtype=np.int64)
    worker.pull_sample(worker.prepare_sample(4, 0), numpy_keys, np.empty(8, dtype=np.float32), True)
    assert ((numpy_keys >= LOW) & (numpy_keys < HIGH)).all()


def test_wrong_arguments() -> None:
    server = Server(50)
    with pytest.raises(ArgumentError, match="not enabled"):
        Worker(0, server).prepare_sample(1, 0)
    wrong: list[tuple[Any, ...]] = [
        ("magic",),
        ("naive", True, "magic"),
        ("naive", True, "uniform", 5, 5),
        ("naive", True, "uniform", 0, 51),
    ]
    for arguments in wrong:
        with pytest.raises(ArgumentError):
            server.enable_sampling_support(*arguments)
    for weights in (np.ones(3), -np.ones(50), np.zeros(50), np.full(50, np.nan)):
        with pytest.raises(ArgumentError, match="weights"):
            server.enable_sampling_support(weights=weights)


def test_local_takes_what_is_here_and_says_when_there_is_nothing() -> None:
    """Two nodes, started one after the other by hand: node 0 has the even keys."""
    topologies = Topology.in_memory(2)
    servers: list[Server] = []
    other = threading.Thread(target=lambda: servers.append(Server(50, topology=topologies[1])))
    other.start()
    server = Server(50, topology=topologies[0])
    other.join()
    server.enable_sampling_support("local", True, "uniform", LOW, HIGH, seed=1)
    worker = Worker(0, server)
    sample = worker.prepare_sample(200, 0)
    keys = torch.empty(200, dtype=torch.int64)
    worker.pull_sample(sample, keys, torch.empty(200))
    assert (keys % 2 == 0).all()
    assert len(keys.unique()) == 10
    server.enable_sampling_support("local", False, "uniform", 11, 12)
    with pytest.raises(UnavailableError, match="0 keys"):
        worker.pull_sample(worker.prepare_sample(1, 0), keys[:1], torch.empty(1))
    worker.close()
    closing = threading.Thread(target=servers[0].close)
    closing.start()
    server.close()
    closing.join()

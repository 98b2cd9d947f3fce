from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.training._gossip import GossipTopology, partners, period

sizes = st.integers(1, 70)
topologies = st.sampled_from(list(GossipTopology))


def _mixing(topology: GossipTopology, nodes: int, step: int) -> np.ndarray:
    """How one step mixes the nodes' gradients: row i holds the weights of what node i then has."""
    weights = np.eye(nodes)
    for position in range(nodes):
        found = partners(topology, nodes, position, step)
        if found is not None:
            weights[position, position] = 0.5
            weights[position, found[1]] += 0.5
    return weights


@given(topologies, sizes, st.integers(0, 1000))
def test_who_sends_is_received_from(topology: GossipTopology, nodes: int, step: int) -> None:
    for position in range(nodes):
        found = partners(topology, nodes, position, step)
        if found is not None:
            assert found[0] != position
            answer = partners(topology, nodes, found[0], step)
            assert answer is not None
            assert answer[1] == position


@given(topologies, sizes, st.integers(0, 1000))
def test_a_step_keeps_the_mean(topology: GossipTopology, nodes: int, step: int) -> None:
    weights = _mixing(topology, nodes, step)
    assert np.all(weights.sum(0) == 1)
    assert np.all(weights.sum(1) == 1)


@given(sizes, st.integers(0, 10))
def test_dissemination_reaches_every_node_in_a_period(nodes: int, start: int) -> None:
    mixed = np.eye(nodes)
    for step in range(start, start + period(nodes)):
        mixed = _mixing(GossipTopology.DISSEMINATION, nodes, step) @ mixed
    assert np.all(mixed > 0)


@given(st.integers(0, 6), st.integers(0, 10))
def test_a_full_hypercube_averages_exactly_in_a_period(dimensions: int, start: int) -> None:
    nodes = 2**dimensions
    mixed = np.eye(nodes)
    for step in range(start, start + period(nodes)):
        mixed = _mixing(GossipTopology.CUBE, nodes, step) @ mixed
    assert np.all(mixed == 1 / nodes)

"""Scheme ``local`` draws only what its distribution can draw."""

from __future__ import annotations

import pytest
import torch

from nodes import Server, Worker, on_nodes
from torchrelay.errors import UnavailableError


@pytest.mark.parametrize("with_replacement", [True, False])
def test_keys_of_weight_zero_are_never_drawn(with_replacement: bool) -> None:
    """Every third key is at this node, every second has no weight."""
    weights = torch.arange(60.0) % 2

    def body(server: Server, worker: Worker) -> torch.Tensor:
        server.enable_sampling_support("local", with_replacement, weights=weights, seed=server.node)
        keys = torch.empty(10, dtype=torch.int64)
        drawn = []
        for _ in range(20):
            worker.draw_sample(keys, 0)
            drawn.append(keys.clone())
        server.enable_sampling_support("local", False, weights=weights)
        with pytest.raises(UnavailableError, match="keys of \\[0, 60\\) to draw"):
            worker.draw_sample(torch.empty(11, dtype=torch.int64), 0)
        return torch.cat(drawn)

    for drawn in on_nodes(3, body, table={"keys": 60}):
        assert (weights[drawn] > 0).all()

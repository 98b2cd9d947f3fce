"""A job that goes on when members are killed. Run it in three shells, kill and restart at will::

    python examples/elastic.py 0
    python examples/elastic.py 1
    python examples/elastic.py 2

Without a number it starts the three itself, kills the first, and starts it again.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn

from torchrelay.training import Elastic, ElasticLoader

PORTS = [29531, 29532, 29533]
STEPS, BATCH = 200, 48


def train(index: int) -> None:
    logging.basicConfig(level=logging.INFO, format=f"{index}: %(message)s")
    torch.manual_seed(0)
    inputs = torch.randn(1000, 8)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = ElasticLoader(data, BATCH)
    states: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    peers = ",".join(f"127.0.0.1:{port}" for port in PORTS)
    with Elastic(states, address=f"127.0.0.1:{PORTS[index]}", peers=peers) as elastic:
        while elastic.version < STEPS:
            with elastic.step() as step:
                x, y = loader.take(step)
                optimizer.zero_grad()
                loss = (model(x) - y).square().mean()
                loss.backward()
                step.reduce(model)
                time.sleep(0.05)  # a larger model
            if step.committed:
                optimizer.step()
        print(
            f"{index}: loss {loss:.4f}, parameters {sum(p.sum() for p in model.parameters()):.6f}"
        )
        print(elastic.report())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(int(sys.argv[1]))
    else:
        members = [subprocess.Popen([sys.executable, __file__, str(i)]) for i in range(3)]
        time.sleep(10)
        members[0].kill()
        members[0].wait()
        members[0] = subprocess.Popen([sys.executable, __file__, "0"])
        sys.exit(max(member.wait() for member in members))

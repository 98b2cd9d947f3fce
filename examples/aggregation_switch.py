"""Data-parallel training over several hosts whose gradients an aggregation switch sums, on one
machine.

    sudo .venv/bin/python examples/aggregation_switch.py --hosts 3 --ranks-per-host 2

Each host is a network namespace with one link to a namespace in which a switch runs.
The same model is trained over ``sml`` and over Gloo. Needs root and the commands ip, nsenter and
unshare; leaves nothing behind.
On real machines: ``torchrelay switch`` on one, and this file's ``train`` under torchrun on the
others.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchrelay import aggregation
from torchrelay.demo.hosts import run_on_hosts
from torchrelay.world import World

STEPS = 100


def train() -> None:
    """What each rank does; the environment says where the switch is."""
    world = World.from_environment()
    dist.init_process_group("sml", store=world.connect(), rank=world.rank, world_size=world.size)
    through_switch = losses(None, world.rank)
    over_gloo = losses(dist.new_group(backend="gloo"), world.rank)
    if world.rank == 0:
        print("step   loss over sml   loss over gloo")
        for step in (0, STEPS // 2, STEPS - 1):
            print(f"{step:4}   {through_switch[step]:13.6f}   {over_gloo[step]:14.6f}")
        for link in aggregation.stats()["hosts"].links:
            megabytes = link.sent_bytes / 1e6
            print(
                f"rank 0, {link.transport}: {megabytes:.1f} MB, {link.busy_s:.2f} s ({link.reason})"
            )
    torch.testing.assert_close(through_switch, over_gloo, rtol=1e-3, atol=1e-5)
    dist.destroy_process_group()


def losses(group: dist.ProcessGroup | None, rank: int) -> list[float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(32, 512), torch.nn.Tanh(), torch.nn.Linear(512, 32)),
        process_group=group,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs = torch.randn(256, 32, generator=torch.Generator().manual_seed(rank))
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sin())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(loss.item())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    arguments = parser.parse_args()
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    torchrun.append(f"--nproc-per-node={arguments.ranks_per_host}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    sys.exit(run_on_hosts(arguments.hosts, torchrun, [__file__], environment))


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        main()

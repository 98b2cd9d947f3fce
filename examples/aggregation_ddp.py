"""Data-parallel training over ``sml``: one line is different from training over Gloo.

torchrun --standalone --nproc-per-node 2 examples/aggregation_ddp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchrelay import aggregation
from torchrelay.world import World


def main() -> None:
    world = World.from_environment()  # torchrun's or mpirun's; one process without either
    dist.init_process_group("sml", store=world.connect(), rank=world.rank, world_size=world.size)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(world.rank))
    targets = inputs.sum(1, keepdim=True).sin()
    for step in range(200):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 50 == 0 or step == 199:
            mean = loss.detach().clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            if world.rank == 0:
                print(f"step {step:3}: loss {mean.item():.4f}")
    stats = aggregation.stats()["shm"]
    if world.rank == 0:
        print(
            f"{stats.jobs} operations, {stats.payload_bytes / 1e6:.1f} MB, waited "
            f"{stats.waiting_s:.2f} s"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

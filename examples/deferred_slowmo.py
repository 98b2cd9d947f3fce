"""A small model trained by SlowMo, with bfloat16 parameters that Kahan summation keeps exact.

torchrun --nproc-per-node 2 examples/deferred_slowmo.py
python examples/deferred_slowmo.py                          # alone: a world of one process
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchrelay.training import AnyPrecisionAdamW, SlowMomentumOptimizer, SlowMoState, slowmo_hook
from torchrelay.world import World

STEPS, AVERAGE_EVERY = 200, 8


def main() -> None:
    world = World.from_environment()
    dist.init_process_group("sml", store=world.connect(), rank=world.rank, world_size=world.size)
    torch.manual_seed(0)
    target = torch.randn(32, 8)
    model = DistributedDataParallel(torch.nn.Linear(32, 8).bfloat16())
    # Each rank keeps its gradients to itself, and meets the others every AVERAGE_EVERY steps.
    model.register_comm_hook(SlowMoState(sync_grads=False), slowmo_hook)
    base = AnyPrecisionAdamW(
        model.parameters(), lr=1e-2, use_kahan_summation=True, variance_dtype=torch.float32
    )
    optimizer = SlowMomentumOptimizer(base, slowmo_freq=AVERAGE_EVERY, slowmo_factor=0.2)

    torch.manual_seed(1 + world.rank)
    for step in range(STEPS):
        data = torch.randn(64, 32)
        loss = (model(data.bfloat16()) - (data @ target).bfloat16()).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if world.rank == 0 and step % 40 == 39:
            print(f"step {step:3d}: loss {loss.item():.4f}")
    weights = [torch.empty_like(model.module.weight) for _ in range(world.size)]
    dist.all_gather(weights, model.module.weight.detach())
    same = all(torch.equal(weights[0], other) for other in weights)
    if world.rank == 0:
        print(
            f"after the last average, the {world.size} ranks have "
            f"{'equal' if same else 'different'} parameters"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

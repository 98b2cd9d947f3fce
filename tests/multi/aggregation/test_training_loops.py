"""What training loops do to gradients works over ``sml`` as over Gloo: scalers, clipping,
accumulation.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import torchrelay.aggregation  # noqa: F401 - registers the backend
from torchrelay.world import World

# PyTorch warns of its own deprecated calls.
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS, MICRO_BATCHES = 3, 2
CASES = (  # kind, whether a scaler and autocast are used, the step with an infinite gradient
    ("ddp", False, -1),
    ("ddp", True, 1),
    ("fsdp2", False, -1),
    ("fsdp2", True, -1),
    ("fsdp2", True, 1),
    ("fsdp2 bf16", False, -1),
)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))  # uneven on two ranks


def wrapped(kind: str) -> nn.Module:
    module = plain()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(module)
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        if kind == "fsdp2 bf16"
        else MixedPrecisionPolicy()
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return module


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def micro_batches(step: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(4, 6, generator=generator) for _ in range(MICRO_BATCHES)]


def train(kind: str, rank: int, *, scaled: bool, overflow: int = -1) -> list[torch.Tensor]:
    """Parameters after a training with accumulation and clipping, then each step's norm and the
    scales.

    ``overflow``: the step in which rank 1 has an infinite gradient, which a scaler must skip on
    every rank.
    """
    module = wrapped(kind)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scaled)
    seen = []
    for step in range(STEPS):
        for number, inputs in enumerate(micro_batches(step, rank)):
            last = number == MICRO_BATCHES - 1
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(last)
            apart = isinstance(module, nn.parallel.DistributedDataParallel) and not last
            with module.no_sync() if apart else nullcontext():  # type: ignore[operator]
                with torch.autocast("cpu", torch.bfloat16, enabled=scaled):
                    loss = module(inputs).square().mean()
                loss = loss * math.inf if step == overflow and rank == 1 and last else loss
                scaler.scale(loss / MICRO_BATCHES).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        seen += [whole(norm), torch.tensor(scaler.get_scale())]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [whole(parameter) for parameter in module.parameters()] + seen


def by_hand(world_size: int) -> list[torch.Tensor]:
    """The parameters after the same training in one process, over the batches of all ranks."""
    module = plain()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    for step in range(STEPS):
        for rank in range(world_size):
            for inputs in micro_batches(step, rank):
                (module(inputs).square().mean() / MICRO_BATCHES / world_size).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return [whole(parameter) for parameter in module.parameters()]


@pytest.mark.processes(2)
def test_scalers_clipping_and_accumulation_do_what_they_do_over_gloo(world: World) -> None:
    store = world.connect(60)
    results: dict[str, dict[str, list[torch.Tensor]]] = {}
    for backend in ("gloo", "sml"):
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(backend, store),
            rank=world.rank,
            world_size=world.size,
        )
        results[backend] = {
            f"{kind}, scaled={scaled}, overflow={overflow}": train(
                kind, world.rank, scaled=scaled, overflow=overflow
            )
            for kind, scaled, overflow in CASES
        }
        dist.barrier()
        dist.destroy_process_group()
    expected = by_hand(world.size)
    for name, found in results["sml"].items():
        over_gloo = results["gloo"][name]
        assert len(found) == len(over_gloo) == len(expected) + 2 * STEPS
        assert all(torch.equal(a, b) or a.isnan() for a, b in zip(found, over_gloo, strict=True)), (
            name
        )
        exact = name in ("ddp, scaled=False, overflow=-1", "fsdp2, scaled=False, overflow=-1")
        for mine, reference in zip(found, expected, strict=False):
            if exact:
                torch.testing.assert_close(mine, reference, atol=1e-6, rtol=1e-5)
            elif "overflow=-1" in name:
                torch.testing.assert_close(mine, reference, atol=0.02, rtol=0.02)
    scales = results["sml"]["ddp, scaled=True, overflow=1"][-2 * STEPS + 1 :: 2]
    assert [scale.item() for scale in scales] == [1024, 1024, 512], "the overflow was skipped"

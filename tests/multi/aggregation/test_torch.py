"""What PyTorch builds on a backend gives the same over ``sml`` as over Gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchrelay.aggregation  # noqa: F401 - registers the backend
from torchrelay.world import World

# The functional collectives and compiled code find groups by name; meshes make groups of the
# default backend.
Run = Callable[[World, Path], list[torch.Tensor]]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        module(batch(rank)).square().mean().backward()
        optimizer.step()


def values(module: nn.Module) -> list[torch.Tensor]:
    return [
        getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in module.parameters()
    ]


def ddp(world: World, _: Path) -> list[torch.Tensor]:
    module = DistributedDataParallel(model(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train(module, optimizer, world.rank)
    with module.no_sync():
        module(batch(world.rank)).sum().backward()
    module(batch(world.rank)).square().sum().backward()
    return values(module) + [p.grad.clone() for p in module.parameters() if p.grad is not None]


def ddp_options(world: World, _: Path) -> list[torch.Tensor]:
    out = []
    choices: tuple[dict[str, Any], ...] = (
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
    )
    for options in choices:
        module = DistributedDataParallel(model(), **options)
        train(module, torch.optim.SGD(module.parameters(), lr=0.1), world.rank)
        out += values(module)
    return out


def ddp_hooks(world: World, _: Path) -> list[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    out = []
    hooks: list[tuple[Any, Any]] = [
        (None, default_hooks.allreduce_hook),
        (None, default_hooks.fp16_compress_hook),
        (
            powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2),
            powerSGD_hook.powerSGD_hook,
        ),
    ]
    for state, hook in hooks:
        module = DistributedDataParallel(model())
        module.register_comm_hook(state, hook)
        train(module, torch.optim.SGD(module.parameters(), lr=0.1), world.rank, steps=4)
        out += values(module)
    return out


def zero(world: World, _: Path) -> list[torch.Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), optimizer_class=torch.optim.Adam, lr=0.01
    )
    train(module, optimizer, world.rank)
    return values(module)


def fsdp1(world: World, _: Path) -> list[torch.Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    train(module, torch.optim.SGD(module.parameters(), lr=0.1), world.rank)
    with FullyShardedDataParallel.summon_full_params(module):
        return values(module)


def fsdp2(world: World, _: Path) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = model()
    mesh = init_device_mesh("cpu", (world.size,))
    for layer in module:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    train(module, torch.optim.AdamW(module.parameters(), lr=0.01), world.rank)
    return values(module)


def tensor_parallel(world: World, _: Path) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    module = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(module, torch.optim.SGD(module.parameters(), lr=0.1), 0)
    whole = torch.arange(24.0).view(6, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert isinstance(sharded, DTensor)
    moved: Any = sharded.redistribute(placements=[Shard(1)])
    product = (moved @ distribute_tensor(whole.t(), mesh, [Shard(0)])).redistribute(
        placements=[Replicate()]
    )
    return [
        *values(module),
        moved.full_tensor(),
        product.to_local(),
        cast(DTensor, sharded.sum()).full_tensor(),
    ]


def mesh(world: World, _: Path) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("outer", "inner"))
    tensor = torch.full((3,), float(world.rank))
    dist.all_reduce(tensor, group=grid.get_group("inner"))
    dist.all_reduce(tensor, group=grid.get_group("outer"))
    return [tensor, torch.tensor(grid["inner"].get_local_rank() - world.rank)]


def checkpoint(world: World, folder: Path) -> list[torch.Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = model()
    fully_shard(module, mesh=init_device_mesh("cpu", (world.size,)))
    saved = values(module)
    state: dict[str, Any] = {"model": module.state_dict(), "step": 3}
    dcp.save(state, checkpoint_id=folder / dist.get_backend())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    dcp.load(state, checkpoint_id=folder / dist.get_backend())
    module.load_state_dict(state["model"])
    loaded = values(module)
    assert all(map(torch.equal, saved, loaded)) and state["step"] == 3
    return loaded


def functional(world: World, _: Path) -> list[torch.Tensor]:
    from torch.distributed import _functional_collectives as fun

    group = dist.group.WORLD
    assert group is not None
    mine = torch.arange(8.0) + 10 * world.rank
    out = [
        fun.all_reduce(mine, "sum", group),
        fun.all_reduce(mine, "max", group),
        fun.all_gather_tensor(mine, 0, group),
        fun.reduce_scatter_tensor(mine, "sum", 0, group),
        fun.broadcast(mine, 1, group),
        fun.all_to_all_single(mine, None, None, group),
        fun.all_to_all_single_autograd(mine, None, None, group),
        *fun.all_reduce_coalesced([mine, mine + 1], "sum", group),
        *fun.all_gather_into_tensor_coalesced([mine, mine + 1], group),
        *fun.reduce_scatter_tensor_coalesced([mine, mine + 1], "sum", [0, 0], group),
        fun.all_gather_tensor_autograd(mine, 0, group),
    ]
    return [fun.wait_tensor(t).clone() for t in out]


def differentiable(world: World, _: Path) -> list[torch.Tensor]:
    import torch.distributed.nn.functional as differentiable_collectives

    x = (torch.arange(4.0) + world.rank).requires_grad_()
    y = differentiable_collectives.all_reduce(x * x, group=dist.group.WORLD)
    z = torch.cat(list(differentiable_collectives.all_gather(x * 3, group=dist.group.WORLD)))
    (y.sum() * (world.rank + 1) + z.square().sum()).backward()
    assert x.grad is not None
    return [y.detach(), z.detach(), x.grad]


def compiled(world: World, _: Path) -> list[torch.Tensor]:
    from torch.distributed import _functional_collectives as fun

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        total = fun.all_reduce(x * 2, "sum", dist.group.WORLD)  # type: ignore[arg-type]
        return fun.all_gather_tensor(total + 1, 0, dist.group.WORLD).cos()  # type: ignore[arg-type]

    module = DistributedDataParallel(model())
    quick = torch.compile(module, backend="aot_eager")
    quick(batch(world.rank)).square().mean().backward()
    return [
        step(torch.arange(4.0) + world.rank),
        *(p.grad.clone() for p in module.parameters() if p.grad is not None),
    ]


def joined(world: World, _: Path) -> list[torch.Tensor]:
    """Ranks with uneven input, and batch normalisation over all ranks."""
    module = DistributedDataParallel(model())
    with module.join():
        for _ in range(2 + world.rank):  # type: ignore[assignment]
            module(batch(world.rank)).sum().backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


RUNS: tuple[Run, ...] = (
    ddp, ddp_options, ddp_hooks, zero, fsdp1, fsdp2, tensor_parallel, mesh, checkpoint, functional,
    differentiable, compiled, joined,
)  # fmt: skip


def _both(world: World, name: str, folder: Path) -> None:
    """The same once over each backend. Two numbers have one sum, so the results are equal bit for
    bit.
    """
    run = next(r for r in RUNS if r.__name__ == name)
    store = world.connect(60)
    results = {}
    for backend in ("gloo", "sml"):
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(backend, store),
            rank=world.rank,
            world_size=world.size,
        )
        results[backend] = run(world, folder)
        dist.barrier()
        dist.destroy_process_group()
        torch.compiler.reset()
    assert len(results["sml"]) == len(results["gloo"]) > 0
    for ours, theirs in zip(results["sml"], results["gloo"], strict=True):
        assert torch.equal(ours, theirs), (name, ours, theirs)


@pytest.mark.processes(2)
@pytest.mark.parametrize("name", [run.__name__ for run in RUNS])
def test_equals_gloo(world: World, name: str, tmp_path: Path) -> None:
    _both(world, name, tmp_path)

"""Deferred modules under DTensor, FSDP and tensor parallelism: each rank makes its part, the whole
is eager's.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchrelay.deferred import deferred_init, dematerialize, is_deferred, materialize_module
from torchrelay.errors import ArgumentError, DeferredError, UnsupportedError
from torchrelay.world import World


class Model(nn.Module):
    """Layers of uneven sizes, a tie, a buffer, a padding row."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 24, padding_idx=5)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(24, 4, 40, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(24, 37, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(24) + 0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def join(world: World) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{world.master_addr}:{world.master_port}",
        rank=world.rank,
        world_size=world.size,
    )


def eager() -> Model:
    torch.manual_seed(11)
    return Model()


def deferred() -> Model:
    torch.manual_seed(11)
    return deferred_init(Model)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same(module: nn.Module, reference: nn.Module) -> None:
    found = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    mine = {name.replace("_fsdp_wrapped_module.", ""): tensor for name, tensor in found.items()}
    theirs = dict(reference.named_parameters(remove_duplicate=False)) | dict(
        reference.named_buffers()
    )
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(full(mine[name].detach()), tensor.detach()), name


@pytest.mark.processes(3)
def test_dtensors_on_a_line(world: World) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    join(world)
    mesh = init_device_mesh("cpu", (3,))
    for placement in (Shard(0), Replicate()):
        module = deferred()
        materialize_module(module, shard=(mesh, [placement]))
        assert isinstance(module.head.weight, DTensor)
        assert isinstance(module.head.weight, nn.Parameter)
        assert module.head.weight is module.embedding.weight
        assert_same(module, eager())
    module = deferred()

    def place(name: str, tensor: torch.Tensor) -> Any:
        return [Shard(tensor.dim() - 1)] if tensor.dim() > 1 else None

    materialize_module(module, shard=(mesh, place))
    assert not isinstance(module.scale, DTensor)
    assert_same(module, eager())
    _check_dimensions(mesh)
    _check_empty_shards(mesh)


def _check_dimensions(mesh: Any) -> None:
    """Placements for all tensors replicate one without that dimension; a function must know
    better.
    """
    from torch.distributed.tensor import Shard

    for placement in (Shard(0), Shard(1), Shard(-1)):
        torch.manual_seed(11)
        reference = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7))
        torch.manual_seed(11)
        module: Any = deferred_init(lambda: nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7)))
        materialize_module(module, shard=(mesh, [placement]))
        assert module[0].weight.placements == (Shard(placement.dim % 2),)
        assert module[1].num_batches_tracked.placements[0].is_replicate()
        assert_same(module, reference)
    with pytest.raises(ArgumentError, match=r"bias.*Replicate"):
        materialize_module(
            deferred_init(nn.Linear, 6, 7), shard=(mesh, lambda name, tensor: [Shard(1)])
        )


def _check_empty_shards(mesh: Any) -> None:
    """Three ranks, two rows: the last rank has none, and must not be the only one that fails."""
    from torch.distributed.fsdp import fully_shard

    def build() -> nn.Module:
        return nn.Linear(4, 2)

    torch.manual_seed(11)
    reference = build()
    torch.manual_seed(11)
    module = deferred_init(build)
    fully_shard(module, mesh=mesh)
    materialize_module(module)
    assert_same(module, reference)
    torch.manual_seed(11)
    module = deferred_init(build)
    materialize_module(module, shard=lambda name, tensor: (slice(2, 4),))
    assert module.weight.shape == (0, 4)


@pytest.mark.processes(4)
def test_dtensors_on_a_plane(world: World) -> None:
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    join(world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for placements in ([Shard(0), Shard(0)], [Replicate(), Shard(0)], [Shard(0), Replicate()]):
        module = deferred()
        materialize_module(module, shard=(mesh, placements))
        assert_same(module, eager())

    def place(name: str, tensor: torch.Tensor) -> Any:
        return [Shard(1), Shard(0)] if tensor.dim() > 1 else [Replicate(), Replicate()]

    module = deferred()
    materialize_module(module, shard=(mesh, place))
    assert_same(module, eager())


@pytest.mark.processes(4)
def test_fully_sharding_takes_the_memory_of_a_shard(world: World) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    join(world)
    torch.manual_seed(11)
    module = deferred_init(nn.Linear, 512, 1024, bias=False)
    fully_shard(module, mesh=init_device_mesh("cpu", (4,)))
    with torch.profiler.profile(profile_memory=True) as profiler:
        materialize_module(module)
    allocated = [event.cpu_memory_usage for event in profiler.events()]
    whole, shard = 4 * 512 * 1024, 512 * 1024
    assert shard <= max(allocated) < whole / 2
    assert resident_bytes(whole) == 0, "the whole parameter was computed, and kept"
    torch.manual_seed(11)
    assert_same(module, nn.Linear(512, 1024, bias=False))


def resident_bytes(size_bytes: int) -> int:
    """The bytes of real storages that are so large."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor and not one.is_meta]
    storages = {one.untyped_storage() for one in tensors if one.layout == torch.strided}
    return sum(one.nbytes() for one in storages if one.nbytes() == size_bytes)


@pytest.mark.processes(3)
def test_fully_shard_takes_a_deferred_module(world: World) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    join(world)
    mesh = init_device_mesh("cpu", (3,))
    results = []
    for build in (eager, deferred):
        module = build()
        for layer in module.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        if build is deferred:
            assert is_deferred(module)
            parameters = list(module.parameters())
            with pytest.raises(UnsupportedError, match="DTensor"):
                materialize_module(module, dtype=torch.float64)
            materialize_module(module)
            assert not is_deferred(module)
            assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
            assert_same(module, eager())
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        torch.manual_seed(world.rank)
        for _ in range(3):
            loss = module(torch.randint(37, (2, 7))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([full(p.detach()) for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    before = [full(p.detach()) for p in module.parameters()]
    with pytest.raises(UnsupportedError, match="fully_shard"):
        dematerialize(module)
    assert all(
        torch.equal(a, full(p.detach())) for a, p in zip(before, module.parameters(), strict=True)
    )


@pytest.mark.processes(2)
def test_tensor_parallel_plan_takes_a_deferred_module(world: World) -> None:
    from torch.distributed.tensor import DTensor, init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    join(world)
    mesh = init_device_mesh("cpu", (2,))

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 6))

    torch.manual_seed(3)
    reference = build()
    torch.manual_seed(3)
    module: Any = deferred_init(build)
    parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    materialize_module(module)
    assert isinstance(module[0].weight, DTensor)
    assert_same(module, reference)
    values = torch.ones(3, 12)
    assert torch.allclose(module(values), reference(values), atol=1e-6)


def _fsdp1(world: World, **kwargs: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = FullyShardedDataParallel(
        deferred(), use_orig_params=True, device_id=torch.device("cpu"), **kwargs
    )
    with FullyShardedDataParallel.summon_full_params(module):
        assert_same(module, eager())


@pytest.mark.processes(2)
def test_fsdp1_materializes_through_param_init_fn(world: World) -> None:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    join(world)
    _fsdp1(
        world,
        param_init_fn=lambda module: materialize_module(module, check_fn=lambda m: m is module),
    )
    policy = ModuleWrapPolicy({nn.TransformerEncoderLayer})
    _fsdp1(world, param_init_fn=materialize_module, auto_wrap_policy=policy)


@pytest.mark.processes(2)
def test_fsdp1_finds_torchdistx_by_its_name(world: World) -> None:
    from torchrelay import compat

    compat.install("torchdistx")
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    join(world)
    _fsdp1(world, auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}))


@pytest.mark.processes(2)
def test_a_collective_on_a_deferred_tensor_is_refused(world: World) -> None:
    join(world)
    with pytest.raises(DeferredError, match="Materialize"):
        dist.broadcast(deferred().scale, 0)  # type: ignore[arg-type]

"""GossipGraD on every backend: against its mixing written out for all ranks in one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchrelay.errors import ArgumentError, UnsupportedError
from torchrelay.training._gossip import (
    GossipGraDState,
    GossipTopology,
    get_num_modules,
    gossip_grad_hook,
    partners,
    period,
)
from torchrelay.world import World

BACKENDS = ["gloo", "sml"]
CASES = {  # the ranks of each node
    "2x2": [[0, 1], [2, 3]],
    "interleaved": [[0, 2], [1, 3]],
    "4x1": [[0], [1], [2], [3]],
    "1x4": [[0, 1, 2, 3]],
}


def _start(backend: str, world: World) -> None:
    if backend == "sml":
        import torchrelay.aggregation  # noqa: F401 - registers the backend
    dist.init_process_group(
        backend, store=world.connect(30), rank=world.rank, world_size=world.size
    )


def _state(nodes: list[list[int]], **options: Any) -> GossipGraDState:
    local, _ = dist.new_subgroups_by_enumeration(nodes)
    return GossipGraDState(local_process_group=local, num_nodes=len(nodes), **options)


def _reference(
    grads: list[torch.Tensor],
    nodes: list[list[int]],
    topology: GossipTopology,
    iteration: int,
    seed: int,
) -> list[torch.Tensor]:
    """What each rank's gradient becomes."""
    import random

    order = list(range(len(nodes)))
    epoch, step = divmod(iteration, period(len(nodes)))
    if epoch:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    means = [torch.stack([grads[rank] for rank in ranks]).mean(0) for ranks in nodes]
    result = [torch.empty(0)] * len(grads)
    for node, ranks in enumerate(nodes):
        found = partners(topology, len(nodes), order.index(node), step)
        mixed = means[node] if found is None else (means[node] + means[order[found[1]]]) / 2
        for rank in ranks:
            result[rank] = mixed
    return result


def _gradient(rank: int, iteration: int, index: int) -> torch.Tensor:
    return torch.randn(
        50, generator=torch.Generator().manual_seed(1000 * iteration + 10 * index + rank)
    ).double()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.processes(4)
def test_whole_gradients_as_fsdp_gives_them(world: World, backend: str) -> None:
    _start(backend, world)
    for nodes in CASES.values():
        for topology in GossipTopology:
            state = _state(nodes, topology=topology, num_modules=2, random_seed=7)
            for iteration in range(9):
                for index in range(2):
                    grads = [_gradient(rank, iteration, index) for rank in range(4)]
                    grad = grads[world.rank].clone()
                    assert gossip_grad_hook(state, grad) is None
                    expected = _reference(grads, nodes, topology, iteration, 7)[world.rank]
                    torch.testing.assert_close(grad, expected, rtol=1e-14, atol=1e-14)
            assert state.iteration == 9


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.processes(3)
def test_three_nodes_on_a_cube_and_a_ring(world: World, backend: str) -> None:
    _start(backend, world)
    nodes = [[0], [1], [2]]
    for topology in GossipTopology:
        state = _state(nodes, topology=topology)
        for iteration in range(6):
            grads = [_gradient(rank, iteration, 0) for rank in range(3)]
            grad = grads[world.rank].clone()
            gossip_grad_hook(state, grad)
            expected = _reference(grads, nodes, topology, iteration, state.random_seed)[world.rank]
            torch.testing.assert_close(grad, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.processes(2)
def test_large_float16_gradients_do_not_overflow(world: World) -> None:
    _start("gloo", world)
    for nodes in ([[0], [1]], [[0, 1]]):
        grad = torch.full((3,), 60000.0, dtype=torch.float16)
        gossip_grad_hook(_state(nodes), grad)
        assert grad.tolist() == [60000.0] * 3


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def _backward(model: nn.Module, rank: int, step: int) -> None:
    model.zero_grad()
    data = torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank)).double()
    model(data).square().mean().backward()


def _train_reference(
    steps: int, nodes: list[list[int]], topology: GossipTopology, seed: int
) -> list[list[torch.Tensor]]:
    models = [_model() for _ in range(4)]
    for step in range(steps):
        for rank, model in enumerate(models):
            _backward(model, rank, step)
        for params in zip(*(model.parameters() for model in models), strict=True):
            mixed = _reference([p.grad for p in params], nodes, topology, step, seed)
            for param, grad in zip(params, mixed, strict=True):
                param.data -= 0.1 * grad
    return [[p.detach() for p in model.parameters()] for model in models]


def _train(model: nn.Module, rank: int, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        _backward(model, rank, step)
        optimizer.step()


def _assert_close(model: nn.Module, expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(
        [p.detach() for p in model.parameters()], expected, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.processes(4)
def test_ddp_in_several_buckets(world: World, backend: str) -> None:
    _start(backend, world)
    nodes = CASES["2x2"]
    model = DistributedDataParallel(_model(), bucket_cap_mb=1e-5)
    state = _state(nodes, topology=GossipTopology.CUBE, random_seed=5)
    model.register_comm_hook(state, gossip_grad_hook)
    _train(model, world.rank, 6)
    _assert_close(model, _train_reference(6, nodes, GossipTopology.CUBE, 5)[world.rank])
    assert state.iteration == 6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.processes(4)
def test_fsdp_without_sharding(world: World, backend: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    _start(backend, world)
    nodes = CASES["4x1"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NO_SHARD is deprecated, and CPU is said to be slow
        model = FullyShardedDataParallel(
            _model(),
            sharding_strategy=ShardingStrategy.NO_SHARD,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    assert get_num_modules(model) == 2  # the outermost one holds no parameters of its own
    state = _state(nodes, num_modules=get_num_modules(model))
    model.register_comm_hook(state, gossip_grad_hook)
    _train(model, world.rank, 6)
    expected = _train_reference(6, nodes, GossipTopology.DISSEMINATION, state.random_seed)
    _assert_close(model, expected[world.rank])
    assert state.iteration == 6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.processes(2)
def test_defaults_and_refusals(world: World, backend: str) -> None:
    _start(backend, world)
    state = GossipGraDState()
    assert (state.num_nodes, state.proc_per_node, state.topology) == (
        1,
        2,
        GossipTopology.DISSEMINATION,
    )
    grad = torch.tensor([float(world.rank)])
    gossip_grad_hook(state, grad)
    assert grad.item() == 0.5

    assert state.iteration == 1
    assert GossipGraDState(topology=GossipTopology.CUBE).topology is GossipTopology.CUBE

    alone, _ = dist.new_subgroups_by_enumeration([[0], [1]])
    for options in (
        {"num_modules": 0},
        {"topology": "bogus"},
        {"num_nodes": 2},
        {"local_process_group": alone},
        {"local_process_group": alone, "num_nodes": 3},
    ):
        with pytest.raises(ArgumentError, match="GossipGraDState"):
            GossipGraDState(**options)
    with pytest.raises(UnsupportedError, match="NO_SHARD"):
        gossip_grad_hook(state, torch.ones(4), torch.ones(2))
    dist.barrier()  # rank 0 serves the store that the others make their groups with

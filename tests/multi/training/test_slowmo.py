"""SlowMo on every backend: against the algorithm written out for all ranks in one process."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchrelay.errors import ArgumentError, UnsupportedError
from torchrelay.training._slowmo import (
    SlowMomentumOptimizer,
    SlowMoState,
    average_parameters,
    slowmo_hook,
)
from torchrelay.world import World

BACKENDS = ["gloo", "sml"]
WORLD = 4
LR, FREQ, FACTOR, SLOW_LR = 0.1, 3, 0.6, 0.9


def _start(backend: str, world: World) -> None:
    if backend == "sml":
        import torchrelay.aggregation  # noqa: F401 - registers the backend
    dist.init_process_group(
        backend, store=world.connect(30), rank=world.rank, world_size=world.size
    )


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def _input(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank)).double()


def _backward(model: nn.Module, rank: int, step: int) -> None:
    model.zero_grad()
    model(_input(rank, step)).square().mean().backward()


def _optimizer(model: nn.Module, **options: Any) -> SlowMomentumOptimizer:
    base = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    return SlowMomentumOptimizer(base, FREQ, FACTOR, SLOW_LR, **options)


def _reference(steps: int, groups: list[list[int]]) -> list[list[torch.Tensor]]:
    """The parameters of every rank after ``steps``; gradients averaged inside each group. SlowMo,
    algorithm 1.
    """
    models = [_model() for _ in range(WORLD)]
    bases = [torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9) for model in models]
    x = [p.detach().clone() for p in models[0].parameters()]
    u = [torch.zeros_like(p) for p in x]
    for step in range(steps):
        for rank, model in enumerate(models):
            _backward(model, rank, step)
        for group in groups:
            for grads in zip(
                *([p.grad for p in models[rank].parameters()] for rank in group), strict=True
            ):
                mean = torch.stack(grads).mean(0)
                for grad in grads:
                    grad.copy_(mean)
        for base in bases:
            base.step()
        if (step + 1) % FREQ == 0:
            ranks = [[p.detach() for p in model.parameters()] for model in models]
            for i, params in enumerate(zip(*ranks, strict=True)):
                u[i] = FACTOR * u[i] + (x[i] - torch.stack(params).mean(0)) / LR
                x[i] = x[i] - SLOW_LR * LR * u[i]
                for param in params:
                    param.copy_(x[i])
    return [[p.detach() for p in model.parameters()] for model in models]


def _assert_close(model: nn.Module, expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(
        [p.detach() for p in model.parameters()], expected, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 1, 2, 3]]], ids=str)
@pytest.mark.processes(WORLD)
def test_ddp_with_the_hook_is_the_algorithm(
    world: World, backend: str, groups: list[list[int]]
) -> None:
    _start(backend, world)
    subgroup, _ = dist.new_subgroups_by_enumeration(groups)
    model = DistributedDataParallel(_model(), bucket_cap_mb=1e-5)
    model.register_comm_hook(SlowMoState(subgroup), slowmo_hook)
    optimizer = _optimizer(model)
    for step in range(8):
        _backward(model, world.rank, step)
        optimizer.step()
        if step in (1, 2, 7):
            _assert_close(model, _reference(step + 1, groups)[world.rank])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.processes(WORLD)
def test_without_gradient_reduction_it_is_local_sgd(world: World, backend: str) -> None:
    _start(backend, world)
    model = DistributedDataParallel(_model())
    model.register_comm_hook(SlowMoState(sync_grads=False), slowmo_hook)
    optimizer = _optimizer(model)
    for step in range(7):
        _backward(model, world.rank, step)
        optimizer.step()
    _assert_close(model, _reference(7, [[0], [1], [2], [3]])[world.rank])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.processes(WORLD)
def test_the_default_subgroup_is_the_host(world: World, backend: str) -> None:
    _start(backend, world)
    state = SlowMoState()
    assert dist.get_process_group_ranks(state.subgroup) == [0, 1, 2, 3]
    grad = torch.tensor([float(world.rank)])
    assert slowmo_hook(state, grad) is None
    assert grad.item() == 1.5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.processes(WORLD)
def test_fsdp_without_sharding(world: World, backend: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    _start(backend, world)
    groups = [[0, 1], [2, 3]]
    subgroup, _ = dist.new_subgroups_by_enumeration(groups)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NO_SHARD is deprecated, and CPU is said to be slow
        model = FullyShardedDataParallel(
            _model(),
            sharding_strategy=ShardingStrategy.NO_SHARD,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    model.register_comm_hook(SlowMoState(subgroup), slowmo_hook)
    optimizer = _optimizer(model)
    for step in range(7):
        _backward(model, world.rank, step)
        optimizer.step()
    _assert_close(model, _reference(7, groups)[world.rank])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.processes(WORLD)
def test_fully_shard_inside_subgroups_averages_equal_shards(world: World, backend: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    _start(backend, world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))
    model = _model()
    fully_shard(model, mesh=mesh["shard"])
    optimizer = _optimizer(model, process_group=mesh["node"].get_group())
    for step in range(7):
        _backward(model, world.rank, step)
        optimizer.step()
    full = [cast(DTensor, p).full_tensor().detach() for p in model.parameters()]
    torch.testing.assert_close(
        full, _reference(7, [[0, 1], [2, 3]])[world.rank], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.processes(2)
def test_a_checkpoint_between_slow_steps_goes_on_exactly(world: World, backend: str) -> None:
    _start(backend, world)
    model = _model()
    optimizer = _optimizer(model)
    for step in range(4):
        _backward(model, world.rank, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)

    file.seek(0)
    model_state, optimizer_state = torch.load(file)
    other = _model()
    other.load_state_dict(model_state)
    resumed = SlowMomentumOptimizer(torch.optim.SGD(other.parameters(), lr=7.0), 99, 0.1, 0.1)
    resumed.load_state_dict(copy.deepcopy(optimizer_state))
    for step in range(4, 10):
        for m, o in ((model, optimizer), (other, resumed)):
            _backward(m, world.rank, step)
            o.step()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.processes(3)
def test_averaging_any_types_and_sizes(world: World, backend: str) -> None:
    _start(backend, world)
    tensors = [
        torch.full((1000, 3000), float(world.rank)),
        torch.full((7,), float(world.rank), dtype=torch.bfloat16),
        torch.full((2000, 4000), float(world.rank)),
        torch.full((0, 3), 1.0),
        torch.full((5, 3), float(world.rank), dtype=torch.float64).t(),
        torch.tensor(float(world.rank), dtype=torch.float16),
    ]
    average_parameters(tensors)
    assert all((tensor == 1).all() for tensor in tensors)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.processes(2)
def test_an_averaging_that_fails_leaves_each_tensor_old_or_averaged(
    world: World, backend: str
) -> None:
    _start(backend, world)
    sums = iter([dist.all_reduce])

    def fail_from_the_second_on(*args: Any, **kwargs: Any) -> Any:
        for all_reduce in sums:
            return all_reduce(*args, **kwargs)
        raise KeyboardInterrupt

    params = [torch.full((5,), float(world.rank)) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", fail_from_the_second_on)
        with pytest.raises(KeyboardInterrupt):
            average_parameters(params)
    for param in params:
        assert param[0] in (0.5, world.rank) and torch.equal(param, param[0].expand(5))


def _alone() -> None:
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


@pytest.mark.processes(1)
def test_schedulers_groups_and_late_parameters(world: World) -> None:
    _alone()
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = SlowMomentumOptimizer(
        torch.optim.Adam([first], lr=0.1), slowmo_freq=2, slowmo_factor=0.0
    )
    optimizer.add_param_group({"params": [second], "lr": 0.2})
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (first + second).square().sum()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(40):
        optimizer.step(closure)
        scheduler.step()
    assert losses[0] == 12
    assert losses[-1] < 1
    assert not torch.equal(first, second)
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.2 * 0.99**40)


@pytest.mark.processes(1)
def test_a_learning_rate_of_almost_zero_leaves_parameters_alone(world: World) -> None:
    _alone()
    for lr in (0.0, 1e-40, 1e-300):
        for dtype in (torch.float16, torch.float32, torch.float64):
            param = nn.Parameter(torch.ones(3, dtype=dtype))
            optimizer = SlowMomentumOptimizer(torch.optim.SGD([param], lr=lr), slowmo_freq=1)
            param.grad = torch.ones_like(param)
            optimizer.step()
            assert torch.equal(param, torch.ones_like(param)), (lr, dtype)


@pytest.mark.processes(1)
def test_low_precision_parameters_do_not_overflow(world: World) -> None:
    """What moved is divided by the learning rate, not the parameter itself."""
    _alone()
    param = nn.Parameter(torch.full((3,), 8.0, dtype=torch.float16))
    optimizer = SlowMomentumOptimizer(torch.optim.SGD([param], lr=1e-4), slowmo_freq=1)
    param.grad = torch.full_like(param, 1000.0)
    optimizer.step()
    assert torch.allclose(param, torch.tensor(7.9, dtype=torch.float16), atol=0.02)


@pytest.mark.processes(1)
def test_a_copy_goes_on_by_itself(world: World) -> None:
    from torchrelay.compat.torchdistx.slowmo import slowmo_optimizer

    _alone()
    for kind in (SlowMomentumOptimizer, slowmo_optimizer.SlowMomentumOptimizer):
        model = _model()
        base = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        optimizer = kind(base, 2, FACTOR, process_group=dist.group.WORLD)
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # replaces its step()
        for step in range(3):
            _backward(model, 0, step)
            optimizer.step()
        copied_model, copied = copy.deepcopy((model, optimizer))
        before = copy.deepcopy(model.state_dict())
        for step in range(3, 6):
            _backward(copied_model, 0, step)
            copied.step()
        assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
        for step in range(3, 6):
            _backward(model, 0, step)
            optimizer.step()
        pairs = zip(model.parameters(), copied_model.parameters(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.processes(1)
def test_what_cannot_work_is_refused(world: World) -> None:
    _alone()
    base = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    wrong: tuple[dict[str, Any], ...] = (
        {"slowmo_freq": 0},
        {"slowmo_factor": -1.0},
        {"slowmo_lr": -1.0},
    )
    for options in wrong:
        with pytest.raises(ArgumentError, match=next(iter(options))):
            SlowMomentumOptimizer(base, **options)
    with pytest.raises(ArgumentError, match="no optimizer"):
        SlowMomentumOptimizer([nn.Parameter(torch.ones(1))])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="slowmo_freq, slowmo_factor"):
        SlowMomentumOptimizer(base).load_state_dict(base.state_dict())
    for subgroup in ([0], False):
        with pytest.raises(ArgumentError, match="must be a process group"):
            SlowMoState(subgroup)  # type: ignore[arg-type]
    others = SlowMomentumOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), 7)
    refusing = SlowMomentumOptimizer(base)
    with pytest.raises(ArgumentError, match=r"shape \(2,\), and this optimizer has shape \(1,\)"):
        refusing.load_state_dict(others.state_dict())
    assert refusing.slowmo_freq == 48
    with pytest.raises(UnsupportedError, match="NO_SHARD"):
        slowmo_hook(SlowMoState(), torch.ones(4), torch.ones(2))

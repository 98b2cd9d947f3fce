"""Training on two processes equals DistributedDataParallel with ``nn.Embedding(sparse=True)``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchrelay.errors import (
    ArgumentError,
    MismatchError,
    OperationTimeoutError,
    UnsupportedError,
)
from torchrelay.parameters import Embedding, Table, TableWeight, optim
from torchrelay.world import World

if TYPE_CHECKING:
    from ranks import RunProcesses

# Of the references: torch's sparse Adagrad.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")

ROWS, DIM = 20, 3
NODES = {"one node": None, "a node each": lambda rank: rank}
RULES: dict[str, tuple[Any, Any]] = {
    "sgd": (optim.sgd(0.5), lambda p: torch.optim.SGD(p, lr=0.5)),
    "adam": (optim.adam(0.1), lambda p: torch.optim.SparseAdam(p, lr=0.1)),
    "adagrad": (optim.adagrad(0.2), lambda p: torch.optim.Adagrad(p, lr=0.2)),
}


class Model(nn.Module):
    def __init__(self, rows: Any) -> None:
        super().__init__()
        self.rows = rows
        self.dense = nn.Linear(DIM, 2, dtype=torch.float64)
        with torch.no_grad():
            self.dense.weight.fill_(0.5)
            self.dense.bias.zero_()

    def forward(self, keys: Tensor) -> Tensor:
        return self.dense(self.rows(keys)).square().sum()


def clip(model: nn.Module, limit: float) -> Tensor:
    """``clip_grad_norm_``, which torch has not for sparse gradients."""
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
    gradients: list[Any] = [
        p.grad.values() if p.grad.is_sparse else p.grad  # type: ignore[union-attr]
        for p in model.parameters()
    ]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(min(1.0, limit / (float(norm) + 1e-6)))
    return norm


@pytest.mark.processes(2)
def test_equal_to_torch(world: World) -> None:
    dist.init_process_group("gloo")
    for rule in RULES:
        for nodes in NODES:
            _train(world, rule, nodes)


def _train(world: World, rule: str, nodes: str) -> None:
    """Plain steps, no_sync, clipping, a scaler with one rank's infinity, a schedule: all in one
    loop.
    """
    made, make = RULES[rule]
    weight = torch.randn(ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    table = Table.create(ROWS, DIM, dtype=torch.float64, optimizer=made, node_of_rank=NODES[nodes])
    ours = Model(Embedding(ROWS, DIM, table=table, _weight=weight))
    theirs = Model(nn.Embedding(ROWS, DIM, sparse=True, _weight=weight.clone()))
    models = [ours, theirs]
    parallel = [DistributedDataParallel(model) for model in models]
    optimizers = [table.optimizer(), make(theirs.rows.parameters())]
    dense = [torch.optim.SGD(model.dense.parameters(), lr=0.01) for model in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0) for _ in models]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7) for optimizer in optimizers]
    generator = torch.Generator().manual_seed(world.rank)
    for step in range(9):
        batches = [
            torch.randint(ROWS // 2, (4 + world.rank,), generator=generator) for _ in range(2)
        ]
        norms = []
        for i, model in enumerate(parallel):
            optimizers[i].zero_grad()
            dense[i].zero_grad()
            with model.no_sync():
                scalers[i].scale(model(batches[0])).backward()
            spoil = math.inf if step == 4 and world.rank == 1 else 1.0
            scalers[i].scale(model(batches[1]) * spoil).backward()
            if step % 3 == 1:
                scalers[i].unscale_(optimizers[i])
                scalers[i].unscale_(dense[i])
                bound = nn.utils.clip_grad_norm_ if i == 0 else lambda p, limit: clip(theirs, limit)
                norms.append(bound(model.parameters(), 0.5))
            scalers[i].step(optimizers[i])
            scalers[i].step(dense[i])
            scalers[i].update()
            schedules[i].step()
        if norms and step != 4:
            torch.testing.assert_close(*norms)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        torch.testing.assert_close(ours.dense.weight, theirs.dense.weight, rtol=1e-6, atol=1e-6)
        rows = table.pull(torch.arange(ROWS))
        torch.testing.assert_close(rows, theirs.rows.weight.detach(), rtol=1e-6, atol=1e-6)
    table.close()


@pytest.mark.processes(2)
def test_gradients_of_processes_are_averaged_or_summed(world: World) -> None:
    """A table finds its group without launcher variables, and needs none of torch's groups to
    sum.
    """
    keys = torch.tensor([1, 2 + world.rank])
    apply_gradients: Any
    reduction: Any
    for apply_gradients, reduction, shared, alone in (
        ("step", None, -1.0, -0.5),
        ("step", "mean", -1.0, -0.5),
        ("step", "sum", -2.0, -1.0),
        ("backward", None, -2.0, -1.0),
        ("backward", "mean", -1.0, -0.5),
    ):
        with Table.create(
            ROWS,
            DIM,
            optimizer=optim.sgd(1.0),
            apply_gradients=apply_gradients,
            reduction=reduction,
        ) as table:
            Embedding(ROWS, DIM, table=table)(keys).sum().backward()
            if apply_gradients == "step":
                table.optimizer().step()
            table.sync()
            assert table.pull(torch.arange(5))[:, 0].tolist() == [0.0, shared, alone, alone, 0.0]
            table.sync()


@pytest.mark.processes(2)
def test_wrappers_leave_the_weight_alone(world: World) -> None:
    dist.init_process_group("gloo")
    with Table.create(ROWS, DIM, dtype=torch.float64, optimizer=optim.sgd(1.0)) as table:
        optimizer = table.optimizer()
        rows = Embedding(ROWS, DIM, table=table)
        with pytest.raises(UnsupportedError, match="use the model as it is"):
            DistributedDataParallel(rows)
        sharded: Any = fully_shard(Model(rows), mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
        sharded(torch.tensor([world.rank])).backward()
        assert table.weight.keys is not None
        assert torch.equal(table.weight.keys, torch.tensor([0, 1]))
        assert any(isinstance(p, TableWeight) for p in sharded.parameters())
        optimizer.step()
        for norm_type in (1.0, 2.0, math.inf):
            _clip_with_fsdp(world, table, norm_type)
        rows.weight = nn.Parameter(torch.zeros(0, DIM))  # type: ignore[assignment]
        with pytest.raises(UnsupportedError, match="ignored_modules"):
            rows(torch.tensor([1]))
        table.sync()


def _clip_with_fsdp(world: World, table: Table, norm_type: float) -> None:
    """``clip_grad_norm_`` over DTensors and a table equals that of dense tensors in one process."""
    weight = torch.randn(ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    table.load_state_dict({"weight": weight})
    ours: Any = Model(Embedding(ROWS, DIM, table=table))
    fully_shard(ours, mesh=dist.device_mesh.init_device_mesh("cpu", (world.size,)))
    theirs = Model(nn.Embedding(ROWS, DIM, _weight=weight))
    table.gradients.replace(None)
    batches = [torch.tensor([1, 2, 1]), torch.tensor([2, 5, 7])]
    ours(batches[world.rank]).backward()
    (sum(theirs(keys) for keys in batches) / world.size).backward()
    norms = [
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=norm_type)
        for model in (ours, theirs)
    ]
    torch.testing.assert_close(norms[0].full_tensor(), norms[1])  # type: ignore[attr-defined]
    assert theirs.rows.weight.grad is not None and table.weight.grad is not None
    torch.testing.assert_close(table.weight.grad + 0, theirs.rows.weight.grad[table.weight.keys])
    torch.testing.assert_close(ours.dense.weight.grad.full_tensor(), theirs.dense.weight.grad)


@pytest.mark.processes(2)
def test_what_one_process_cannot_step_no_process_steps(world: World) -> None:
    """An error of one rank is one on every rank, and the ranks stay together."""

    def change(lr: Any = 1.0, **options: Any) -> Callable[[], None]:
        return lambda: optimizer.param_groups[0].update(lr=lr, **options)

    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0)) as table:
        optimizer, module = table.optimizer(), Embedding(ROWS, DIM, table=table)
        keys = torch.tensor([1])
        with pytest.raises(MismatchError, match=r"is in a (backward pass|step), and"):
            # The first backward pass, which only one rank has.
            module(keys).sum().backward() if world.rank == 0 else optimizer.step()
        reasons: list[tuple[Callable[[], Any], str]] = [
            (change(-1.0), "must be finite and not negative"),
            (change("fast"), "must be finite and not negative"),
            (change(0.25), "at lr = 1.0, .* at lr = 0.25|at lr = 0.25, .* at lr = 1.0"),
            (change(momentum=0.9), "momentum = 0.9 in a group"),
            (optimizer.zero_grad, "without a gradient"),
            (table.optimizer, "newer optimizer"),
        ]
        for number, (spoil, reason) in enumerate(reasons):
            optimizer.zero_grad()
            module(keys).sum().backward()
            before = table.pull(keys)
            if number % 2 == world.rank:
                spoil()
            with pytest.raises(
                (ArgumentError, MismatchError), match=f"{reason}|and rank . cannot step"
            ):
                optimizer.step()
            assert torch.equal(table.pull(keys), before)
            optimizer = table.optimizer()
            table.sync()
        optimizer.zero_grad()
        module(keys).sum().backward()
        table.sync()
        optimizer.step()
        assert torch.equal(table.pull(keys), before - 1.0)
        table.sync()


def _one_rank_looks_nothing_up(world: World, earlier_passes: int) -> tuple[str, list[int]]:
    store = world.connect()
    store.set(f"started/{world.rank}", "")
    store.wait([f"started/{rank}" for rank in range(world.size)])  # the timeout is short
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0), apply_gradients="step") as table:
        module = Embedding(ROWS, DIM, table=table)
        for _ in range(earlier_passes):
            module(torch.tensor([1])).sum().backward()
        table.sync()
        try:
            if world.rank == 2:
                store.wait(["named/0", "named/1"])
                return "", []
            module(torch.tensor([1])).sum().backward()
        except OperationTimeoutError as error:
            return str(error), list(error.ranks)
        finally:
            store.set(f"named/{world.rank}", "")
            table._server.abort()
            table._forget()
    return "", []


@pytest.mark.parametrize("earlier_passes", [0, 1])
def test_a_rank_without_a_backward_pass_is_named(
    run_processes: RunProcesses, earlier_passes: int
) -> None:
    environ = {"TORCHRELAY_PARAMETERS_TIMEOUT_S": "8"}
    results = run_processes(
        _one_rank_looks_nothing_up,
        3,
        timeout_s=100,
        environ=environ,
        earlier_passes=earlier_passes,
    )
    for result in results[:2]:
        assert result.ok, result.error
        message, ranks = result.value
        assert ranks == [2] and "same backward passes" in message

"""Options of the parameter groups of a table's optimizer: they work, or are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from torchrelay.errors import ArgumentError
from torchrelay.parameters import Embedding, Table, TableOptimizer, UpdateRule, optim

RULES = {
    "sgd": optim.sgd(0.5, weight_decay=0.25),
    "adagrad": optim.adagrad(0.5, 0.25, initial_accumulator_value=0.125, eps=1e-3),
    "rowwise_adagrad": optim.rowwise_adagrad(0.5, eps=1e-3),
    "adam": optim.adam(0.5, betas=(0.8, 0.9), eps=1e-3),
}
TORCHS = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
}
OTHERS: dict[str, Any] = {
    "weight_decay": 0.5,
    "momentum": 0.9,
    "dampening": 0.5,
    "nesterov": True,
    "maximize": True,
    "foreach": True,
    "fused": True,
    "capturable": True,
    "differentiable": True,
    "amsgrad": True,
    "decoupled_weight_decay": True,
    "lr_decay": 0.1,
    "eps": 0.5,
    "betas": (0.5, 0.5),
    "initial_accumulator_value": 1.0,
    "trust_coefficient": 0.1,  # unknown to torch
}


@pytest.fixture(params=RULES)
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    with Table.create(4, 2, optimizer=RULES[request.param]) as table:
        yield table


def _at_construction(table: Table, options: dict[str, Any]) -> TableOptimizer:
    return TableOptimizer([{"params": [table.weight], **options}])


def _added(table: Table, options: dict[str, Any]) -> TableOptimizer:
    with Table.create(4, 2, optimizer=optim.sgd(1.0)) as other:
        optimizer = other.optimizer()
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": table.weight, **options})
    return optimizer


def _changed(table: Table, options: dict[str, Any]) -> TableOptimizer:
    optimizer = table.optimizer()
    optimizer.param_groups[0].update(options)
    return optimizer


def _scheduled(table: Table, options: dict[str, Any]) -> TableOptimizer:
    class Scheduler(lr_scheduler.LRScheduler):
        def step(self, epoch: int | None = None) -> None:
            for group in self.optimizer.param_groups:
                group.update(options)

        def get_lr(self) -> list[float | torch.Tensor]:
            return []

    optimizer = table.optimizer()
    Scheduler(optimizer)
    return optimizer


def _loaded(table: Table, options: dict[str, Any]) -> TableOptimizer:
    optimizer = table.optimizer()
    state = optimizer.state_dict()
    state["param_groups"][0].update(options)
    optimizer.load_state_dict(state)
    return optimizer


WAYS: list[Callable[[Table, dict[str, Any]], TableOptimizer]] = [
    _at_construction,
    _added,
    _changed,
    _scheduled,
    _loaded,
]


def _step(table: Table, optimizer: TableOptimizer) -> None:
    Embedding(4, 2, table=table)(torch.tensor([1])).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("way", WAYS)
def test_options_that_would_have_no_effect_are_refused(table: Table, way: Any) -> None:
    for name, value in OTHERS.items():
        table.optimizer()  # the first gradient needs one
        with pytest.raises(ArgumentError, match=rf"'table': {name} = .* has no effect"):
            _step(table, way(table, {name: value}))
        table.weight.grad = None
    for lr in (-1.0, math.nan, "fast", [1.0], torch.ones(2)):
        with pytest.raises(ArgumentError, match="learning rate lr"):
            _step(table, way(table, {"lr": lr}))
        table.weight.grad = None
    assert not table.pull(torch.arange(4)).any()


@pytest.mark.parametrize("way", WAYS)
def test_options_that_the_table_has_are_allowed(table: Table, way: Any) -> None:
    rule: UpdateRule = table.rule
    (torchs,) = TORCHS[rule.kind]([torch.nn.Parameter(torch.ones(1))]).param_groups
    own = {
        "weight_decay": rule.weight_decay,
        "eps": rule.eps,
        "betas": [rule.beta1, rule.beta2],
        "initial_accumulator_value": rule.initial_accumulator,
    }
    options = {name: own.get(name, value) for name, value in torchs.items() if name != "params"}
    for lr in (0.25, torch.tensor(0.25)):
        table.set(torch.arange(4), torch.zeros(4, 2))
        _step(table, way(table, options | {"name": "rows", "lr": lr}))
        assert table.pull([1]).lt(0).all() and not table.pull([0, 2, 3]).any()
        table.weight.grad = None


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(
        o, max_lr=0.5, total_steps=4, cycle_momentum=False
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.125),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [1]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_torchs_schedulers_set_the_rate_of_steps(name: str) -> None:
    with Table.create(4, 2, optimizer=optim.sgd(0.5), dtype=torch.float64) as table:
        optimizer = table.optimizer()
        schedule = SCHEDULERS[name](optimizer)
        expected = torch.zeros(1, 2, dtype=torch.float64)
        for _ in range(3):
            optimizer.zero_grad()
            _step(table, optimizer)
            expected -= optimizer.param_groups[0]["lr"]
            schedule.step()
        assert torch.equal(table.pull([1]), expected)
        optimizer.load_state_dict(optimizer.state_dict())


def test_states_of_other_optimizers_are_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    theirs = torch.optim.SGD([weight], 0.1)
    theirs.step()
    with Table.create(4, 2, optimizer=optim.sgd(0.5)) as table:
        optimizer = table.optimizer()
        for state in (theirs.state_dict(), optimizer.state_dict() | {"state": {}}):
            with pytest.raises(ArgumentError, match="not that of a TableOptimizer"):
                optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 0.5
        _step(table, optimizer)
        assert optimizer.state_dict()["state"][0]["step"] == 1

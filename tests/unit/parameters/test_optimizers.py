"""Optimizers inside the store, against torch.optim on the rows that have a gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nodes import Server, Worker
from torchrelay.parameters import UpdateRule

KEYS, LENGTH, STEPS = 30, 6, 40


def _batches(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(0, KEYS, (12,), generator=generator),
            torch.randn(12, LENGTH, dtype=torch.float64, generator=generator),
        )
        for _ in range(STEPS)
    ]


def _train(rule: UpdateRule, start: torch.Tensor) -> torch.Tensor:
    worker = Worker(0, Server(KEYS, length=LENGTH, dtype=torch.float64, rule=rule))
    worker.set(torch.arange(KEYS), start)
    for keys, gradients in _batches(0):
        worker.push(keys, gradients)
    out = torch.empty_like(start)
    worker.pull(torch.arange(KEYS), out)
    return out


def _reference(make: Any, start: torch.Tensor) -> torch.Tensor:
    """One optimizer per row, stepped when the row has a gradient."""
    rows = [row.clone().requires_grad_() for row in start]
    optimizers = [make([row]) for row in rows]
    for keys, gradients in _batches(0):
        for key in keys.unique().tolist():
            rows[key].grad = gradients[keys == key].sum(0)
            optimizers[key].step()
    return torch.stack([row.detach() for row in rows])


CASES = {
    "sgd": (
        UpdateRule("sgd", lr=0.1, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    ),
    "adagrad": (
        UpdateRule("adagrad", lr=0.1, eps=1e-10, initial_accumulator=0.3),
        lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-10, initial_accumulator_value=0.3),
    ),
    "adam": (
        UpdateRule("adam", lr=0.05, eps=1e-8, beta1=0.8, beta2=0.95, weight_decay=0.02),
        lambda p: torch.optim.Adam(p, lr=0.05, eps=1e-8, betas=(0.8, 0.95), weight_decay=0.02),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_to_torch(name: str) -> None:
    rule, make = CASES[name]
    start = torch.randn(
        KEYS, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
    )
    torch.testing.assert_close(_train(rule, start), _reference(make, start), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_half_precision_values_have_state_in_float32(kind: str, dtype: torch.dtype) -> None:
    """Each step is that of float32, rounded; rows and their state move as they are."""
    length, rule = 5, UpdateRule(kind, lr=0.05, eps=1e-8)  # state that is not aligned
    server = Server(KEYS, length=length, dtype=dtype, rule=rule)
    reference = Server(KEYS, length=length, rule=rule)
    copy = Server(KEYS, length=length, dtype=dtype, rule=rule)
    worker, other, third = Worker(0, server), Worker(0, reference), Worker(0, copy)
    numbers = reference.row_length() - length
    assert server.row_length() == length + 2 * numbers
    keys = torch.arange(KEYS)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):  # more than bfloat16 can count
        gradients = torch.randn(KEYS, length, generator=generator).to(dtype)
        worker.push(keys, gradients)
        other.push(keys, gradients.float())
        expected = torch.empty(KEYS, reference.row_length())
        other.pull_rows(keys, expected)
        rows = torch.empty(KEYS, server.row_length(), dtype=dtype)
        worker.pull_rows(keys, rows)
        assert torch.equal(rows[:, :length], expected[:, :length].to(dtype))
        if numbers:
            state = rows[:, length:].contiguous().view(torch.float32)
            assert torch.equal(state, expected[:, length:])
        other.set(keys, rows[:, :length].float())
    third.set_rows(keys, rows)
    copied = torch.empty_like(rows)
    third.pull_rows(keys, copied)
    assert torch.equal(copied.view(torch.int16), rows.view(torch.int16))


def test_rowwise_adagrad_has_one_accumulator_a_row() -> None:
    start = torch.randn(
        KEYS, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
    )
    rows, sums = start.clone(), torch.full((KEYS,), 0.1, dtype=torch.float64)
    for keys, gradients in _batches(0):
        for key in keys.unique().tolist():
            gradient = gradients[keys == key].sum(0)
            sums[key] += gradient.square().mean()
            rows[key] -= 0.2 * gradient / (sums[key].sqrt() + 1e-10)
    found = _train(UpdateRule("rowwise_adagrad", lr=0.2, initial_accumulator=0.1), start)
    torch.testing.assert_close(found, rows, rtol=1e-12, atol=1e-12)


def test_whole_rows_carry_the_optimizer_state() -> None:
    rule = UpdateRule("adam", lr=0.1, eps=1e-8)
    server = Server(KEYS, length=LENGTH, dtype=torch.float64, rule=rule)
    assert server.row_length() == 3 * LENGTH + 1
    first, second = (
        Worker(0, server),
        Worker(0, Server(KEYS, length=LENGTH, dtype=torch.float64, rule=rule)),
    )
    keys = torch.arange(KEYS)
    for batch, gradients in _batches(0)[:20]:
        first.push(batch, gradients)
    rows = torch.empty(KEYS, server.row_length(), dtype=torch.float64)
    first.pull_rows(keys, rows)
    second.set_rows(keys, rows)
    for batch, gradients in _batches(0)[20:]:
        first.push(batch, gradients)
        second.push(batch, gradients)
    one, other = (torch.empty(KEYS, LENGTH, dtype=torch.float64) for _ in range(2))
    first.pull(keys, one)
    second.pull(keys, other)
    assert torch.equal(one, other)


def test_the_learning_rate_can_change() -> None:
    server = Server(1, length=1, rule=UpdateRule("sgd", lr=1.0))
    worker, key, value = Worker(0, server), torch.tensor([0]), torch.empty(1)
    worker.push(key, torch.ones(1))
    server.set_learning_rate(0.25)
    worker.push(key, torch.ones(1))
    worker.pull(key, value)
    assert value == -1.25

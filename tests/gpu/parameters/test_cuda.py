"""Keys and values on a CUDA device: a table takes both."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from torchrelay.errors import ArgumentError
from torchrelay.parameters import Embedding, Table, optim

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device here"
)

ROWS, DIM = 6, 2


def test_keys_and_values_on_a_device() -> None:
    keys, ones = torch.tensor([1, 4], device="cuda"), torch.ones(2, DIM, device="cuda")
    with Table.create(ROWS, DIM) as table:
        table.set(keys, ones)
        table.push(keys, 2 * ones)
        table.push(keys.cpu(), ones)
        assert torch.equal(table.pull(keys).cpu(), torch.full((2, DIM), 4.0))
        assert table.pull(torch.arange(ROWS)).sum() == 2 * DIM * 4


def test_a_gradient_that_is_not_finite_is_named_on_any_device() -> None:
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0)) as table:
        module, optimizer = Embedding(ROWS, DIM, table=table), table.optimizer()
        module(torch.tensor([1, 4])).sum().backward()
        gradient = module.weight.grad
        assert gradient is not None
        module.weight.grad = gradient.cuda() * math.nan
        with pytest.raises(ArgumentError, match="the first that of key 1"):
            optimizer.step()


@pytest.mark.parametrize("apply_gradients", ["step", "backward"])
def test_lookups_on_two_devices_share_a_backward_pass(apply_gradients: Any) -> None:
    keys = torch.tensor([1, 4])
    with Table.create(
        ROWS, DIM, optimizer=optim.sgd(1.0), apply_gradients=apply_gradients
    ) as table:
        module = Embedding(ROWS, DIM, table=table)
        optimizer = table.optimizer() if apply_gradients == "step" else None
        for _ in range(50):
            (module(keys).sum() + module(keys.cuda()).sum().cpu()).backward()
        if optimizer is not None:
            optimizer.step()
        assert (table.pull(keys) == -100).all()

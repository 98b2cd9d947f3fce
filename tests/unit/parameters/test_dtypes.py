"""Modules over a table have the dtypes of torch's, and the rows those of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchrelay.parameters import Embedding, EmbeddingBag, optim

ROWS, DIM = 10, 4
KEYS = torch.tensor([[1, 2, 1], [3, 4, 3]])
MOVES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "double": lambda model: model.double(),
    "back": lambda model: model.half().float(),
    "like": lambda model: model.to(torch.ones(1, dtype=torch.float64)),
    "nothing": lambda model: model,
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag", "EmbeddingBag max"])
@pytest.mark.parametrize("compiled", [False, True])
def test_lookups_have_the_dtype_that_the_model_was_moved_to(
    move: str, kind: str, compiled: bool
) -> None:
    weight = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"mode": "max"} if kind.endswith("max") else {}
    ours: Any
    theirs: Any
    ours, theirs = (
        (Embedding, nn.Embedding) if kind == "Embedding" else (EmbeddingBag, nn.EmbeddingBag)
    )
    modules: list[Any] = [
        ours(ROWS, DIM, _weight=weight, optimizer=optim.sgd(1.0), **options),
        theirs(ROWS, DIM, _weight=weight.clone(), **options),
    ]
    table = modules[0].table
    optimizer = table.optimizer()
    shared = ours(ROWS, DIM, table=table, **options)
    torch._dynamo.reset()
    call = (
        torch.compile(modules[0], backend="aot_eager", fullgraph=True) if compiled else modules[0]
    )
    call(KEYS)
    modules = [MOVES[move](module) for module in modules]
    found, expected = call(KEYS), modules[1](KEYS)
    assert found.dtype is expected.dtype is modules[0].weight.dtype
    # Torch's rows were rounded, ours were not.
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)
    assert shared(KEYS).dtype is expected.dtype  # modules over one table share the weight
    assert table.pull(KEYS).dtype is torch.float32
    found.sum().backward()
    expected.sum().backward()
    assert table.weight.grad.dtype is torch.float32
    torch.testing.assert_close(
        table.weight.grad + 0,
        modules[1].weight.grad[table.weight.keys].float(),
        rtol=0.01,
        atol=0.01,
    )
    optimizer.step()
    assert modules[0].to_torch().weight.dtype is expected.dtype
    ours(ROWS, DIM, table=table, **options).load_state_dict(modules[0].state_dict())
    modules[0].close()


@pytest.mark.parametrize("ours", [Embedding, EmbeddingBag])
def test_autocast_leaves_lookups_alone_as_torchs(ours: Any) -> None:
    module = ours(ROWS, DIM, optimizer=optim.sgd(1.0))
    theirs = module.to_torch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(KEYS).dtype is theirs(KEYS).dtype is torch.float32
    module.close()

"""Tables inside ``deferred_init``: a table is real at once, the rest of a model deferred."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchrelay.deferred import deferred_init, fake, is_deferred, materialize_module
from torchrelay.errors import ArgumentError
from torchrelay.parameters import Embedding, EmbeddingBag, KeyInit, Table, optim

ROWS, DIM = 10, 4
KEYS = torch.tensor([[1, 2, 1], [3, 4, 3]])
OPTIONS: dict[str, Any] = {"optimizer": optim.sgd(1.0), "init": KeyInit("normal", 0.0, 1.0)}


class Model(nn.Module):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.dense = nn.Linear(DIM, 2)
        self.rows = make()
        self.last = nn.Linear(2, 1)

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.dense(self.rows(keys)))
        return out


MODULES: dict[str, Callable[[], Any]] = {
    "Embedding": lambda: Embedding(ROWS, DIM, **OPTIONS),
    "padding": lambda: Embedding(ROWS, DIM, padding_idx=1, **OPTIONS),
    "EmbeddingBag": lambda: EmbeddingBag(ROWS, DIM, **OPTIONS),
    "pretrained": lambda: Embedding.from_pretrained(torch.randn(ROWS, DIM), False, **OPTIONS),
    "given table": lambda: Embedding(ROWS, DIM, table=Table.create(ROWS, DIM, **OPTIONS)),
}


@pytest.mark.parametrize("kind", MODULES)
def test_a_deferred_model_trains_as_an_eager_one(kind: str) -> None:
    models: list[Any] = []
    for build in (Model, lambda make: deferred_init(Model, make)):
        torch.manual_seed(0)
        models.append(build(MODULES[kind]))
    deferred = models[1]
    assert is_deferred(deferred) and not is_deferred(deferred.rows)
    assert deferred.rows.table.pull([1, 2]).shape == (2, DIM)  # at once
    materialize_module(deferred)
    assert not is_deferred(deferred)
    for model in models:
        optimizer = model.rows.table.optimizer()
        model(KEYS).square().sum().backward()
        optimizer.step()
    for ours, theirs in zip(
        [*models[1].dense.parameters(), models[1].rows.table.rows()],
        [*models[0].dense.parameters(), models[0].rows.table.rows()],
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    for model in models:
        model.rows.table.close()


def test_a_table_in_fake_mode_is_real() -> None:
    with fake.fake_mode():
        module = Embedding(ROWS, DIM, **OPTIONS)
        with pytest.raises(ArgumentError, match="keys must be a dense tensor"):
            module.table.pull(torch.tensor([1]))
    assert module(KEYS).shape == (2, 3, DIM)
    module.close()

"""Deferred initialisation equals eager construction bit for bit, in any order."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchrelay.deferred import deferred_init, is_deferred, materialize_module, materialize_tensor


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, the non-persistent ones too, ties under each of their names."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def assert_same(module: nn.Module, eager: nn.Module) -> None:
    mine, theirs = tensors_of(module), tensors_of(eager)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert type(mine[name]) is type(tensor), name
        assert mine[name].requires_grad == tensor.requires_grad, name
        assert mine[name].stride() == tensor.stride(), name
        assert torch.equal(mine[name], tensor), name


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(10, 20),
    "small": lambda: nn.Linear(3, 2),
    "double": lambda: nn.Linear(10, 20, dtype=torch.float64),
    "embedding": lambda: nn.Embedding(100, 20, padding_idx=3),
    "convolution": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)),
    "attention": lambda: nn.MultiheadAttention(32, 4),
    "transformer": lambda: nn.Transformer(32, 4, 2, 2, 64, batch_first=True),
    "lstm": lambda: nn.LSTM(10, 20, 2, bidirectional=True),
}


@pytest.mark.parametrize("name", MODULES)
def test_equals_eager_in_shuffled_order(name: str) -> None:
    build = MODULES[name]
    torch.manual_seed(7)
    eager = build()
    end = torch.get_rng_state()
    torch.manual_seed(7)
    module = deferred_init(build)
    assert torch.equal(torch.get_rng_state(), end)
    torch.rand(11)
    tensors = list(tensors_of(module).values())
    assert all(map(is_deferred, tensors))
    random.Random(name).shuffle(tensors)
    for tensor in tensors:
        assert materialize_tensor(tensor) is tensor
    assert_same(module, eager)


def test_module_keeps_its_parameter_objects() -> None:
    module = deferred_init(nn.Linear, 10, 20)
    weight = module.weight
    materialize_module(module)
    assert module.weight is weight
    assert type(weight) is nn.Parameter
    assert not is_deferred(module)

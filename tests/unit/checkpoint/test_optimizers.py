"""Loading into optimizers that have not stepped yet, as a job that resumes has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrelay.checkpoint import load, save
from torchrelay.deferred import deferred_init
from torchrelay.errors import CorruptionError, MismatchError
from torchrelay.training import AnyPrecisionAdamW

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), fused=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1, weight_decay=0.1),
    "any-precision": lambda p: AnyPrecisionAdamW(p, lr=0.1, weight_decay=0.1),
}


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.arange(12.0).view(3, 4).sin() + step).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_never_interrupted(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 5)
    optimizer = OPTIMIZERS[name](model.parameters())
    _train(model, optimizer, 3)
    save({"model": model, "optimizer": optimizer}, tmp_path / "c")

    resumed = torch.nn.Linear(4, 5)
    fresh = OPTIMIZERS[name](resumed.parameters())
    load({"model": resumed, "optimizer": fresh}, tmp_path / "c")
    assert [parameter.grad for parameter in resumed.parameters()] == [None, None]
    _train(model, optimizer, 3)
    _train(resumed, fresh, 3)
    for ours, theirs in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert str(fresh.state_dict()) == str(optimizer.state_dict())


def _saved_adam(path: Path) -> None:
    model = torch.nn.Linear(4, 5)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    _train(model, optimizer, 1)
    save({"model": model, "optimizer": optimizer}, path)


def test_a_load_that_fails_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    _saved_adam(tmp_path / "c")
    data = next((tmp_path / "c").glob("*.safetensors"))
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.chmod(0o600)
    data.write_bytes(content)

    model = torch.nn.Linear(4, 5)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = OPTIMIZERS["adam"](model.parameters())
    model.weight.grad = torch.ones(5, 4)
    with pytest.raises(CorruptionError):
        load({"model": model, "optimizer": optimizer}, tmp_path / "c")
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(model.weight.grad, torch.ones(5, 4)) and model.bias.grad is None
    for now, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(now, then)


def test_an_optimizer_that_cannot_step_is_named(tmp_path: Path) -> None:
    _saved_adam(tmp_path / "c")
    model = torch.nn.Linear(4, 5)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(MismatchError, match="LBFGS lacks; this optimizer has a state only after"):
        load({"model": model, "optimizer": optimizer}, tmp_path / "c")
    assert not optimizer.state

    deferred = deferred_init(torch.nn.Linear, 4, 5)
    adam = OPTIMIZERS["adam"](deferred.parameters())
    with pytest.raises(MismatchError, match="Adam lacks; this optimizer has a state only after"):
        load({"model": deferred, "optimizer": adam}, tmp_path / "c")

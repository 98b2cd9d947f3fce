"""Loading into optimizers that have not stepped yet, as a job that resumes has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrelay.checkpoint import load, save
from torchrelay.deferred import deferred_init
from torchrelay.errors import CorruptionError, DeferredError, MismatchError
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


def test_an_optimizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    _saved_adam(tmp_path / "c")
    model = torch.nn.Linear(4, 5)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(MismatchError, match=r"lacks 'optimizer.param_groups.0.max_iter'"):
        load({"model": model, "optimizer": optimizer}, tmp_path / "c")
    assert not optimizer.state

    fewer = torch.optim.Adam([model.weight])
    with pytest.raises(MismatchError, match="2 parameters in the checkpoint and 1 here"):
        load({"optimizer": fewer}, tmp_path / "c")
    parts: list[Any] = [{"params": [model.weight]}, {"params": [model.bias]}]
    groups = torch.optim.Adam(parts)
    with pytest.raises(MismatchError, match="2 parameters in the checkpoint and 1 here"):
        load({"optimizer": groups}, tmp_path / "c")
    state = torch.optim.Adam(model.parameters())
    save({"optimizer": groups}, tmp_path / "groups")
    with pytest.raises(MismatchError, match="1 parameters in the checkpoint and 2 here"):
        load({"optimizer": state}, tmp_path / "groups")

    deferred = deferred_init(torch.nn.Linear, 4, 5)
    adam = OPTIMIZERS["adam"](deferred.parameters())
    with pytest.raises(DeferredError, match="load the module first"):
        load({"model": deferred, "optimizer": adam}, tmp_path / "c")


def _two(order: list[int], features: int = 4, named: bool = False) -> torch.optim.Optimizer:
    """Adam after a step, over the parameters of two layers in an order."""
    model = torch.nn.Sequential(torch.nn.Linear(4, features), torch.nn.Linear(features, 4))
    found: list[Any] = [*model.named_parameters()] if named else [*model.parameters()]
    optimizer = torch.optim.Adam([found[index] for index in order], lr=0.1)
    _train(model, optimizer, 1)
    return optimizer


@pytest.mark.parametrize("stepped", [False, True])
def test_the_state_of_other_parameters_is_refused(stepped: bool, tmp_path: Path) -> None:
    """Of other shapes, or in another order: torch finds it at the next step, or never."""
    save({"optimizer": _two([0, 1, 2, 3], 5)}, tmp_path / "c")
    save({"optimizer": _two([0, 1, 2, 3], named=True)}, tmp_path / "named")
    for path, other, message in (
        (
            "c",
            _two([1, 0, 2, 3], 5),
            r"state\.0\.exp_avg has shape \[5, 4\].* parameter 0 here \[5\]",
        ),
        ("c", _two([0, 1, 2, 3], 6), r"state\.0\.exp_avg has shape \[5, 4\].*here \[6, 4\]"),
        (
            "named",
            _two([2, 3, 0, 1], named=True),
            r"parameter 0 is '0\.weight' .* '1\.weight' here",
        ),
    ):
        if not stepped:
            other.state.clear()
        before = str(other.state_dict())
        for strict in (True, False):
            with pytest.raises(MismatchError, match=message):
                load({"optimizer": other}, tmp_path / path, strict=strict)
        assert str(other.state_dict()) == before


class _Eager(torch.optim.SGD):
    """Changes parameters at every step, whatever its gradients and learning rate are."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(1)
                    self.state[parameter].setdefault("history", []).append(parameter.clone())
                    self.state[parameter]["pair"] = (parameter.clone(), self.steps)
        return None


def test_a_load_never_steps(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 5)
    optimizer = _Eager(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.step()
    save({"optimizer": optimizer}, tmp_path / "c")

    fresh = _Eager(model.parameters(), lr=0.3)
    calls: list[object] = []
    fresh.register_step_pre_hook(lambda *_: calls.append(1))
    fresh.register_step_post_hook(lambda *_: calls.append(2))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    load({"optimizer": fresh}, tmp_path / "c")
    assert not calls and not fresh.steps and fresh.param_groups[0]["lr"] == 0.1
    for now, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(now, then)
    for parameter in model.parameters():
        found, saved = fresh.state[parameter], optimizer.state[parameter]
        assert all(map(torch.equal, found["history"], saved["history"]))
        assert torch.equal(found["pair"][0], saved["pair"][0]) and found["pair"][1] == 2


@pytest.mark.parametrize("name", ["lbfgs", "sparse-adam"])
def test_optimizers_that_need_more_than_a_step(name: str, tmp_path: Path) -> None:
    def made(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Embedding(7, 3, sparse=name == "sparse-adam")
        if name == "lbfgs":
            return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        return model, torch.optim.SparseAdam(model.parameters(), lr=0.1)

    def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(torch.tensor([1, 3])).sin().square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)

    model, optimizer = made(0)
    train(model, optimizer)
    save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    resumed, fresh = made(1)
    load({"model": resumed, "optimizer": fresh}, tmp_path / "c")
    train(model, optimizer)
    train(resumed, fresh)
    assert torch.equal(resumed.weight, model.weight)


def test_a_parameter_that_never_had_a_gradient(tmp_path: Path) -> None:
    def made() -> tuple[Any, torch.optim.Optimizer]:
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 5))
        model[0].requires_grad_(False)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = made()
    _train(model, optimizer, 2)
    assert len(optimizer.state) == 2
    save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    resumed, fresh = made()
    load({"model": resumed, "optimizer": fresh}, tmp_path / "c")
    assert len(fresh.state) == 2

    # One that has stepped with more parameters than the saved one, and the other way round.
    resumed[0].requires_grad_(True)
    _train(resumed, fresh, 1)
    assert len(fresh.state) == 4
    load({"model": resumed, "optimizer": fresh}, tmp_path / "c")
    assert len(fresh.state) == 2
    assert str(fresh.state_dict()) == str(optimizer.state_dict())


def test_options_that_schedulers_add(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 5)
    plain, scheduled = (torch.optim.AdamW(model.parameters(), lr=0.1) for _ in range(2))
    _train(model, plain, 1)
    _train(model, scheduled, 1)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    save({"optimizer": plain}, tmp_path / "plain")
    save({"optimizer": scheduled}, tmp_path / "scheduled")

    fresh = torch.optim.AdamW(model.parameters(), lr=0.5)
    torch.optim.lr_scheduler.StepLR(fresh, 1)
    found = load({"optimizer": fresh}, tmp_path / "plain")
    assert found.missing_keys == ["optimizer.param_groups.0.initial_lr"]
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["initial_lr"]) == (0.1, 0.5)

    fresh = torch.optim.AdamW(model.parameters(), lr=0.5)
    assert load({"optimizer": fresh}, tmp_path / "scheduled") == ([], [])
    assert fresh.param_groups[0]["initial_lr"] == 0.1

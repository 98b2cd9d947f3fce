"""What the errors of tables advise is tried: it works, and gives what was wanted."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from torchrelay import checkpoint
from torchrelay.errors import TorchRelayError
from torchrelay.parameters import (
    Embedding,
    IntentLoader,
    KeyInit,
    Table,
    TableOptimizer,
    TableWeight,
    optim,
)

ROWS, DIM, LR = 8, 2, 0.5
KEYS = torch.tensor([1, 3])

Opened = Callable[[Any], Any]  # closes at the end of the test what it is given, and returns it


def _ones(**options: Any) -> Embedding:
    """An embedding of ones, whose optimizer subtracts half of a gradient."""
    module = Embedding(ROWS, DIM, optimizer=optim.sgd(LR), **options)
    module.table.set(torch.arange(ROWS), torch.ones(ROWS, DIM))
    return module


def _loss(module: torch.nn.Module) -> torch.Tensor:
    loss: torch.Tensor = module(KEYS).sum()
    return loss


def _stepped(module: Embedding, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    _loss(module).backward()
    optimizer.step()
    return module.table.pull(KEYS)


HALF = torch.full((2, DIM), 1 - LR)
ONES = torch.ones(2, DIM)


class _Wrong(NamedTuple):
    """A call that fails with a sentence; one that follows its advice; what that must return."""

    call: Callable[[Opened], Any]
    advice: str
    follow: Callable[[Opened], torch.Tensor]
    expected: torch.Tensor


def _backward_twice(opened: Opened) -> None:
    module = opened(_ones())
    _loss(module).backward()
    module.table.optimizer()


def _without_optimizer(opened: Opened) -> None:
    _loss(opened(_ones())).backward()


def _with_optimizer(opened: Opened) -> torch.Tensor:
    module = opened(_ones())
    return _stepped(module, module.table.optimizer())


def _in_backward(opened: Opened) -> torch.Tensor:
    module = opened(_ones(apply_gradients="backward"))
    _loss(module).backward()
    pulled: torch.Tensor = module.table.pull(KEYS)
    return pulled


def _to_torch(opened: Opened, use: Callable[[torch.nn.Module], Any]) -> torch.Tensor:
    found = use(opened(_ones()).to_torch())
    assert isinstance(found, torch.Tensor)
    return found.detach()


def _exported(module: torch.nn.Module) -> Any:
    return torch.export.export(module, (KEYS,)).module()(KEYS)


def _from_state_dict(opened: Opened) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(opened(_ones()).state_dict(), file)
    file.seek(0)
    fresh = opened(Embedding(ROWS, DIM, optimizer=optim.sgd(LR)))
    fresh.load_state_dict(torch.load(file))
    pulled: torch.Tensor = fresh.table.pull(KEYS)
    return pulled


def _other_parameters(opened: Opened) -> torch.Tensor:
    embedding, linear = opened(_ones()), torch.nn.Linear(DIM, 1)
    model = torch.nn.Sequential(embedding, linear)
    rest = [one for one in model.parameters() if not isinstance(one, TableWeight)]
    optimizers = [torch.optim.SGD(rest, 0.1), embedding.table.optimizer()]
    before = linear.weight.detach().clone()
    model(KEYS).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    return torch.tensor([not torch.equal(linear.weight, before)])


def _scaled(opened: Opened) -> None:
    module, scaler = opened(_ones(apply_gradients="backward")), torch.amp.GradScaler("cpu")
    scaler.scale(_loss(module)).backward()


def _scaled_and_stepped(opened: Opened) -> torch.Tensor:
    module, scaler = opened(_ones()), torch.amp.GradScaler("cpu")
    optimizer = module.table.optimizer()
    scaler.scale(_loss(module)).backward()
    scaler.step(optimizer)
    scaler.update()
    pulled: torch.Tensor = module.table.pull(KEYS)
    return pulled


def _scaler_of_another(opened: Opened) -> torch.Tensor:
    module, scaler = opened(_ones(apply_gradients="backward")), torch.amp.GradScaler("cpu")
    (module(KEYS) * 1.0).sum().backward()
    assert scaler.is_enabled()
    pulled: torch.Tensor = module.table.pull(KEYS)
    return pulled


def _looked_up(opened: Opened, **options: Any) -> torch.Tensor:
    module = opened(_ones())
    for keys in IntentLoader([KEYS], lambda keys: keys, **options):
        return module(keys).detach()
    raise AssertionError


def _with_table(opened: Opened, mapped: bool) -> torch.Tensor:
    module = opened(_ones())
    found = (
        IntentLoader([KEYS], lambda keys: {module.table: keys})
        if mapped
        else IntentLoader([KEYS], lambda keys: keys, table=module.table)
    )
    return torch.cat([module(keys).detach() for keys in found])


def _second(opened: Opened, name: str, closing: bool) -> torch.Tensor:
    first = opened(Table.create(ROWS, DIM, name="twice"))
    if closing:
        first.close()
    return torch.tensor(opened(Table.create(ROWS, DIM, name=name)).dim)


def _weight_decay(opened: Opened) -> None:
    weight = opened(_ones()).weight
    TableOptimizer([{"params": [weight], "weight_decay": 0.1}])


def _with_weight_decay(opened: Opened) -> torch.Tensor:
    module = opened(Embedding(ROWS, DIM, optimizer=optim.sgd(LR, weight_decay=1.0)))
    module.table.set(torch.arange(ROWS), torch.ones(ROWS, DIM))
    return _stepped(module, module.table.optimizer())


def _adds(opened: Opened) -> None:
    opened(Table.create(ROWS, DIM)).optimizer()


def _initialized(opened: Opened) -> torch.Tensor:
    table = opened(Table.create(ROWS, DIM, optimizer=optim.sgd(LR)))
    table.load_state_dict({"weight": torch.nn.init.ones_(torch.empty(ROWS, DIM))})
    pulled: torch.Tensor = table.pull(KEYS)
    return pulled


def _created_with_values(opened: Opened) -> torch.Tensor:
    table = opened(Table.create(ROWS, DIM, optimizer=optim.sgd(LR), init=KeyInit("constant", 1.0)))
    pulled: torch.Tensor = table.pull(KEYS)
    return pulled


def _second_order(opened: Opened) -> None:
    _loss(opened(_ones())).backward(create_graph=True)


def _of_a_function(opened: Opened) -> None:
    module = opened(_ones())
    torch.func.grad(lambda factor: (factor * module(KEYS)).sum())(torch.tensor(1.0))


def _of_another(opened: Opened) -> torch.Tensor:
    factor = torch.tensor(2.0, requires_grad=True)
    loss = (opened(_ones())(KEYS) * factor**2).sum()
    (gradient,) = torch.autograd.grad(loss, factor, create_graph=True)
    return torch.autograd.grad(gradient, factor)[0]


def _saved(opened: Opened) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save({"table": opened(_ones()).table}, folder)
        fresh = opened(Embedding(ROWS, DIM, optimizer=optim.sgd(LR)))
        checkpoint.load({"table": fresh.table}, folder)
        pulled: torch.Tensor = fresh.table.pull(KEYS)
        return pulled


_WRONG = {
    "gradients without an optimizer": _Wrong(
        _without_optimizer, r"make one with table.optimizer\(\)", _with_optimizer, HALF
    ),
    "gradients without an optimizer, again": _Wrong(
        _without_optimizer, "pass apply_gradients='backward'", _in_backward, HALF
    ),
    "an optimizer of a table that applies gradients": _Wrong(
        lambda opened: opened(_ones(apply_gradients="backward")).table.optimizer(),
        "leave out apply_gradients='backward'",
        _with_optimizer,
        HALF,
    ),
    "an optimizer of a table that adds": _Wrong(
        _adds, "create it with an optimizer, e.g. optimizer=torchrelay", _with_optimizer, HALF
    ),
    "an option in a group": _Wrong(
        _weight_decay,
        r"optimizer=optim.sgd\(0.1, weight_decay=0.01\)",
        _with_weight_decay,
        HALF - LR,
    ),
    "parameters of others": _Wrong(
        lambda opened: TableOptimizer(list[Any](torch.nn.Linear(1, 1).parameters())),
        "torch's optimizers the other parameters",
        _other_parameters,
        torch.tensor([True]),
    ),
    "a scaler": _Wrong(
        _scaled, r"table.optimizer\(\)\) and step it with scaler.step", _scaled_and_stepped, HALF
    ),
    "a scaler of another model": _Wrong(
        _scaled, r"e.g. \(loss \* factor\).sum\(\)", _scaler_of_another, HALF
    ),
    "the device meta": _Wrong(
        lambda opened: opened(_ones()).to("meta"),
        r"put to_torch\(\) in the module's place",
        lambda opened: _to_torch(opened, lambda one: torch.tensor([one.to("meta")(KEYS).is_meta])),
        torch.tensor([True]),
    ),
    "the second order": _Wrong(
        _second_order,
        "take torch.autograd.grad with respect to other tensors",
        _of_another,
        torch.tensor(8.0),
    ),
    "the second order, again": _Wrong(
        _second_order, r"or call backward\(\) without create_graph", _with_optimizer, HALF
    ),
    "torch.func": _Wrong(
        _of_a_function,
        r"use backward\(\)",
        _with_optimizer,
        HALF,
    ),
    "export": _Wrong(
        lambda opened: _exported(opened(_ones())),
        r"put the module's to_torch\(\) in its place",
        lambda opened: _to_torch(opened, _exported),
        ONES,
    ),
    "a copy": _Wrong(
        lambda opened: copy.deepcopy(opened(_ones())),
        r"for a copy, .* put to_torch\(\)",
        lambda opened: _to_torch(opened, lambda module: copy.deepcopy(module)(KEYS)),
        ONES,
    ),
    "pickling": _Wrong(
        lambda opened: torch.save(opened(_ones()), io.BytesIO()),
        r"Save the model's state_dict\(\)",
        _from_state_dict,
        ONES,
    ),
    "pickling a weight": _Wrong(
        lambda opened: torch.save(opened(_ones()).weight, io.BytesIO()),
        r"save state_dict\(\) of the module",
        _from_state_dict,
        ONES,
    ),
    "pickling a table": _Wrong(
        lambda opened: torch.save(opened(_ones()).table, io.BytesIO()),
        "Save it with torchrelay.checkpoint.save",
        _saved,
        ONES,
    ),
    "a device": _Wrong(
        lambda opened: opened(_ones(device="meta")),
        "leave device out",
        lambda opened: opened(_ones())(KEYS).detach(),
        ONES,
    ),
    "filling a weight": _Wrong(
        lambda opened: torch.nn.init.ones_(opened(_ones()).weight),
        r"pass it to table.load_state_dict\(\{'weight': tensor\}\)",
        _initialized,
        ONES,
    ),
    "filling a weight, again": _Wrong(
        lambda opened: torch.nn.init.ones_(opened(_ones()).weight),
        "Pass init= when the table is created",
        _created_with_values,
        ONES,
    ),
    "computing with a weight": _Wrong(
        lambda opened: opened(_ones()).weight * 2,
        "Look rows up with the module",
        lambda opened: opened(_ones())(KEYS).detach(),
        ONES,
    ),
    "an embedding as table": _Wrong(
        lambda opened: IntentLoader([KEYS], lambda keys: keys, table=opened(_ones())),
        "of an Embedding, pass embedding.table",
        lambda opened: _with_table(opened, mapped=False),
        ONES,
    ),
    "keys without a table": _Wrong(
        _looked_up,
        r"or give \{table: keys\}",
        lambda opened: _with_table(opened, mapped=True),
        ONES,
    ),
    "a second table of a name": _Wrong(
        lambda opened: _second(opened, "twice", closing=False),
        "close it first",
        lambda opened: _second(opened, "twice", closing=True),
        torch.tensor(DIM),
    ),
    "a second table of a name, again": _Wrong(
        lambda opened: _second(opened, "twice", closing=False),
        "or give each its own name",
        lambda opened: _second(opened, "other", closing=False),
        torch.tensor(DIM),
    ),
}


@pytest.mark.parametrize("what", _WRONG)
def test_what_an_error_advises_works(what: str) -> None:
    """The sentence is there, and following it gives what the caller wanted."""
    wrong = _WRONG[what]
    with contextlib.ExitStack() as stack, pytest.raises(TorchRelayError, match=wrong.advice):
        wrong.call(stack.enter_context)
    with contextlib.ExitStack() as stack:
        found = wrong.follow(stack.enter_context)
        assert torch.equal(found, wrong.expected)

"""Training loops over a table do what they do over ``nn.Embedding(sparse=True)`` with torch's
optimizers.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.checkpoint import checkpoint

from nodes import Server, Worker, in_threads
from torchrelay.errors import ArgumentError, UnsupportedError
from torchrelay.parameters import Embedding, EmbeddingBag, Table, TableOptimizer, TableWeight, optim

# Of the references: torch's sparse Adagrad.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")

ROWS, DIM = 20, 3
RULES: dict[str, tuple[Any, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (optim.sgd(0.5), lambda p: torch.optim.SGD(p, lr=0.5)),
    "adam": (optim.adam(0.1), lambda p: torch.optim.SparseAdam(p, lr=0.1)),
    "adagrad": (optim.adagrad(0.2), lambda p: torch.optim.Adagrad(p, lr=0.2)),
}


@pytest.fixture(params=RULES)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Embedding, nn.Embedding, Any, Any]]:
    """A module over a table and torch's with the same rows, and their optimizers."""
    rule, make = RULES[request.param]
    weight = torch.randn(ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theirs = nn.Embedding(ROWS, DIM, sparse=True, _weight=weight.clone())
    ours = Embedding.from_pretrained(weight, freeze=False, optimizer=rule)
    yield ours, theirs, ours.table.optimizer(), make(theirs.parameters())
    ours.close()


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        # With repeats; half of the rows get none.
        keys = torch.randint(ROWS // 2, (6,), generator=generator)
        yield keys, torch.randn(6, DIM, dtype=torch.float64, generator=generator)


def loss_of(module: nn.Module, keys: Tensor, target: Tensor) -> Tensor:
    return (module(keys) - target).square().sum()


def assert_same(ours: Embedding, theirs: nn.Embedding) -> None:
    rows = ours.table.pull(torch.arange(ROWS))
    torch.testing.assert_close(rows, theirs.weight.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_accumulation_and_schedules(pair: Any, set_to_none: bool) -> None:
    ours, theirs, *optimizers = pair
    schedules = [ExponentialLR(optimizer, 0.7) for optimizer in optimizers]
    before = ours.table.pull(torch.arange(ROWS))
    for step, (keys, target) in enumerate(batches(12)):
        for module in (ours, theirs):
            loss_of(module, keys, target).backward()
        if step == 0:
            assert torch.equal(ours.table.pull(torch.arange(ROWS)), before)
            assert torch.equal(ours.weight.keys, keys.unique())
        if step % 3 == 2:
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
                schedule.step()
            assert_same(ours, theirs)
    assert not torch.equal(ours.table.pull(torch.arange(ROWS)), before)
    if set_to_none:
        assert ours.weight.grad is None and ours.weight.keys is None
    after = ours.table.pull(torch.arange(ROWS))
    optimizers[0].step()  # no gradient, nothing moves
    assert torch.equal(ours.table.pull(torch.arange(ROWS)), after)


def test_a_scaler_unscales_and_skips(pair: Any) -> None:
    ours, theirs, *optimizers = pair
    scalers = [
        torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2) for _ in optimizers
    ]
    for step, (keys, target) in enumerate(batches(6)):
        for module, optimizer, scaler in zip((ours, theirs), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            spoil = math.inf if step == 2 else 1.0
            scaler.scale(loss_of(module, keys, target) * spoil).backward()
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_same(ours, theirs)


def test_clipping_bounds_what_is_applied(pair: Any) -> None:
    ours, theirs, *optimizers = pair
    for keys, target in batches(4):
        for module, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            (100 * loss_of(module, keys, target)).backward()
        found = nn.utils.clip_grad_norm_(ours.parameters(), 0.1)
        gradient = theirs.weight.grad.coalesce()  # torch clips no sparse gradients
        expected = gradient.values().norm()
        theirs.weight.grad = gradient * (0.1 / (expected + 1e-6))
        torch.testing.assert_close(found, expected)
        for optimizer in optimizers:
            optimizer.step()
        assert_same(ours, theirs)
    nn.utils.clip_grad_value_(ours.parameters(), 0.01)
    assert ours.weight.grad.abs().max() <= 0.01


def test_lookups_share_a_step(pair: Any) -> None:
    """Several lookups in one forward pass, modules over one table, retained graphs and
    checkpointing.
    """
    ours, theirs, *optimizers = pair
    second = Embedding(ROWS, DIM, table=ours.table)
    assert len(list(nn.Sequential(ours, second).parameters())) == 1
    for step, (keys, target) in enumerate(batches(8)):
        for module, other, optimizer in zip(
            (ours, theirs), (second, theirs), optimizers, strict=True
        ):
            optimizer.zero_grad()
            reentrant = step % 2 == 0
            marked = target.clone().requires_grad_()
            rows = checkpoint(
                lambda k, t, m=module: m(k) * t, keys, marked, use_reentrant=reentrant
            )
            loss = rows.sum() + (module(keys + 1) * other(keys)).sum()
            loss.backward(retain_graph=True)
            if not reentrant:  # a reentrant checkpoint frees its graph
                loss.backward()
            optimizer.step()
        assert_same(ours, theirs)


@pytest.mark.parametrize("lr", [math.nan, math.inf, -1.0])
def test_learning_rates_are_checked(lr: float) -> None:
    for make in (optim.sgd, optim.adagrad, optim.rowwise_adagrad, optim.adam):
        with pytest.raises(ArgumentError, match="lr"):
            make(lr)
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0)) as table:
        with pytest.raises(ArgumentError, match="learning rate"):
            table.set_learning_rate(lr)
        with pytest.raises(ArgumentError, match="learning rate"):
            table.optimizer(lr)
        optimizer = table.optimizer()
        Embedding(ROWS, DIM, table=table)(torch.tensor([1])).sum().backward()
        optimizer.param_groups[0]["lr"] = lr
        with pytest.raises(ArgumentError, match="learning rate"):
            optimizer.step()
        assert not table.pull(torch.arange(ROWS)).any()


def test_a_step_has_the_learning_rate_of_its_optimizer() -> None:
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0)) as table:
        module, optimizer = Embedding(ROWS, DIM, table=table), table.optimizer()
        keys = torch.arange(3)
        for _ in range(2):
            optimizer.zero_grad()
            module(keys).sum().backward()
            optimizer.step()
            table.set_learning_rate(5.0)
        assert (table.pull(keys) == -2).all()


def _train(loss: Tensor, table: Table) -> None:
    loss.backward()
    table.optimizer().step()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite_change_nothing(bad: float) -> None:
    for apply_gradients in ("step", "backward"):
        with Table.create(
            ROWS, DIM, optimizer=optim.sgd(1.0), apply_gradients=apply_gradients
        ) as table:
            module = Embedding(ROWS, DIM, table=table)
            loss = (module(torch.tensor([1, 2])) * torch.tensor([[1.0], [bad]])).sum()
            with pytest.raises(ArgumentError, match="that of key 2"):
                _train(loss, table)
            assert not table.pull(torch.arange(ROWS)).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_pushed_gradients_that_are_not_finite_change_nothing(bad: float) -> None:
    keys = torch.tensor([4, 2, 4])
    values = torch.ones(3, DIM)
    values[1, 0] = bad
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0)) as table:
        for push in (table.push, table._worker.push):
            with pytest.raises(ArgumentError, match="1 rows, the first that of key 2"):
                push(keys, values)
        with pytest.raises(ArgumentError, match="key 2"):
            table._worker.push(keys.numpy(), values.numpy())
        assert not table.pull(torch.arange(ROWS)).any()
        table.push(keys, torch.full((3, DIM), torch.finfo(torch.float32).max / 4))
    with Table.create(ROWS, DIM) as table:
        table.push(keys, values)  # what is added may be anything
        assert not table.pull(keys).isfinite().all()
    lengths = Server(torch.tensor([2, 1]), rule=optim.sgd(1.0))
    with (
        lengths,
        Worker(0, lengths) as worker,
        pytest.raises(ArgumentError, match="some gradients are NaN"),
    ):
        worker.push(torch.tensor([0, 1]), torch.tensor([0.0, 0.0, bad]))


def test_only_the_newest_optimizer_of_a_table_steps() -> None:
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0)) as table:
        module, keys = Embedding(ROWS, DIM, table=table), torch.tensor([1])
        old, new = table.optimizer(), TableOptimizer([table.weight])
        module(keys).sum().backward()
        with pytest.raises(ArgumentError, match="newer optimizer"):
            old.step()
        new.step()
        assert torch.equal(table.pull(keys), torch.full((1, DIM), -1.0))


def test_a_gradient_that_nobody_would_apply_is_refused() -> None:
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0)) as table:
        module = Embedding(ROWS, DIM, table=table)
        with pytest.raises(
            ArgumentError, match=r"table\.optimizer\(\).*apply_gradients='backward'"
        ):
            module(torch.tensor([1])).sum().backward()
        optimizer = table.optimizer()
        module(torch.tensor([1])).sum().backward()
        optimizer.step()
        assert torch.equal(table.pull(torch.tensor([1])), torch.full((1, DIM), -1.0))


def test_a_table_that_applies_in_the_backward_pass_has_no_optimizer() -> None:
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0), apply_gradients="backward") as table:
        module = Embedding(ROWS, DIM, table=table)
        for _ in range(2):
            module(torch.tensor([1])).sum().backward()
        assert torch.equal(table.pull(torch.tensor([1])), torch.full((1, DIM), -2.0))
        assert module.weight.grad is None
        with pytest.raises(ArgumentError, match="before the first backward pass"):
            table.optimizer()


class _Watched:
    """A native worker, whose calls notice others that run at the same time."""

    def __init__(self, native: Any) -> None:
        self.native, self.both, self.overlaps = native, threading.Barrier(2), 0

    def access(self, *arguments: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            self.both.wait(0.2)
            self.overlaps += 1
        return self.native.access(*arguments)


def test_accesses_of_autograds_threads_do_not_overlap() -> None:
    """Autograd runs a lookup on each device in a thread of its own."""
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0), apply_gradients="backward") as table:
        module, keys = Embedding(ROWS, DIM, table=table), torch.tensor([1])
        losses = [module(keys).sum() for _ in range(2)]
        worker: Any = table._worker
        native = worker._native
        worker._native = watched = _Watched(native)
        in_threads([loss.backward for loss in losses])
        worker._native = native
        assert watched.overlaps == 0
        assert (table.pull(keys) == -2).all()


def test_applying_in_the_backward_pass_refuses_a_scaler() -> None:
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0), apply_gradients="backward") as table:
        module = Embedding(ROWS, DIM, table=table)
        scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(UnsupportedError, match="GradScaler"):
            scaler.scale(module(torch.tensor([1])).sum()).backward()
        assert not table.pull(torch.tensor([1])).any()
        del scaler


def test_a_scaler_of_another_model_is_none_of_the_tables() -> None:
    """Scaled losses are refused, now and later, also in sums; others are not."""
    scaler, other = torch.amp.GradScaler("cpu"), nn.Linear(1, 1)
    dense = torch.optim.SGD(other.parameters(), 0.1)
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0), apply_gradients="backward") as table:
        module, keys = Embedding(ROWS, DIM, table=table), torch.tensor([1])
        for step in range(3):
            scaler.scale(other(torch.ones(1, 1)).sum()).backward()
            scaler.step(dense)
            scaler.update()
            (0.5 * module(keys)).sum().backward()
            assert (table.pull(keys) == -0.5 * (step + 1)).all()
        for loss in (
            scaler.scale(module(keys).sum()),
            scaler.scale(module(keys).sum()) / 4,
            scaler.scale(module(keys).sum()) + scaler.scale(module(keys).mean()),
            scaler.scale(checkpoint(module, keys, use_reentrant=False).sum()),
        ):
            with pytest.raises(UnsupportedError, match=r"GradScaler.*for another model"):
                loss.backward()
        with pytest.raises(UnsupportedError, match="GradScaler"):
            torch.autograd.grad(scaler.scale(module(keys).sum()), [module._lookup.anchor])
        assert (table.pull(keys) == -1.5).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
        lambda p: torch.optim.Adam(p, fused=True),
        torch.optim.AdamW,
        torch.optim.Adagrad,
    ],
)
def test_torchs_optimizers_refuse_the_weight(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    for apply_gradients in ("step", "backward", None):
        with Table.create(
            ROWS, DIM, optimizer=optim.sgd(1.0), apply_gradients=apply_gradients
        ) as table:
            model = nn.Sequential(Embedding(ROWS, DIM, table=table), nn.Linear(DIM, 1))
            for parameters in (model.parameters(), model.named_parameters()):
                with pytest.raises(UnsupportedError, match=r"table\.optimizer\(\)"):
                    make(parameters)
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0)) as table:
        module = Embedding(ROWS, DIM, table=table)
        with pytest.raises(ArgumentError, match="torch's optimizers the other parameters"):
            TableOptimizer(nn.Linear(2, 2).parameters())  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match="Look rows up"):
            nn.functional.linear(torch.ones(1, DIM), module.weight)


def test_several_tables_have_one_optimizer_which_is_saved() -> None:
    model: Any = nn.ModuleList(
        [
            Embedding(ROWS, DIM, optimizer=optim.adam(0.1)),
            EmbeddingBag(ROWS, DIM, optimizer=optim.sgd(1.0), mode="sum"),
        ]
    )
    optimizer = TableOptimizer(p for p in model.parameters() if isinstance(p, TableWeight))
    before = model[1].table.pull(torch.tensor([1]))
    for _ in range(2):
        optimizer.zero_grad()
        (model[0](torch.tensor([1])).sum() + model[1](torch.tensor([[1, 1]])).sum()).backward()
        optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1.0]
    torch.testing.assert_close(model[1].table.pull(torch.tensor([1])), before - 4)
    state = optimizer.state_dict()
    other = TableOptimizer([module.weight for module in model], lr=0.5)
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.1 and other.state[model[0].weight]["step"] == 2
    for module in model:
        module.close()


def test_tables_are_added_to_an_optimizer() -> None:
    keys, table = torch.tensor([1]), Table.create(ROWS, DIM, optimizer=optim.sgd(1.0))
    others = [Table.create(ROWS, DIM, optimizer=optim.adam(lr)) for lr in (0.1, 0.2)]
    modules = [Embedding(ROWS, DIM, table=each) for each in (table, *others)]
    optimizer = table.optimizer()
    optimizer.add_param_group({"params": (module.weight for module in modules[1:])})
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.1, 0.2]
    sum(module(keys).sum() for module in modules).backward()
    optimizer.step()
    for each, lr in zip((table, *others), (1.0, 0.1, 0.2), strict=True):
        torch.testing.assert_close(each.pull(keys), torch.full((1, DIM), -lr))
    with pytest.raises(ArgumentError, match="learning rate"):
        optimizer.add_param_group({"params": table.weight, "lr": -1.0})
    for each in (table, *others):
        each.close()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_zeros_are_steps(pair: Any, set_to_none: bool) -> None:
    """Adam's moments decay, for the rows that were looked up and no others."""
    ours, theirs, *optimizers = pair
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in optimizers]
    for step, (keys, target) in enumerate(batches(16)):
        # Every other batch has a gradient of zeros, sometimes accumulated with another batch's.
        factor = float(step % 2)
        for module, optimizer, scaler in zip((ours, theirs), optimizers, scalers, strict=True):
            scaler.scale(factor * loss_of(module, keys, target)).backward()
            if step % 3 == 2:
                continue
            scaler.unscale_(optimizer)
            if module is ours:
                nn.utils.clip_grad_norm_(module.parameters(), 1e6)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=set_to_none)
            if step % 4 == 3:  # a step without gradients; SparseAdam counts it if they were cleared
                optimizer.step()
        if step % 3 != 2:
            assert_same(ours, theirs)


@pytest.mark.parametrize("reset", ["optimizer", "module", "gradient"])
def test_cleared_gradients_are_no_steps(reset: str) -> None:
    clear = {
        "optimizer": lambda module, optimizer: optimizer.zero_grad(set_to_none=False),
        "module": lambda module, optimizer: module.zero_grad(set_to_none=False),
        "gradient": lambda module, optimizer: module.weight.grad.zero_(),
    }[reset]
    with Table.create(ROWS, DIM, optimizer=optim.adam(0.1)) as table:
        module, optimizer = Embedding(ROWS, DIM, table=table), table.optimizer()
        for factor in (1.0, 0.0):
            (factor * module(torch.tensor([1])).sum()).backward()
            assert not module.weight.gradients.is_cleared
            optimizer.step()
            clear(module, optimizer)
            assert module.weight.gradients.is_cleared
        first = table.pull(torch.tensor([1]))
        module(torch.tensor([2])).sum().backward()
        optimizer.step()
        assert torch.equal(table.pull(torch.tensor([1])), first)


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_weight_decay_of_rows_with_a_gradient_of_zeros(name: str) -> None:
    makers: dict[str, tuple[Any, Any]] = {
        "sgd": (optim.sgd(0.5, weight_decay=0.1), torch.optim.SGD),
        "adagrad": (optim.adagrad(0.5, weight_decay=0.1), torch.optim.Adagrad),
    }
    rule, make = makers[name]
    weight = torch.randn(ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theirs = nn.Embedding(ROWS, DIM, _weight=weight.clone())  # torch decays no sparse gradients
    ours = Embedding.from_pretrained(weight, freeze=False, optimizer=rule)
    pairs = (
        (ours, ours.table.optimizer()),
        (theirs, make(theirs.parameters(), 0.5, weight_decay=0.1)),
    )
    everything = torch.arange(ROWS)
    for step in range(6):
        for module, optimizer in pairs:
            optimizer.zero_grad()
            (step % 2 * module(everything).square().sum()).backward()
            optimizer.step()
        assert_same(ours, theirs)
    ours.close()


def test_gradients_of_chosen_inputs() -> None:
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0)) as table:
        table.optimizer()
        module, keys = Embedding(ROWS, DIM, table=table), torch.tensor([1, 2, 1])
        factor = torch.ones(DIM, requires_grad=True)
        (module(keys) * factor).sum().backward(inputs=[factor])
        assert module.weight.keys is None and factor.grad is not None
        with pytest.raises(UnsupportedError, match="backward: a table's rows are not in this"):
            (module(keys) * factor).sum().backward(inputs=[module.weight])


@pytest.mark.parametrize("apply_gradients", ["step", "backward"])
def test_rows_frozen_after_the_forward_pass_get_no_gradient(apply_gradients: Any) -> None:
    with Table.create(
        ROWS, DIM, optimizer=optim.sgd(1.0), apply_gradients=apply_gradients
    ) as table:
        module, keys = Embedding(ROWS, DIM, table=table), torch.tensor([1])
        loss = module(keys).sum()
        module.requires_grad_(False)
        loss.backward()
        module.requires_grad_(True)
        assert module.weight.grad is None and not table.pull(keys).any()
        module(keys).sum().backward()
        assert module.weight.grad is not None or table.pull(keys).eq(-1).all()


def test_freezing() -> None:
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0)) as table:
        optimizer = table.optimizer()
        model = nn.Sequential(Embedding(ROWS, DIM, table=table), nn.Linear(DIM, 1))
        model.requires_grad_(False)
        assert not model(torch.tensor([1])).requires_grad
        model.requires_grad_(True)
        model(torch.tensor([1])).sum().backward()
        assert table.weight.grad is not None
        optimizer.zero_grad()
        assert table.weight.grad is None


def test_second_derivatives() -> None:
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0)) as table:
        optimizer = table.optimizer()
        module = Embedding(ROWS, DIM, table=table)
        with pytest.raises(UnsupportedError, match="create_graph"):
            module(torch.tensor([1])).square().sum().backward(create_graph=True)
        optimizer.zero_grad()
        # A penalty on the gradient with respect to something else is differentiable.
        table.set(torch.tensor([1]), torch.full((1, DIM), 2.0))
        x = torch.ones(1, DIM, requires_grad=True)
        (slope,) = torch.autograd.grad((module(torch.tensor([1])) * x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        assert table.weight.grad is not None
        assert torch.equal(table.weight.grad, torch.full((1, DIM), 4.0))

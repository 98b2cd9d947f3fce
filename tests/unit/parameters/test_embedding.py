"""The modules against torch's own: same forward, same gradients, same training."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchrelay.checkpoint import load, save
from torchrelay.errors import ArgumentError, MismatchError
from torchrelay.parameters import (
    Embedding,
    EmbeddingBag,
    IntentLoader,
    KeyInit,
    Table,
    TableWeight,
    UpdateRule,
    optim,
)

ROWS, DIM = 50, 8


@pytest.fixture
def create() -> Iterator[Callable[..., Table]]:
    with ExitStack() as stack:

        def make(optimizer: UpdateRule | None = None, **kwargs: Any) -> Table:
            rule = optimizer or optim.sgd(1.0)
            kwargs.setdefault("apply_gradients", "backward")
            return stack.enter_context(Table.create(ROWS, DIM, optimizer=rule, **kwargs))

        yield make


def filled(table: Table, seed: int = 0) -> torch.Tensor:
    """Random rows, written to the table; returns them."""
    values = torch.randn(
        table.num_keys, table.dim, generator=torch.Generator().manual_seed(seed)
    ).to(table.dtype)
    table.set(torch.arange(table.num_keys), values)
    return values


def everything(table: Table) -> torch.Tensor:
    return table.pull(torch.arange(table.num_keys))


def test_forward_and_gradient_equal_torchs(create: Callable[..., Table]) -> None:
    table = create()
    weight = filled(table)
    reference = nn.Embedding.from_pretrained(weight.clone(), freeze=False)
    ours = Embedding(ROWS, DIM, table=table)
    keys = torch.tensor([[3, 7, 3], [49, 0, 7]])
    cotangent = torch.randn(2, 3, DIM)
    assert torch.equal(ours(keys), reference(keys))
    (ours(keys) * cotangent).sum().backward()
    (reference(keys) * cotangent).sum().backward()
    torch.testing.assert_close(everything(table), weight - reference.weight.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (2, 3, 4)])
def test_shapes_and_dtypes(
    create: Callable[..., Table], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    table = create(dtype=dtype)
    weight = filled(table)
    keys = torch.randint(ROWS, shape)
    out = Embedding(ROWS, DIM, table=table)(keys)
    assert torch.equal(out, nn.functional.embedding(keys, weight))
    out.sum().backward()


@pytest.mark.parametrize(
    "options",
    [
        {"padding_idx": 7},
        {"padding_idx": -1},
        {"scale_grad_by_freq": True},
        {"max_norm": 1.5},
        {"max_norm": 2.0, "norm_type": 1.0, "padding_idx": 0},
    ],
)
def test_options_are_torchs(create: Callable[..., Table], options: dict[str, object]) -> None:
    table = create()
    weight = filled(table)
    reference = nn.Embedding(ROWS, DIM, **options, _weight=weight.clone())  # type: ignore[arg-type]
    ours = Embedding(ROWS, DIM, table=table, **options)  # type: ignore[arg-type]
    keys = torch.randint(ROWS, (40,), generator=torch.Generator().manual_seed(1))
    keys[:3] = torch.tensor([7, 0, ROWS - 1])
    cotangent = torch.randn(40, DIM)
    optimizer = torch.optim.SGD(reference.parameters(), lr=1.0)
    expected = reference(keys)
    got = ours(keys)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    (got * cotangent).sum().backward()
    (expected * cotangent).sum().backward()
    optimizer.step()
    torch.testing.assert_close(everything(table), reference.weight.detach(), rtol=1e-5, atol=1e-5)


def test_max_norm_is_computed_in_the_tables_dtype() -> None:
    weight = torch.randn(ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theirs = nn.Embedding(ROWS, DIM, max_norm=1.0, _weight=weight.clone())
    ours = Embedding.from_pretrained(weight, max_norm=1.0)
    keys = torch.arange(ROWS)
    torch.testing.assert_close(ours(keys), theirs(keys).detach(), rtol=1e-14, atol=0)
    ours.close()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("offsets", [None, [0, 2, 2, 7]])
def test_bags_are_torchs(
    create: Callable[..., Table], mode: str, padding_idx: int | None, offsets: list[int] | None
) -> None:
    table = create()
    weight = filled(table)
    reference = nn.EmbeddingBag(
        ROWS, DIM, mode=mode, padding_idx=padding_idx, _weight=weight.clone()
    )
    ours = EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=padding_idx, table=table)
    keys = torch.tensor([3, 5, 3, 1, 9, 3, 3, 8])
    arguments = (keys.view(2, 4),) if offsets is None else (keys, torch.tensor(offsets))
    cotangent = torch.randn_like(reference(*arguments))
    optimizer = torch.optim.SGD(reference.parameters(), lr=1.0)
    torch.testing.assert_close(ours(*arguments), reference(*arguments))
    (ours(*arguments) * cotangent).sum().backward()
    (reference(*arguments) * cotangent).sum().backward()
    optimizer.step()
    torch.testing.assert_close(everything(table), reference.weight.detach(), rtol=1e-5, atol=1e-6)


def test_bag_weights_get_a_gradient(create: Callable[..., Table]) -> None:
    table = create()
    weight = filled(table)
    reference = nn.EmbeddingBag(
        ROWS, DIM, mode="sum", include_last_offset=True, _weight=weight.clone()
    )
    ours = EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=True, table=table)
    keys, offsets = torch.tensor([1, 2, 1, 4]), torch.tensor([0, 3, 4])
    gradients = []
    for module in (ours, reference):
        sample_weights = torch.tensor([0.5, 1.0, -2.0, 3.0], requires_grad=True)
        module(keys, offsets, sample_weights).square().sum().backward()
        gradients.append(sample_weights.grad)
    torch.testing.assert_close(*gradients)


OPTIMIZERS = {
    "sgd": (
        optim.sgd(0.1, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    ),
    "adagrad": (
        optim.adagrad(0.1, initial_accumulator_value=0.2),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.2),
    ),
    "adam": (optim.adam(0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_follows_torchs_optimizers(create: Callable[..., Table], name: str) -> None:
    rule, make = OPTIMIZERS[name]
    table = create(optimizer=rule)
    weight = filled(table)
    reference = nn.Embedding.from_pretrained(weight.clone(), freeze=False)
    ours = Embedding(ROWS, DIM, table=table)
    optimizer = make(reference.parameters())
    # All rows: torch's dense step moves all.
    keys = torch.arange(ROWS).repeat(2)[torch.randperm(2 * ROWS)]
    target = torch.randn(2 * ROWS, DIM)
    for _ in range(10):
        optimizer.zero_grad()
        (reference(keys) - target).square().sum().backward()
        optimizer.step()
        (ours(keys) - target).square().sum().backward()
    torch.testing.assert_close(everything(table), reference.weight.detach(), rtol=1e-4, atol=1e-5)


def test_rowwise_adagrad_by_its_definition(create: Callable[..., Table]) -> None:
    table = create(optimizer=optim.rowwise_adagrad(0.1))
    weight, accumulator = filled(table), torch.zeros(ROWS, 1)
    ours = Embedding(ROWS, DIM, table=table)
    keys = torch.arange(ROWS)
    for step in range(5):
        gradient = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(step))
        (ours(keys) * gradient).sum().backward()
        accumulator += gradient.square().mean(dim=1, keepdim=True)
        weight -= 0.1 * gradient / (accumulator.sqrt() + 1e-10)
    torch.testing.assert_close(everything(table), weight, rtol=1e-5, atol=1e-5)


def test_the_padding_row_never_moves(create: Callable[..., Table]) -> None:
    table = create(optimizer=optim.sgd(0.1, weight_decay=0.5))
    filled(table)
    ours = Embedding(ROWS, DIM, padding_idx=3, table=table)
    before = table.pull(torch.tensor([3]))
    ours(torch.tensor([3, 4])).sum().backward()
    assert torch.equal(table.pull(torch.tensor([3])), before)


def test_a_new_module_makes_its_own_table() -> None:
    module = Embedding(
        ROWS, DIM, padding_idx=2, optimizer=optim.adam(), init=KeyInit("uniform", -1, 1, seed=5)
    )
    assert "padding_idx=2" in repr(module) and "adam" in repr(module)
    rows = module(torch.arange(ROWS))
    assert (rows[2] == 0).all() and rows.abs().max() <= 1 and rows.std() > 0.4
    assert [type(weight) for weight in module.parameters()] == [TableWeight]
    module.close()


def test_without_grad_nothing_is_pushed(create: Callable[..., Table]) -> None:
    table = create()
    weight = filled(table)
    module = Embedding(ROWS, DIM, table=table)
    with torch.no_grad():
        assert not module(torch.tensor([1])).requires_grad
    module.requires_grad_(False)
    assert not module(torch.tensor([1])).requires_grad
    assert torch.equal(everything(table), weight)


def test_state_dict_carries_rows_and_optimizer_state(create: Callable[..., Table]) -> None:
    rule = optim.adagrad(0.1)
    first, second = create(rule, name="first"), create(rule, name="second")
    filled(first)
    model = nn.Sequential(Embedding(ROWS, DIM, table=first), nn.Linear(DIM, 2))
    model(torch.arange(ROWS)).sum().backward()
    duplicate = nn.Sequential(Embedding(ROWS, DIM, table=second), nn.Linear(DIM, 2))
    duplicate.load_state_dict(model.state_dict())
    keys = torch.tensor([4, 4, 9])
    for module in (model, duplicate):
        module(keys).square().sum().backward()
    assert torch.equal(everything(first), everything(second))
    other = create(optim.sgd(0.1), name="other")
    with pytest.raises(RuntimeError, match="row holds 8 elements and the state of 'sgd'"):
        nn.Sequential(Embedding(ROWS, DIM, table=other), nn.Linear(DIM, 2)).load_state_dict(
            model.state_dict()
        )
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.rows"):
        duplicate.load_state_dict({})


def test_checkpoints(create: Callable[..., Table], tmp_path: Path) -> None:
    first, second = create(optim.adam(), name="first"), create(optim.adam(), name="second")
    filled(first)
    Embedding(ROWS, DIM, table=first)(torch.arange(20)).sum().backward()
    save({"table": first}, tmp_path / "checkpoint")
    load({"table": second}, tmp_path / "checkpoint")
    assert torch.equal(first.state_dict()["rows"].rows, second.state_dict()["rows"].rows)
    with pytest.raises(MismatchError, match="table"):
        load({"table": create(optim.sgd(0.1), name="other")}, tmp_path / "checkpoint")


def test_wrong_arguments_are_named(create: Callable[..., Table]) -> None:
    table = create()
    with pytest.raises(ArgumentError, match="not 51 of 8"):
        Embedding(51, DIM, table=table)
    with pytest.raises(ArgumentError, match="increase the loss"):
        Embedding(ROWS, DIM, table=create(optim.add(), name="adds"))
    with pytest.raises(ArgumentError, match="padding_idx"):
        Embedding(ROWS, DIM, padding_idx=ROWS, table=table)
    with pytest.raises(ArgumentError, match="mode"):
        EmbeddingBag(ROWS, DIM, mode="median", table=table)
    with pytest.raises(ArgumentError, match="integers"):
        Embedding(ROWS, DIM, table=table)(torch.tensor([0.5]))
    with pytest.raises(ArgumentError, match=str(ROWS)):
        Embedding(ROWS, DIM, table=table)(torch.tensor([ROWS]))
    for shape in ((3, DIM), (DIM, 2), (2 * DIM,), (1, 2, DIM)):
        two, values = torch.tensor([1, 2]), torch.zeros(shape)
        for use in (table.push, table.set, table.pull):
            with pytest.raises(ArgumentError, match=rf"must have the shape \(2, {DIM}\)"):
                use(two, values)
    for key in (ROWS, -1, 10**12):
        with pytest.raises(ArgumentError, match="out of range"):
            table.is_local(torch.tensor([0, key]))
    with pytest.raises(ArgumentError):
        optim.sgd(-1)
    optimizers: tuple[Any, ...] = (torch.optim.Adam, "adam")
    for optimizer in optimizers:
        with pytest.raises(ArgumentError, match=r"e\.g\. optim\.adam\(\)"):
            Embedding(ROWS, DIM, optimizer=optimizer)
    init: Any = torch.nn.init.normal_
    with pytest.raises(ArgumentError, match="KeyInit"):
        Embedding(ROWS, DIM, init=init)
    keys: Any = [1, 2]
    embedding: Any = Embedding(ROWS, DIM, table=table)
    with pytest.raises(ArgumentError, match="keys must be a dense tensor"):
        embedding(keys)
    with pytest.raises(ArgumentError, match=r"pass embedding\.table"):
        IntentLoader([], lambda batch: batch, table=embedding)


@pytest.mark.parametrize("how", ["break", "error", "closed", "keys_of"])
def test_an_abandoned_intent_loader_is_quiet_and_ends_its_intents(how: str) -> None:
    """An error in a generator that is collected is a warning, and so an error of the test."""
    batches, seen = [torch.tensor([i]) for i in range(9)], 0

    def keys_of(batch: torch.Tensor) -> torch.Tensor:
        if how == "keys_of" and int(batch) == 5:
            raise KeyError("a mistake in the caller's function")
        return batch

    table = Table.create(ROWS, DIM, optimizer=optim.sgd(1.0))
    iterator = iter(IntentLoader(batches, keys_of, lookahead=4, table=table))
    with contextlib.suppress(KeyError):
        for _ in iterator:
            seen += 1
            if seen == 2 and how != "keys_of":
                break
    if how == "closed":
        table.close()
    del iterator
    gc.collect()
    if how != "closed":
        assert table.clock == 5  # the end of the fifth batch, the last that was announced
    table.close()


def test_the_intent_loader_advances_the_clock(create: Callable[..., Table]) -> None:
    table = create()
    batches = [torch.tensor([i, i + 1]) for i in range(10)]
    loader = IntentLoader(batches, lambda batch: batch, lookahead=3, table=table)
    assert len(loader) == 10
    start = table.clock
    seen = []
    for step, batch in enumerate(loader):
        assert table.clock == start + step
        seen.append(batch)
    assert (
        all(torch.equal(a, b) for a, b in zip(seen, batches, strict=True))
        and table.clock == start + 10
    )
    for _ in loader:
        break
    assert table.clock == start + 13  # all three that were announced
    with pytest.raises(ArgumentError, match="lookahead"):
        IntentLoader(batches, lambda batch: batch, lookahead=0)
    with pytest.raises(ArgumentError, match="table="):
        list(IntentLoader(batches, lambda batch: batch))


def test_metrics_are_a_line(create: Callable[..., Table]) -> None:
    table = create()
    before = table.metrics()
    table.pull(torch.arange(10))
    after = table.metrics() - before
    assert after.local_pulls == 10 and after.locality == 1 and after.sent_bytes == 0
    assert "100.000% local" in str(after)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_many_keys_of_a_small_table(dtype: torch.dtype) -> None:
    rows = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    keys = torch.arange(5000).square().remainder(97).to(dtype).reshape(50, 100)
    theirs = torch.nn.Embedding(100, 4, _weight=rows.clone())
    with Table.create(100, 4, optimizer=optim.sgd(1.0)) as table:
        module, optimizer = Embedding(100, 4, _weight=rows, table=table), table.optimizer()
        ours = module(keys)
        assert torch.equal(ours, theirs(keys))
        factor = torch.arange(400.0).view(100, 4)
        (ours * factor).sum().backward()
        (theirs(keys) * factor).sum().backward()
        used = keys.unique().to(torch.int64)
        gradient = module.weight.grad
        assert gradient is not None and theirs.weight.grad is not None
        assert module.weight.keys is not None and torch.equal(module.weight.keys, used)
        torch.testing.assert_close(gradient, theirs.weight.grad[used])
        optimizer.step()
        for bad in (-1, 100):
            with pytest.raises(ArgumentError, match="out of range"):
                module(torch.cat([keys.flatten(), torch.tensor([bad], dtype=dtype)]))


@pytest.mark.parametrize("profiled", [False, True])  # where lookups are operators
def test_no_keys(profiled: bool) -> None:
    with (
        Table.create(4, 2, optimizer=optim.sgd(1.0)) as table,
        torch.profiler.profile() if profiled else contextlib.nullcontext(),
    ):
        table.optimizer()
        module, bags = Embedding(4, 2, table=table), EmbeddingBag(4, 2, mode="sum", table=table)
        rows = module(torch.empty(3, 0, dtype=torch.int64))
        assert rows.shape == (3, 0, 2)
        sums = bags(torch.empty(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
        assert torch.equal(sums, torch.zeros(2, 2))
        (rows.sum() + sums.sum()).backward()
        gradient = module.weight.grad
        assert gradient is None or gradient.shape == (0, 2)

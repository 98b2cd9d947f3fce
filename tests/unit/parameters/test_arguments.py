"""What functions of tables accept as keys and values, and what they say about the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchrelay.errors import ArgumentError, MismatchError, UnsupportedError
from torchrelay.parameters import Embedding, EmbeddingBag, IntentLoader, Table, optim

ROWS, DIM = 10, 4


@pytest.fixture
def table() -> Iterator[Table]:
    with Table.create(ROWS, DIM, optimizer=optim.sgd(1.0)) as table:
        table.set(range(ROWS), torch.arange(ROWS * DIM).float().reshape(ROWS, DIM))
        yield table


ACCEPTED: dict[str, tuple[Any, list[Any]]] = {
    "list": ([1, 2], [1, 2]),
    "nested lists": ([[1, 2], [3, 4]], [[1, 2], [3, 4]]),
    "tuple": ((1, 2), [1, 2]),
    "range": (range(3), [0, 1, 2]),
    "a number": (3, 3),  # type: ignore[dict-item]
    "numpy": (np.array([1, 2]), [1, 2]),
    "numpy number": (np.int32(3), 3),  # type: ignore[dict-item]
    "reversed": (np.array([1, 2])[::-1], [2, 1]),
    "read-only": (np.broadcast_to(np.array([1]), (2,)), [1, 1]),
    "big-endian": (np.array([1, 2], dtype=">i8"), [1, 2]),
    "uint64": (np.array([1, 2], dtype=np.uint64), [1, 2]),
    "int32": (torch.tensor([1, 2], dtype=torch.int32), [1, 2]),
    "uint8": (torch.tensor([1, 2], dtype=torch.uint8), [1, 2]),
    "strided": (torch.arange(8)[::3], [0, 3, 6]),
    "transposed": (torch.tensor([[1, 2], [3, 4]]).T, [[1, 3], [2, 4]]),
    "expanded": (torch.tensor([[1]]).expand(2, 3), [[1, 1, 1], [1, 1, 1]]),
    "no list": ([], []),
    "no keys": (torch.empty(0, dtype=torch.int64), []),
    "no rows of keys": (torch.empty(2, 0, dtype=torch.int64), [[], []]),
}
REFUSED: dict[str, Any] = {
    "floats": [1.0, 2.0],
    "bools": [True, False],
    "complex": torch.ones(2, dtype=torch.complex64),
    "text": "ab",
    "None": None,
    "dict": {1: 2},
    "set": {1},
    "ragged": [[1], [1, 2]],
    "too large": [2**70],
    "uint64 too large": np.array([2**64 - 1], dtype=np.uint64),
    "meta": torch.empty(2, dtype=torch.int64, device="meta"),
    "sparse": torch.tensor([0, 1]).to_sparse(),
    "bool": True,
}
FUNCTIONS: dict[str, Callable[[Table, Any], Any]] = {
    "pull": lambda table, keys: table.pull(keys),
    "push": lambda table, keys: table.push(keys, np.ones((*np.shape(keys), DIM), np.float32)),
    "set": lambda table, keys: table.set(keys, np.ones((*np.shape(keys), DIM)).tolist()),
    "is_local": lambda table, keys: table.is_local(keys),
    "intent": lambda table, keys: table.intent(keys, 5),
    "IntentLoader": lambda table, keys: list(IntentLoader([keys], lambda k: k, table=table)),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", ACCEPTED)
def test_keys_of_every_kind_are_accepted(table: Table, function: str, kind: str) -> None:
    keys, plain = ACCEPTED[kind]
    if function == "set" and np.size(plain) == 0:
        return table.set(keys, torch.empty(*np.shape(plain), DIM))
    before = table.pull(range(ROWS))
    found = FUNCTIONS[function](table, keys)
    index = torch.tensor(plain, dtype=torch.int64)
    if function == "pull":
        assert torch.equal(found, before[index])
    if function == "push":
        before.index_add_(0, index.flatten(), torch.full((index.numel(), DIM), -1.0))
    if function == "set":
        before[index.flatten()] = 1.0
    assert torch.equal(table.pull(range(ROWS)), before)
    return None


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", REFUSED)
def test_keys_of_other_kinds_are_refused_by_name(table: Table, function: str, kind: str) -> None:
    values = torch.ones(2, DIM)
    calls = FUNCTIONS | {
        "push": lambda table, keys: table.push(keys, values),
        "set": lambda table, keys: table.set(keys, values),
    }
    if function == "IntentLoader" and kind == "dict":
        return  # of tables
    before = table.pull(range(ROWS))
    with pytest.raises(ArgumentError, match="key"):
        calls[function](table, REFUSED[kind])
    assert torch.equal(table.pull(range(ROWS)), before)


@pytest.mark.parametrize("function", ["push", "set"])
def test_values_are_accepted_or_refused_by_name(table: Table, function: str) -> None:
    write = getattr(table, function)
    ones = torch.ones(2, DIM)
    for values in (
        [[1.0] * DIM] * 2,
        [[1] * DIM] * 2,
        np.ones((2, DIM), np.float32)[::-1],
        np.broadcast_to(np.float32(1), (2, DIM)),
        torch.ones(DIM, 2).T,
        ones.clone().requires_grad_(),
        ones.conj(),
    ):
        table.set([1, 2], torch.zeros(2, DIM))
        write([1, 2], values)
        assert torch.equal(table.pull([1, 2]).abs(), ones)
    before = table.pull(range(ROWS))
    for wrong in (
        ones.double(),
        np.ones((2, DIM)),
        ones[:1],
        ones.flatten(),
        ones.to_sparse(),
        ones.to("meta"),
        "ab",
        None,
        [[1.0], [1.0, 2.0]],
        1.0,
    ):
        with pytest.raises(ArgumentError, match="values"):
            write([1, 2], wrong)
    for out in ([1.0], torch.ones(2, DIM + 1), torch.ones(DIM, 2).T, ones.double(), None):
        if out is not None:
            with pytest.raises(ArgumentError, match=r"out|values"):
                table.pull([1, 2], out)  # type: ignore[arg-type]
    assert torch.equal(table.pull(range(ROWS)), before)


def test_numbers_are_accepted_or_refused_by_name(table: Table) -> None:
    unknown: Any
    state: Any
    table.enable_sampling_support("naive", seed=0)
    assert len(table.sample(np.int64(3))) == 3
    table.intent([1], np.int64(1), np.int64(3))
    for unknown in (-1, 1.5, "two", None, True):
        with pytest.raises(ArgumentError, match=r"count = .*whole number"):
            table.sample(unknown)
        with pytest.raises(ArgumentError, match=r"start = .*whole number"):
            table.intent([1], unknown)
        with pytest.raises(ArgumentError, match=r"lookahead.*whole number"):
            IntentLoader([], lambda batch: batch, unknown, table=table)
        with pytest.raises(ArgumentError, match=r"num_keys = .*whole number"):
            Table.create(unknown, DIM)
        with pytest.raises(ArgumentError, match=r"dim = .*whole number"):
            Table.create(ROWS, unknown)
    with pytest.raises(ArgumentError, match=r"end = 3.*at least 4"):
        table.intent([1], 3, 3)
    with pytest.raises(ArgumentError, match="num_keys"):
        Table.create(torch.tensor([1, 2]), DIM)  # type: ignore[arg-type]
    for state in (None, [], {}, {"rows": None}, {"weight": [1.0]}, {"weight": "x"}):
        with pytest.raises(MismatchError, match=r"state of a table|must be a dense tensor"):
            table.load_state_dict(state)
    for weight in (torch.ones(ROWS, DIM).to_sparse(), torch.ones(ROWS, DIM, device="meta")):
        with pytest.raises(MismatchError, match="must be a dense tensor"):
            table.load_state_dict({"weight": weight})


@pytest.mark.parametrize("count", [3, 3000])  # few keys are sorted, many marked
@pytest.mark.parametrize("bad", [-1, ROWS, 2**40])
@pytest.mark.parametrize("shape", [(-1,), (3, -1), (1, 3, -1)])
def test_an_index_in_an_error_is_the_callers(
    table: Table, count: int, bad: int, shape: tuple[int, ...]
) -> None:
    keys = torch.arange(count).flip(0) % ROWS
    keys[count // 2] = bad
    shaped = keys.reshape(shape)
    index = ", ".join(map(str, (shaped == bad).nonzero()[0].tolist()))
    values = torch.ones(*shaped.shape, DIM)
    modules = [Embedding(ROWS, DIM, table=table), EmbeddingBag(ROWS, DIM, table=table)]
    calls: dict[str, Callable[[], Any]] = {
        "pull": lambda: table.pull(shaped),
        "push": lambda: table.push(shaped, values),
        "set": lambda: table.set(shaped, values),
        "is_local": lambda: table.is_local(shaped),
        "intent": lambda: table.intent(shaped, 1),
        "Embedding": lambda: modules[0](shaped),
        "profiled": lambda: _profiled(modules[0], shaped),
        "sliced": lambda: modules[0](torch.stack([shaped, shaped], -1)[..., 0]),
    }
    if len(shape) == 2:
        calls["EmbeddingBag"] = lambda: modules[1](shaped)
    for call in calls.values():
        with pytest.raises(ArgumentError, match=rf"keys\[{index}\] = {bad} is out of range"):
            call()
    with pytest.raises(ArgumentError, match=f"key = {bad} is out of range"):
        table.pull(bad)


def _profiled(module: nn.Module, keys: Tensor) -> Tensor:
    with torch.profiler.profile():
        rows: Tensor = module(keys)
    return rows


def test_keys_created_at_first_use() -> None:
    with Table.create(0, DIM, capacity=4, optimizer=optim.sgd(1.0)) as table:
        keys = [10**15, -7]
        table.push(keys, torch.ones(2, DIM))
        assert torch.equal(table.pull(keys), -torch.ones(2, DIM))
        module, optimizer = Embedding(0, DIM, table=table), table.optimizer()
        module(torch.tensor(keys)).sum().backward()
        optimizer.step()
        assert torch.equal(table.pull(keys), -2 * torch.ones(2, DIM))
        table.set(range(1000), torch.ones(1000, DIM))  # evicts the others
        assert not table.pull(keys).any() and table.metrics().evictions >= 2
        for call in (table.rows, table.state_dict, lambda: table.load_state_dict({})):
            with pytest.raises(UnsupportedError, match="no number of keys"):
                call()
    with pytest.raises(ArgumentError, match="needs capacity"):
        Table.create(0, DIM)

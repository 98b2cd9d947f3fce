"""Moving the CPU generator and filling parts."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchrelay.deferred import deferred_init, dematerialize, materialize_module
from torchrelay.deferred._draws import fill_part, rule_for
from torchrelay.deferred._generators import jump
from torchrelay.deferred._graph import History
from torchrelay.errors import DeferredError

aten = torch.ops.aten


@pytest.mark.parametrize("drawn", [0, 1, 623, 624, 625, 1248, 5000])
def test_a_jump_equals_drawing(drawn: int) -> None:
    for words in (0, 1, 5, 622, 623, 624, 625, 1247, 1248, 1249, 100_000):
        generator = torch.Generator().manual_seed(5)
        torch.empty(drawn).uniform_(generator=generator)
        state = generator.get_state()
        torch.empty(words).uniform_(generator=generator)
        assert torch.equal(jump(state, words), generator.get_state()), words


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("func", "values"),
    [
        (aten.uniform_.default, (-1.0, 2.0)), (aten.normal_.default, (1.0, 3.0)),
        (aten.bernoulli_.float, (0.2,)),
        (aten.exponential_.default, (2.0,)), (aten.cauchy_.default, ()),
        (aten.geometric_.default, (0.4,)),
        (aten.random_.to, (100,)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("count", [16, 17, 31, 1000, 4096])
def test_a_part_equals_a_slice(
    func: Any, values: tuple[float, ...], dtype: torch.dtype, count: int
) -> None:
    rule = rule_for(func, dtype, (None, *values))
    if func is aten.normal_.default and dtype.itemsize == 2 and torch.__version__ < "2.12":
        assert rule is None  # it is drawn whole
        return
    assert rule is not None
    total = rule.total(count)
    assert total is not None
    generator = torch.Generator().manual_seed(1)
    state = generator.get_state()
    whole = func(torch.empty(count, dtype=dtype), *values, generator=generator)
    assert torch.equal(generator.get_state(), jump(state, total))

    def at(word: int) -> torch.Generator:
        generator.set_state(jump(state, word))
        return generator

    for start, stop in (
        (0, count),
        (count // 3, count // 2),
        (count - 5, count),
        (count // 2, count - 3),
    ):
        part = torch.empty(stop - start, dtype=dtype)
        fill_part(func, values, rule, count, start, part, at)
        assert torch.equal(part, whole[start:stop])


def test_a_far_shard_of_a_large_tensor() -> None:
    def build() -> Any:
        module = nn.Module()
        module.first = nn.Parameter(torch.empty(1000, 999).uniform_())
        module.large = nn.Parameter(torch.empty(2048, 1024).normal_())
        module.last = nn.Parameter(torch.randn(3))
        return module

    torch.manual_seed(0)
    eager = build()
    torch.manual_seed(0)
    module = deferred_init(build)
    materialize_module(
        module, shard=lambda name, tensor: (slice(1536, 2048),) if name == "large" else None
    )
    assert torch.equal(module.large, eager.large[1536:])
    assert torch.equal(module.last, eager.last)


def _replace_twice(module: nn.Linear) -> None:
    for _ in range(2):  # the second may lie where the first values did
        module.weight.data = torch.ones(3, 3)


@pytest.mark.parametrize(
    "change",
    [
        lambda module: nn.init.ones_(module.weight),
        lambda module: module.half(),
        _replace_twice,
    ],
)
def test_nothing_is_lost_by_going_back(change: Callable[[nn.Linear], object]) -> None:
    module = deferred_init(nn.Linear, 3, 3)
    materialize_module(module)
    change(module)
    with pytest.raises(DeferredError, match="changed since"):
        dematerialize(module)
    with pytest.raises(DeferredError, match="no record"):
        dematerialize(nn.Linear(3, 3))


def test_there_is_no_going_back_from_a_checkpoint() -> None:
    """Also not if the module was materialized from its record before."""
    module = deferred_init(nn.Linear, 3, 3)
    materialize_module(module)
    dematerialize(module)
    materialize_module(module, uninitialized=["weight", "bias"])
    for parameter in module.parameters():
        nn.init.constant_(parameter, 7)
    with pytest.raises(DeferredError, match="no record"):
        dematerialize(module)
    assert torch.equal(module.bias, torch.full((3,), 7.0))


def test_there_is_no_going_back_to_values_from_outside() -> None:
    """Also not if an operation in between read them: the record would keep their memory."""
    outside = torch.rand(3)

    def build() -> nn.Module:
        module = nn.Module()
        scaled = torch.rand(3) * outside
        module.register_buffer("made", scaled + 1)
        return module

    module = deferred_init(build)
    materialize_module(module)
    with pytest.raises(DeferredError, match="read real tensors from outside"):
        dematerialize(module)


def test_the_way_back_keeps_no_memory() -> None:
    """Nor do operations whose results were overwritten keep that of what they read."""

    def build() -> nn.Module:
        module = nn.Module()
        source = torch.rand(5)
        module.register_buffer("source", source)
        module.register_buffer("copied", source.clone().copy_(source).zero_())
        return module

    before = _histories()
    module = deferred_init(build)
    materialize_module(module)
    assert _histories() == before
    dematerialize(module)
    materialize_module(module)
    assert not module.copied.any() and module.source.any()  # type: ignore[operator]


def _histories() -> int:
    gc.collect()
    return sum(type(one) is History for one in gc.get_objects())


def test_intermediate_results_are_freed_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    histories = weakref.WeakSet[History]()
    begin = History.__init__

    def created(history: History, *arguments: Any) -> None:
        begin(history, *arguments)
        histories.add(history)

    monkeypatch.setattr(History, "__init__", created)

    def count(x: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, sum(one.real is not None for one in histories))
        return x + 1

    lib = torch.library.Library("torchrelay_freed", "DEF")
    lib.define("counted(Tensor x) -> Tensor")
    lib.impl("counted", count, "CPU")
    lib.impl("counted", torch.empty_like, "Meta")

    def build() -> nn.Module:
        module = nn.Module()
        values = torch.zeros(4)
        for _ in range(20):
            values = torch.ops.torchrelay_freed.counted(values)
        module.register_buffer("values", values)
        return module

    module: Any = deferred_init(build)
    materialize_module(module)
    assert torch.equal(module.values, torch.full((4,), 20.0))
    assert 1 <= most <= 3


@pytest.mark.parametrize(
    "combine",
    [
        lambda a, b: torch.add(a.bfloat16(), b.bfloat16(), alpha=0.3),
        lambda a, b: a.bfloat16().sub_(b.bfloat16(), alpha=0.3),
        lambda a, b: torch.complex(a, b) * torch.complex(b, a),
        lambda a, b: a.bfloat16() + b.bfloat16(),
    ],
)
def test_a_part_has_the_bits_of_the_whole(
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    def build() -> nn.Module:
        module = nn.Module()
        module.register_buffer("values", combine(torch.rand(4099), torch.rand(4099)))
        return module

    torch.manual_seed(0)
    eager: Any = build()
    for start, stop in ((0, 7), (3, 1000), (5, 4099), (4090, 4099)):
        torch.manual_seed(0)
        module: Any = deferred_init(build)
        materialize_module(module, shard=lambda name, tensor: (slice(start, stop),))  # noqa: B023
        assert torch.equal(module.values, eager.values[start:stop])


def test_a_part_of_a_long_chain_of_results() -> None:
    def build() -> nn.Module:
        module = nn.Module()
        values = torch.rand(8)
        for _ in range(300):
            values = values * 0.99
        module.register_buffer("values", values)
        return module

    torch.manual_seed(0)
    eager: Any = build()
    torch.manual_seed(0)
    module: Any = deferred_init(build)
    materialize_module(module, shard=lambda name, tensor: (slice(2, 6),))
    assert torch.equal(module.values, eager.values[2:6])


def test_an_attribute_that_shares_the_memory_of_a_parameter_is_filled_with_it() -> None:
    def build() -> Any:
        module = nn.Module()
        module.weight = nn.Parameter(torch.rand(4))
        module.alias = module.weight.detach()
        return module

    module = deferred_init(build)
    materialize_module(module, uninitialized=["weight"])
    nn.init.constant_(module.weight, 3)
    assert module.alias.data_ptr() == module.weight.data_ptr()
    module = deferred_init(build)
    torch.manual_seed(0)
    nn.init.uniform_(module.weight)
    materialize_module(module, uninitialized=["weight"], shard=lambda name, tensor: (slice(2),))
    torch.manual_seed(0)
    assert torch.equal(module.alias, torch.rand(4))

"""Moving the CPU generator and filling parts."""

from __future__ import annotations

import gc
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


def test_nothing_is_lost_by_going_back() -> None:
    module = deferred_init(nn.Linear, 3, 3)
    materialize_module(module)
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(DeferredError, match="changed since"):
        dematerialize(module)
    with pytest.raises(DeferredError, match="no record"):
        dematerialize(nn.Linear(3, 3))


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

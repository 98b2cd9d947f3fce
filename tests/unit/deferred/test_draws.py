"""Moving the CPU generator, filling parts, and the files and figures that build on it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchrelay.deferred import (
    deferred_init,
    dematerialize,
    from_recipe,
    materialize_module,
    plan,
    recipe,
)
from torchrelay.deferred._draws import fill_part, rule_for
from torchrelay.deferred._twister import jump
from torchrelay.errors import CorruptionError, DeferredError, MismatchError, UnsupportedError

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
        recipe(nn.Linear(3, 3))


def test_a_recipe_is_for_its_module_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.recipe"
    module = deferred_init(nn.Linear, 300, 500)
    recipe(module, path)
    assert path.stat().st_size < 10_000
    with pytest.raises(MismatchError, match="another module"):
        from_recipe(nn.Linear(2, 2), path)
    with torch.device("meta"):
        other = nn.Linear(300, 500)
    from_recipe(other, path)
    materialize_module(other)
    materialize_module(module)
    assert torch.equal(other.weight, module.weight)


def test_damaged_and_hostile_recipes_are_refused() -> None:
    module = deferred_init(nn.Linear, 3, 3)
    good = recipe(module)
    bad = [
        b"", b"{}", b"[]", good[: len(good) // 2], good.replace(b"torchrelay.recipe", b"another"),
        good.replace(b"aten::uniform_.default", b"aten::from_file.default"),
        good.replace(b"aten::uniform_.default", b"aten::__class__.default"),
        good.replace(b"aten::uniform_.default", b"os::system"),
        good.replace(b'"storages":[[36', b'"storages":[[4'), good.replace(b"float32", b"load"),
    ]  # fmt: skip
    for data in bad:
        with pytest.raises(CorruptionError):
            from_recipe(module, data)
    with pytest.raises(UnsupportedError, match="version"):
        from_recipe(module, good.replace(b'"version":1', b'"version":9'))


def test_a_plan_counts_bytes() -> None:
    module = deferred_init(nn.Linear, 100, 200)
    whole = plan(module)
    assert (whole.tensors, whole.size_bytes) == (2, 4 * (200 * 100 + 200))
    quarter = plan(module, shard=lambda name, tensor: (slice(0, 50),))
    assert quarter.size_bytes == 4 * (50 * 100 + 50)
    assert plan(module, dtype=torch.float16).size_bytes == whole.size_bytes // 2
    assert whole.seconds > 0 and "KiB" in str(whole)


@pytest.mark.parametrize("part", [1, 4])
def test_a_plan_tells_the_time(part: int) -> None:
    def build() -> nn.Module:
        layers: Any = nn.Sequential(
            nn.Embedding(16_000, 1000), *(nn.Linear(2000, 2000) for _ in range(8))
        )
        nn.init.trunc_normal_(layers[1].weight, std=1.0)
        nn.init.trunc_normal_(layers[2].weight, std=0.02)
        return layers.append(nn.LayerNorm(1000, dtype=torch.bfloat16))

    def rows(name: str, tensor: torch.Tensor) -> tuple[slice]:
        return (slice(0, tensor.shape[0] // part),)

    module = deferred_init(build)
    told = plan(module, shard=rows).seconds
    start = time.process_time()  # which does not count what other programs take
    materialize_module(module, shard=rows)
    took = time.process_time() - start
    assert took / 20 < told < took * 20, (told, took)  # about equal on an idle machine


def test_a_plan_counts_a_decomposition_whole_and_by_its_steps() -> None:
    plain = deferred_init(nn.Linear, 1000, 1000, bias=False)
    orthogonal = deferred_init(lambda: orthogonal_weights(nn.Linear(1000, 1000, bias=False)))
    assert plan(orthogonal).seconds > 3 * plan(plain).seconds
    few = plan(orthogonal, shard=lambda name, tensor: (slice(0, 10),))
    assert few.seconds > 0.2 * plan(orthogonal).seconds  # it cannot be cut


def orthogonal_weights(module: nn.Linear) -> nn.Linear:
    nn.init.orthogonal_(module.weight)
    return module


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int16, torch.float16]
)
def test_a_plan_can_be_made_for_any_type(dtype: torch.dtype) -> None:
    def build() -> nn.Module:
        module = nn.Module()
        module.register_buffer("made", torch.zeros(100, dtype=dtype))
        return module

    assert plan(deferred_init(build)).seconds > 0

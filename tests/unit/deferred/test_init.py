"""Deferred initialisation equals eager construction bit for bit: whole, in shuffled order, in
parts, and again.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from torchrelay.deferred import (
    deferred_init,
    dematerialize,
    is_deferred,
    materialize_module,
    materialize_tensor,
)

Build = Callable[[], nn.Module]


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
        assert mine[name].is_leaf == tensor.is_leaf, name
        assert mine[name].stride() == tensor.stride(), name
        assert mine[name].__dict__ == tensor.__dict__, name
        assert torch.equal(mine[name], tensor), name


CASES: dict[str, Build] = {}


def case(build: Build) -> Build:
    CASES[build.__name__] = build
    return build


def changed(change: Callable[[Any], Any]) -> Build:
    """A linear layer after ``change``."""

    def build() -> nn.Module:
        module = nn.Linear(20, 16)
        found = change(module)
        return found if isinstance(found, nn.Module) else module

    return build


def holding(make: Callable[[], torch.Tensor]) -> Build:
    """A module with one buffer that ``make`` makes, and a later draw."""

    def build() -> nn.Module:
        module = nn.Linear(3, 3)
        module.register_buffer("made", make())
        module.register_buffer("after", torch.rand(3))
        return module

    return build


CASES |= {
    "linear": lambda: nn.Linear(10, 20),
    "small": lambda: nn.Linear(3, 2),
    "double": lambda: nn.Linear(10, 20, dtype=torch.float64),
    "embedding": lambda: nn.Embedding(100, 20, padding_idx=33),
    "convolution": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)),
    "transformer": lambda: nn.Transformer(32, 4, 2, 2, 64, batch_first=True),
    "lstm": lambda: nn.LSTM(10, 20, 2, bidirectional=True),
    "channels_last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "half": changed(nn.Module.half),
    "to_double": changed(lambda m: m.to(torch.float64)),
    "frozen": changed(lambda m: m.requires_grad_(False)),
    "orthogonal": changed(lambda m: nn.init.orthogonal_(m.weight)),
    "sparse": changed(lambda m: nn.init.sparse_(m.weight, 0.3)),
    "kaiming": changed(lambda m: nn.init.kaiming_normal_(m.weight)),
    "truncated_far": changed(lambda m: nn.init.trunc_normal_(m.weight, std=0.02)),
    "truncated_near": changed(lambda m: nn.init.trunc_normal_(m.weight, std=1.0)),
    "truncated_tail": changed(lambda m: nn.init.trunc_normal_(m.weight, a=1.0, b=2.0)),
    "attributes": changed(lambda m: setattr(m.weight, "tag", "x")),
    "weight_norm": changed(parametrizations.weight_norm),
    "orthogonal_parametrization": lambda: parametrizations.orthogonal(nn.Linear(6, 6)),
    "spectral_norm": changed(parametrizations.spectral_norm),
    "old_weight_norm": changed(nn.utils.weight_norm),
    "old_weight_norm_of_all": changed(lambda m: nn.utils.weight_norm(m, dim=None)),  # type: ignore[arg-type]
    "old_weight_norm_removed": changed(
        lambda m: nn.utils.remove_weight_norm(nn.utils.weight_norm(m))
    ),
    "old_spectral_norm": changed(nn.utils.spectral_norm),
    "data_filled": changed(lambda m: m.bias.data.fill_(3)),
    "legacy_tensor": changed(lambda m: setattr(m, "p", nn.Parameter(torch.Tensor(3, 4).normal_()))),
    "log_normal": changed(lambda m: [m.weight.data.log_normal_(), m.bias.data.exponential_()]),
    "geometric": changed(lambda m: [m.weight.data.geometric_(0.3), m.bias.data.cauchy_()]),
    "dropout": changed(
        lambda m: m.weight.data.copy_(nn.functional.dropout(m.weight.data, 0.5)) is None
    ),
    "foreach": changed(lambda m: torch._foreach_mul_([m.weight.data, m.bias.data], 2.0) and m),  # type: ignore[unreachable]
    "buffer_class": changed(lambda m: setattr(m, "extra", nn.Buffer(torch.rand(4)))),
    "randperm": holding(lambda: torch.randperm(1000)),
    "random_from": holding(lambda: torch.empty(40, dtype=torch.int64).random_(5, None)),
    "randint": holding(lambda: torch.randint(3, 9, (20,))),
    "multinomial": holding(lambda: torch.multinomial(torch.rand(10), 3)),
    "bernoulli": holding(lambda: torch.bernoulli(torch.rand(30))),
    "nonzero": holding(lambda: torch.nonzero(torch.rand(10) > 0.5)),
    "numpy": holding(lambda: torch.from_numpy(np.arange(5.0))),
    "complex": holding(
        lambda: torch.randn(3, 4, dtype=torch.complex64)
        * torch.polar(torch.ones(4), torch.rand(4))
    ),
    "as_real": holding(lambda: torch.view_as_real(torch.randn(3, 4, dtype=torch.complex64))),
    "svd": holding(lambda: torch.linalg.svd(torch.rand(3, 4))[2]),
    "transposed_in_place": holding(lambda: torch.rand(3, 4).t_().add_(1)),
    "resized": holding(lambda: torch.rand(3).resize_(2)),
    "expanded": holding(lambda: torch.rand(1).expand(7).masked_fill_(torch.rand(7) > 0.5, 3)),
    "out": holding(lambda: torch.add(torch.rand(3), 1, out=torch.empty(3))),
    "inverse_cdf": holding(lambda: torch.rand(33, 17).erfinv_().mul_(3).clamp_(-1, 1)),
}  # fmt: skip


@case
def seed_inside() -> nn.Module:
    first = nn.Linear(4, 4)
    torch.manual_seed(7)
    return nn.Sequential(first, nn.Linear(5, 4))


@case
def explicit_generator() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    module = nn.Linear(20, 20)
    nn.init.normal_(module.weight, generator=generator)
    nn.init.uniform_(module.bias, generator=generator)
    module.register_buffer("normal", torch.randn(5, 7, generator=generator))
    module.register_buffer("uniform", torch.rand(40, generator=generator))
    module.register_buffer("whole", torch.randint(0, 9, (40,), generator=generator))
    module.register_buffer("order", torch.randperm(40, generator=generator))
    module.register_buffer("some", torch.bernoulli(torch.full((40,), 0.3), generator=generator))
    return module


@case
def copied_generator() -> nn.Module:
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    module = nn.Linear(3, 3)
    nn.init.normal_(module.weight, generator=generator)
    return module


@case
def forked_generator() -> nn.Module:
    layers = [nn.Linear(20, 20)]
    with torch.random.fork_rng():
        layers.append(nn.Linear(7, 7))
        torch.manual_seed(9)
        layers.append(nn.Linear(4, 4))
    layers.append(nn.Linear(5, 5))
    state = torch.get_rng_state()
    layers.append(nn.Linear(3, 3))
    torch.set_rng_state(state)
    return nn.Sequential(*layers, nn.Linear(3, 3))


@case
def changed_default_dtype() -> nn.Module:
    torch.set_default_dtype(torch.float64)
    try:
        return nn.Sequential(nn.Linear(3, 4), nn.Embedding(4, 4))
    finally:
        torch.set_default_dtype(torch.float32)


@case
def device_context() -> nn.Module:
    with torch.device("cpu"):
        return nn.Linear(3, 4)


@case
def autocast() -> nn.Module:
    module = nn.Linear(20, 20)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        module.weight.copy_(module.weight @ module.weight)
    return module


@case
def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    return module.half()


@case
def views() -> nn.Module:
    module = nn.Module()
    base = torch.randn(10, 4)
    module.top, module.bottom, module.turned = (
        nn.Parameter(base[:5]),
        nn.Parameter(base[5:]),
        nn.Parameter(base.t()),
    )
    module.register_buffer("base", base)
    with torch.no_grad():
        module.top.zero_()
        module.bottom.view(-1)[3:7].fill_(2)
        module.turned[0].add_(1)
    return module


@case
def data_assigned() -> nn.Module:
    module = nn.Linear(4, 4)
    module.weight.data = torch.randn(4, 4) * 3
    module.weight.data[0].zero_()
    module.weight.data = module.weight.data.half()
    return module


@case
def not_persistent() -> nn.Module:
    module = nn.BatchNorm1d(5)
    module.register_buffer("hidden", torch.rand(5), persistent=False)
    return module


@case
def copies() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32)
    return nn.ModuleList(copy.deepcopy(layer) for _ in range(3))


@case
def lazy() -> nn.Module:
    module = nn.LazyLinear(5)
    module(torch.randn(2, 3))
    return module


class Tagged(nn.Parameter):
    """A program's own Parameter, with an attribute and a method."""

    tag: int

    def __new__(cls, data: torch.Tensor, tag: int = 1) -> Tagged:
        made = super().__new__(cls, data)
        made.tag = tag
        return made


@case
def parameter_subclass() -> nn.Module:
    module = nn.Linear(4, 4)
    module.weight = Tagged(module.weight.data, 3)
    return module


@case
def decided_by_values() -> nn.Module:
    module = nn.Linear(4, 4)
    nn.init.constant_(module.bias, 1.0 if module.weight.sum() > 0 else 2.0)
    steps = [float(value) for value in torch.linspace(0, 1, 5)] + torch.arange(4).tolist()
    module.register_buffer("steps", torch.tensor(steps) + torch.from_numpy(torch.rand(9).numpy()))
    return module


@case
def small_normals() -> nn.Module:
    module = nn.Module()
    for size in range(20):
        module.register_buffer(f"draw{size}", torch.randn(size))
    return module


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's warnings about nested tensors, and about deprecated ways that are tested
    here.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def built_twice(build: Build) -> tuple[nn.Module, nn.Module]:
    """The eager and the deferred module, made from one generator state."""
    with quiet():
        torch.manual_seed(5)
        eager = build()
        end = torch.get_rng_state()
        torch.manual_seed(5)
        module = deferred_init(build)
    assert torch.equal(torch.get_rng_state(), end), (
        "the generator does not stand where eager construction left it"
    )
    torch.rand(11)
    return eager, module


@pytest.mark.parametrize("name", CASES)
def test_equals_eager_in_shuffled_order(name: str) -> None:
    eager, module = built_twice(CASES[name])
    tensors = list(tensors_of(module).values())
    assert all(map(is_deferred, tensors))
    random.Random(name).shuffle(tensors)
    with quiet():
        assert all(materialize_tensor(tensor) is tensor for tensor in tensors)
    assert_same(module, eager)


@pytest.mark.parametrize("name", CASES)
def test_equals_eager_after_going_back(name: str) -> None:
    eager, module = built_twice(CASES[name])
    before = {key: id(tensor) for key, tensor in tensors_of(module).items()}
    with quiet():
        materialize_module(module)
        dematerialize(module)
        assert is_deferred(module)
        materialize_module(module)
    assert_same(module, eager)
    assert before == {key: id(tensor) for key, tensor in tensors_of(module).items()}


@pytest.mark.parametrize("parts", [2, 3, 7])
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("lazy", "views")])
def test_parts_equal_slices_of_eager(name: str, parts: int) -> None:
    build = CASES[name]
    with quiet():
        for index in range(parts):
            eager, module = built_twice(build)
            dims = {
                key: random.Random(key).randrange(max(1, t.dim()))
                for key, t in tensors_of(eager).items()
            }

            def cut(
                key: str, tensor: torch.Tensor, index: int = index, dims: Any = dims
            ) -> tuple[slice, ...] | None:
                if tensor.dim() == 0:
                    return None
                step = -(-tensor.shape[dims[key]] // parts)
                return (slice(None),) * dims[key] + (slice(index * step, (index + 1) * step),)

            whole = tensors_of(eager)
            materialize_module(module, shard=cut)
            for key, tensor in tensors_of(module).items():
                slices = cut(key, whole[key])
                assert torch.equal(tensor, whole[key] if slices is None else whole[key][slices]), (
                    key
                )


def test_skip_init_leaves_parameters_deferred_and_uninitialized() -> None:
    module = deferred_init(nn.utils.skip_init, nn.Linear, 10, 20)
    assert is_deferred(module.weight)
    materialize_module(module)
    assert module.weight.shape == (20, 10)

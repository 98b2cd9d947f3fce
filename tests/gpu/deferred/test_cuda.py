"""Deferred initialisation of CUDA tensors: filled whole, sliced, one tensor at a time, equal to
eager bit for bit.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from torchrelay.deferred import deferred_init, is_deferred, materialize_module, materialize_tensor
from torchrelay.world import World

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device here"
)

_MIB = 1 << 20


def from_default_generator() -> nn.Module:
    """Draws of several kinds and sizes, small and uneven ones among them, from the device's default
    generator.
    """
    module: Any = nn.Sequential(nn.Linear(300, 77), nn.Embedding(1000, 33), nn.Conv2d(3, 8, 3)).to(
        "cuda"
    )
    with torch.device("cuda"):
        module.append(nn.Linear(301, 203))
        nn.init.normal_(module[0].weight)
        nn.init.trunc_normal_(module[1].weight, std=0.5, a=-1.0, b=1.0)
        module.register_buffer("order", torch.randperm(5000))
        module.register_buffer("mask", nn.functional.dropout(torch.ones(1000), 0.3))
        module.register_buffer("few", torch.rand(3))
    return module


def from_explicit_generator() -> nn.Module:
    generator = torch.Generator(device="cuda").manual_seed(3)
    module: Any = nn.Sequential(
        nn.Linear(300, 77, device="cuda"), nn.Linear(77, 40, device="cuda:0")
    )
    nn.init.normal_(module[0].weight, generator=generator)
    nn.init.uniform_(module[1].weight, generator=generator)
    module.register_buffer("drawn", torch.randn(5, 7, device="cuda", generator=generator))
    return module


def from_seed_inside() -> nn.Module:
    first = nn.Linear(50, 50, device="cuda")
    torch.cuda.manual_seed(7)
    second = nn.Linear(50, 50, device="cuda")
    state = torch.cuda.get_rng_state()
    third = nn.Linear(20, 20, device="cuda")
    torch.cuda.set_rng_state(state)
    return nn.Sequential(first, second, third, nn.Linear(20, 20, device="cuda"))


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.fixture(params=[from_default_generator, from_explicit_generator, from_seed_inside])
def built(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    """The eager and the deferred module, made from one state of the generators."""
    torch.manual_seed(5)
    eager = request.param()
    end = torch.cuda.get_rng_state(), torch.get_rng_state()
    torch.manual_seed(5)
    module = deferred_init(request.param)
    assert torch.equal(torch.cuda.get_rng_state(), end[0])
    assert torch.equal(torch.get_rng_state(), end[1])
    torch.rand(11, device="cuda")
    return eager, module


def test_equals_eager_whole(built: tuple[nn.Module, nn.Module]) -> None:
    eager, module = built
    materialize_module(module)
    for name, tensor in tensors_of(module).items():
        assert tensor.device == tensors_of(eager)[name].device, name
        assert torch.equal(tensor, tensors_of(eager)[name]), name


def test_equals_eager_in_shuffled_order(built: tuple[nn.Module, nn.Module]) -> None:
    eager, module = built
    names = list(tensors_of(eager))
    random.Random(1).shuffle(names)
    for name in names:
        tensor = tensors_of(module)[name]
        assert is_deferred(tensor)
        assert torch.equal(materialize_tensor(tensor), tensors_of(eager)[name]), name


@pytest.mark.parametrize("index", range(3))
def test_parts_equal_slices_of_eager(built: tuple[nn.Module, nn.Module], index: int) -> None:
    eager, module = built

    def rows(name: str, tensor: torch.Tensor) -> tuple[slice]:
        step = -(-len(tensor) // 3)
        return (slice(index * step, (index + 1) * step),)

    materialize_module(module, shard=rows)
    for name, tensor in tensors_of(module).items():
        whole = tensors_of(eager)[name]
        assert torch.equal(tensor, whole[rows(name, whole)]), name


def test_values_of_the_cpu_generator_can_go_to_cuda() -> None:
    torch.manual_seed(5)
    eager = nn.Linear(300, 200)
    torch.manual_seed(5)
    module = deferred_init(nn.Linear, 300, 200)
    weight = module.weight
    materialize_module(module, device="cuda", shard=lambda name, tensor: (slice(50, 100),))
    assert module.weight is weight and weight.is_cuda
    assert torch.equal(weight.cpu(), eager.weight[50:100])


def test_what_was_recorded_for_an_absent_device_goes_to_a_present_one() -> None:
    absent = f"cuda:{torch.cuda.device_count()}"
    torch.manual_seed(5)
    eager = nn.Linear(300, 200)
    for shard in (None, lambda name, tensor: (slice(50, 100),)):
        torch.manual_seed(5)
        module = deferred_init(nn.Linear, 300, 200, device=absent)
        materialize_module(module, device="cuda", shard=shard)
        assert module.weight.is_cuda
        expected = eager.weight if shard is None else eager.weight[50:100]
        assert torch.equal(module.weight.cpu(), expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: Any) -> None:
    def build() -> Any:
        return nn.Sequential(kind(30, 20, 2, device="cuda"), kind(20, 10).cuda())

    torch.manual_seed(5)
    eager = build()
    torch.manual_seed(5)
    module = deferred_init(build)
    materialize_module(module)
    for name, tensor in eager.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name
    x = torch.randn(7, 2, 30, device="cuda")
    module[0].flatten_parameters()
    assert torch.equal(module[0](x)[0], eager[0](x)[0])


def test_an_exception_resets_the_generator() -> None:
    def fail() -> None:
        torch.cuda.manual_seed(7)
        torch.randn(3, device="cuda")
        raise KeyError("on purpose")

    torch.rand(3, device="cuda")
    before = torch.cuda.get_rng_state()
    with pytest.raises(KeyError):
        deferred_init(fail)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_cuda_after_the_fact() -> None:
    torch.manual_seed(5)
    eager = nn.Linear(300, 200).cuda().half()
    torch.manual_seed(5)
    module = deferred_init(nn.Linear, 300, 200).cuda().half()
    assert is_deferred(module) and module.weight.is_cuda
    materialize_module(module)
    assert torch.equal(module.weight, eager.weight)


def test_parts_are_made_one_tensor_at_a_time() -> None:
    size = 16 * _MIB  # of each of four tensors, in elements of four bytes

    def build() -> nn.Module:
        return nn.ParameterList(torch.randn(16, size // 16, device="cuda") for _ in range(4))

    module = deferred_init(build)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    materialize_module(module, shard=lambda name, tensor: (slice(0, 4),))
    kept = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    assert kept <= size * 4 + _MIB
    assert peak <= kept + size * 4 + _MIB


@pytest.mark.processes(1)
def test_a_process_that_has_not_used_cuda_yet(world: World) -> None:
    assert not torch.cuda.is_initialized()
    torch.manual_seed(5)
    module = deferred_init(lambda: nn.Linear(30, 20, device="cuda:0"))
    materialize_module(module)
    torch.manual_seed(5)
    assert torch.equal(module.weight, nn.Linear(30, 20, device="cuda:0").weight)

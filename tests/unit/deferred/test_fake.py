"""Fake tensors: what they look like, where they live, what they refuse."""

from __future__ import annotations

import copy
import doctest
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import torchrelay.compat.torchdistx.deferred_init as compat_deferred_init
import torchrelay.compat.torchdistx.fake as compat_fake
from torchrelay.deferred import (
    deferred_init,
    fake,
    is_deferred,
    materialize_module,
    materialize_tensor,
)
from torchrelay.errors import ArgumentError, DeferredError, UnavailableError, UnsupportedError

without_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="CUDA is here: nothing to pretend"
)


@pytest.mark.parametrize("module", [fake, compat_fake, compat_deferred_init])
def test_examples_of_the_documentation(module: ModuleType) -> None:
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(module, optionflags=options, extraglobs={"torch": torch})
    assert result.attempted > 0 and result.failed == 0


def test_repr_tells_what_is_not_the_default() -> None:
    with fake.fake_mode():
        assert repr(torch.ones(2, 3)) == "tensor(..., size=(2, 3), fake=True)"
        assert (
            repr(torch.ones(2, dtype=torch.int8))
            == "tensor(..., size=(2,), dtype=torch.int8, fake=True)"
        )
        assert (
            repr(torch.ones(2, requires_grad=True))
            == "tensor(..., size=(2,), requires_grad=True, fake=True)"
        )
        parameter = nn.Parameter(torch.ones(2))
    assert (
        repr(parameter)
        == "Parameter containing:\ntensor(..., size=(2,), requires_grad=True, fake=True)"
    )
    assert isinstance(parameter, nn.Parameter)
    assert "fake" not in repr(torch.ones(1))


@without_cuda
def test_absent_devices_are_pretended() -> None:
    with fake.fake_mode():
        one = torch.ones(3, device="cuda")
        first = torch.ones(3, device="cuda:0")
        other = torch.ones(3)
        assert other.cuda().device == other.to("cuda").device == one.device
        assert other.to("cuda:1").device == torch.device("cuda", 1)
    assert (one * 2).device.type == "cuda" and one.cpu().device.type == "cpu"
    assert (one + other.sum()).device.type == "cuda"
    assert (one + first).device.type == "cuda"
    assert one.to(other).device.type == "cpu"
    with pytest.raises(ArgumentError, match="different devices"):
        one + other
    with fake.fake_mode(fake_cuda=False), pytest.raises(UnavailableError, match="cuda"):
        torch.ones(3, device="cuda")


def test_modes_nest_and_concern_one_thread() -> None:
    seen: list[bool] = []
    with fake.fake_mode():
        with fake.fake_mode():
            assert fake.is_fake(torch.ones(1))
        assert fake.is_fake(torch.ones(1))
        thread = threading.Thread(target=lambda: seen.append(fake.is_fake(torch.ones(1))))
        thread.start()
        thread.join()
    assert seen == [False]
    assert not fake.is_fake(torch.ones(1))


def test_operations_on_real_tensors_run_for_real() -> None:
    real = torch.ones(3)
    with fake.fake_mode():
        assert (real + 1).tolist() == [2.0, 2.0, 2.0]
        assert fake.is_fake(torch.ones_like(real))
        assert fake.is_fake(real + torch.ones(3))


def test_in_place_operations_return_the_same_tensor() -> None:
    with fake.fake_mode():
        tensor = torch.ones(3, 4)
        assert tensor.add_(1) is tensor
        assert tensor.t_() is tensor and tensor.shape == (4, 3)
        assert tensor[1:].stride() == (1, 4)


def test_meta_like_has_shape_and_stride() -> None:
    with fake.fake_mode():
        tensor = torch.ones(3, 4, dtype=torch.float16).t()
    meta = fake.meta_like(tensor)
    assert (meta.device.type, meta.shape, meta.stride(), meta.dtype) == (
        "meta",
        (4, 3),
        (1, 4),
        torch.float16,
    )
    with pytest.raises(ValueError, match="real one"):
        fake.meta_like(torch.ones(1))


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t.tolist(), lambda t: t.numpy(), lambda t: t.sum().item(),
        lambda t: bool((t > 1).all()),
        lambda t: t.nonzero(), lambda t: t.data_ptr(), pickle.dumps, materialize_tensor,
    ],
)  # fmt: skip
def test_what_needs_values_is_refused(use: Callable[[torch.Tensor], object]) -> None:
    with fake.fake_mode():
        tensor = torch.ones(3)
    with pytest.raises(DeferredError):
        use(tensor)


def test_a_condition_on_a_fake_tensor_does_not_advise_to_materialize_it() -> None:
    with fake.fake_mode():
        positive = torch.ones(3).sum() > 0
    for use in (bool, lambda t: t.tolist(), lambda t: t.item()):
        with pytest.raises(DeferredError, match="needs the values of a fake tensor, which has non"):
            use(positive)


def test_deferred_tensors_give_memory_only_while_they_are_recorded() -> None:
    assert deferred_init(lambda: torch.arange(3).tolist()) == [0, 1, 2]
    module = deferred_init(nn.Linear, 3, 3)
    for use in (lambda t: t.detach().numpy(), pickle.dumps):
        with pytest.raises(DeferredError):
            use(module.weight)


def test_a_fake_from_outside_has_no_history() -> None:
    with fake.fake_mode():
        outside = torch.ones(3)
    with pytest.raises(DeferredError, match="outside deferred_init"):
        deferred_init(lambda: torch.zeros(3) + outside)
    with pytest.raises(DeferredError, match="outside deferred_init"):
        deferred_init(lambda: torch.zeros(3).copy_(outside))


def test_a_real_tensor_must_not_change_before_it_is_read() -> None:
    outside = torch.ones(3)
    tensor = deferred_init(lambda: torch.zeros(3) + outside)
    kept = deferred_init(lambda: torch.zeros(3) + outside)
    assert materialize_tensor(kept).tolist() == [1.0, 1.0, 1.0]
    outside.add_(1)
    with pytest.raises(DeferredError, match="changed in place"):
        materialize_tensor(tensor)


def test_arguments_are_checked() -> None:
    module = deferred_init(nn.Linear, 3, 3)
    for wrong in (
        lambda: is_deferred(3), lambda: materialize_tensor(3), lambda: materialize_module(3),  # type: ignore[arg-type]
        lambda: deferred_init(3), lambda: materialize_module(module, shard=3),  # type: ignore[arg-type]
        lambda: materialize_module(module, shard=lambda name, tensor: 3),  # type: ignore[arg-type]
        lambda: materialize_module(module, shard=lambda name, tensor: (slice(0, 3, 2),)),
    ):  # fmt: skip
        with pytest.raises(ArgumentError):
            wrong()
    with pytest.raises(ArgumentError, match="not an object of type Linear"):
        deferred_init(nn.Linear(3, 3))
    assert is_deferred(module)
    assert not is_deferred(torch.ones(1))


@without_cuda
def test_what_was_recorded_elsewhere_is_materialized_here_on_request() -> None:
    for module in (
        deferred_init(nn.Linear, 3, 3, device="cuda"),
        deferred_init(nn.Linear, 3, 3).cuda(),
    ):
        with pytest.raises(UnavailableError, match="device='cpu'"):
            materialize_module(module)
        materialize_module(module, device="cpu")
        assert module.weight.device.type == "cpu" and not is_deferred(module)


@without_cuda
def test_draws_for_an_absent_device_are_those_of_the_cpu() -> None:
    def build(device: str) -> nn.Module:
        module = nn.Sequential(*(nn.Linear(8, 8, device=device) for _ in range(2)))
        module.register_buffer("few", torch.randn(3, device=device))  # an unknown number of words
        module.register_buffer("here", torch.rand(3))
        return module

    def program(make: Callable[[str], nn.Module], device: str) -> list[nn.Module]:
        torch.manual_seed(5)
        modules = [make(device), make(device)]
        for layer in modules[0].children():
            nn.init.normal_(layer.weight)  # type: ignore[arg-type]
        return modules

    eager, end = program(build, "cpu"), torch.get_rng_state()
    deferred = program(lambda device: deferred_init(build, device), "cuda")
    assert torch.equal(torch.get_rng_state(), end)
    materialize_tensor(deferred[1].here)  # type: ignore[arg-type]
    for mine, theirs in zip(deferred, eager, strict=True):
        materialize_module(mine, device="cpu")
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(mine.state_dict()[name], tensor), name


@without_cuda
def test_a_draw_for_an_absent_device_does_not_hinder_the_next() -> None:
    def build() -> torch.Tensor:
        torch.randn(3, device="cuda" if fake.is_fake(torch.ones(1)) else "cpu")
        here = torch.rand(3)
        torch.manual_seed(1)
        return here

    torch.manual_seed(5)
    eager = build()
    torch.manual_seed(5)
    assert torch.equal(materialize_tensor(deferred_init(build)), eager)


@without_cuda
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_built_for_cuda(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With cuDNN, they ask for the addresses of their weights."""
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: True)
    torch.manual_seed(5)
    eager = kind(3, 4)
    torch.manual_seed(5)
    modules = deferred_init(kind, 3, 4, device="cuda"), deferred_init(kind, 3, 4).cuda()
    materialize_module(modules[0], device="cpu")
    for name, tensor in eager.state_dict().items():
        assert torch.equal(modules[0].state_dict()[name], tensor), name
    with pytest.raises(DeferredError, match="data_ptr"):
        modules[1].weight_hh_l0.data_ptr()


@pytest.mark.parametrize(
    "first",
    [
        lambda real: torch.randn(3),
        lambda real: torch.manual_seed(4),
        nn.init.normal_,
    ],
)
def test_an_exception_leaves_nothing_behind(first: Callable[[torch.Tensor], object]) -> None:
    real = torch.ones(3)

    def fail() -> None:
        first(real)
        torch.randn(3)
        torch.manual_seed(3)
        raise KeyError("on purpose")

    before = torch.get_rng_state()
    with pytest.raises(KeyError):
        deferred_init(fail)
    assert torch.equal(torch.get_rng_state(), before)
    assert not fake.is_fake(torch.ones(1))


def test_sparse_and_quantized_tensors_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="sparse"):
        deferred_init(lambda: torch.eye(3).to_sparse())


def test_deferred_tensors_can_be_copied() -> None:
    module = deferred_init(nn.Linear, 3, 3)
    duplicate = copy.deepcopy(module)
    alias = copy.copy(module.weight)
    materialize_module(module)
    materialize_module(duplicate)
    assert (
        torch.equal(module.weight, duplicate.weight)
        and module.weight.data_ptr() != duplicate.weight.data_ptr()
    )
    assert torch.equal(materialize_tensor(alias), module.weight)


def test_materialize_module_goes_where_it_is_told() -> None:
    module = deferred_init(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)))
    materialize_module(module, buffers_only=True)
    assert not is_deferred(module[0].running_mean) and is_deferred(module[0].weight)
    materialize_module(module, check_fn=lambda submodule: isinstance(submodule, nn.Linear))
    assert not is_deferred(module[1]) and is_deferred(module[0])
    materialize_module(module, dtype=torch.float64)
    assert (
        module[0].weight.dtype == torch.float64
        and module[0].num_batches_tracked.dtype == torch.int64
    )


class _Holder(nn.Module):
    """Keeps parameters that other modules register: of one that is visited before it, and of one
    that is visited after it.
    """

    def __init__(self, child: nn.Linear, parent: nn.Module) -> None:
        super().__init__()
        self.child = child
        parent.gain = nn.Parameter(torch.rand(4))
        self.kept = [child.weight, {"gain": parent.gain}]


def _build_holder() -> nn.Module:
    parent = nn.Module()
    parent.holder = _Holder(nn.Linear(3, 4), parent)
    return parent


def test_what_a_list_keeps_of_registered_tensors_is_theirs() -> None:
    names = ["holder.child.weight", "gain"]
    module = deferred_init(_build_holder)
    materialize_module(module, leave_deferred=names)
    assert [name for name, one in module.named_parameters() if is_deferred(one)] == names[::-1]
    materialize_module(module, check_fn=lambda one: isinstance(one, _Holder))
    assert all(is_deferred(module.get_parameter(name)) for name in names)
    materialize_module(module, shard=lambda name, tensor: (slice(1),))
    assert all(len(module.get_parameter(name)) == 1 for name in names)


def test_arguments_of_the_function_may_have_any_name() -> None:
    assert deferred_init(dict, fn=3) == {"fn": 3}


def test_hooks_and_optimizers_stay_with_the_parameter() -> None:
    module = deferred_init(nn.Linear, 3, 1)
    calls: list[torch.Tensor] = []
    module.weight.register_hook(calls.append)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    materialize_module(module)
    before = module.weight.detach().clone()
    module(torch.ones(3)).backward()
    optimizer.step()
    assert len(calls) == 1 and torch.equal(module.weight.detach(), before - 1)


def test_a_factory_that_reads_values_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "values"
    path.write_bytes(bytes(16))
    with fake.fake_mode(), pytest.raises(DeferredError, match="its result"):
        torch.from_file(str(path), size=4)


def test_draws_inside_fake_mode_leave_the_generator_where_the_program_does() -> None:
    module = deferred_init(nn.Linear, 3, 3)
    ends = []
    for context in (nullcontext(), fake.fake_mode()):
        torch.manual_seed(4)
        with context:
            module.reset_parameters()
        ends.append(torch.rand(3))
    assert torch.equal(*ends)

"""What the errors of deferred initialisation advise is tried: it works, and gives what was
wanted.

Advice about shards, subclasses and random numbers is tried beside them (``test_init``,
``test_subclasses``, ``test_record``).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchrelay import checkpoint
from torchrelay.deferred import (
    deferred_init,
    dematerialize,
    is_deferred,
    materialize_module,
    materialize_tensor,
)
from torchrelay.deferred.fake import fake_mode
from torchrelay.errors import TorchRelayError


class _Wrong(NamedTuple):
    """A call that fails with a sentence, and one that follows its advice and returns what the
    caller wanted, beside what it must equal.
    """

    call: Callable[[], Any]
    advice: str
    follow: Callable[[Path], tuple[torch.Tensor, torch.Tensor]]


class _Holds(nn.Module):
    """A module with the buffer ``value``, which ``make`` computes."""

    value: torch.Tensor

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("value", make())


class _Marked(nn.Parameter):
    """As those of bitsandbytes."""


def _marked() -> torch.Tensor:
    return torch.Tensor._make_subclass(_Marked, torch.ones(3), False)


def _materialized(make: Callable[[], torch.Tensor], **options: Any) -> torch.Tensor:
    module = deferred_init(_Holds, make)
    materialize_module(module, **options)
    assert not is_deferred(module)
    return module.value


def _same(make: Callable[[], torch.Tensor]) -> Callable[[Path], tuple[torch.Tensor, torch.Tensor]]:
    """Follow the advice inside ``make``, whose result must be that of eager construction."""
    return lambda path: (_materialized(make), make())


def _outside(
    make: Callable[[], torch.Tensor],
) -> Callable[[Path], tuple[torch.Tensor, torch.Tensor]]:
    """Follow the advice to call ``make`` outside."""

    def follow(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
        made = make()
        return _materialized(lambda: made), made

    return follow


def _quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def _changed_after(*, clone: bool = False, materialize_first: bool = False) -> torch.Tensor:
    outside = torch.ones(3)
    source = outside.clone() if clone else outside
    module = deferred_init(_Holds, lambda: torch.zeros(3) + source)
    if materialize_first:
        materialize_module(module)
    outside.add_(1)
    materialize_module(module)
    return module.value


def _trained() -> nn.Linear:
    module = deferred_init(nn.Linear, 2, 2)
    materialize_module(module)
    with torch.no_grad():
        module.weight.add_(1)
    return module


def _saved(module: nn.Linear, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    checkpoint.save({"module": module}, path / "saved")
    fresh = deferred_init(nn.Linear, 2, 2)
    checkpoint.load({"module": fresh}, path / "saved")
    return fresh.weight, module.weight


def _meta() -> nn.Linear:
    with torch.device("meta"):
        return nn.Linear(2, 2)


def _loaded_over_meta(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    saved, module = nn.Linear(2, 2), _meta().to_empty(device="cpu")
    checkpoint.save({"module": saved}, path / "saved")
    checkpoint.load({"module": module}, path / "saved")
    materialize_module(module)  # nothing is left to do
    return module.weight, saved.weight


def _under(mode: contextlib.AbstractContextManager[Any], make: Callable[[], Any]) -> Any:
    with mode:
        return make()


def _of_a_fake(inside: bool) -> torch.Tensor:
    fake = None if inside else _under(fake_mode(), lambda: torch.ones(3))
    return _materialized(lambda: torch.zeros(3) + (torch.ones(3) if fake is None else fake))


def _weight_of(module: nn.Linear) -> torch.Tensor:
    return materialize_tensor(module.weight)


def _address(tensor: torch.Tensor) -> torch.Tensor:
    return torch.tensor(tensor.data_ptr())


def _on_cuda() -> torch.Tensor:
    return torch.ones(3, device="cuda")


_WRONG = {
    "a tensor from outside changes": _Wrong(
        _changed_after,
        "Pass a clone of it",
        lambda path: (_changed_after(clone=True), torch.ones(3)),
    ),
    "a tensor from outside changes, later": _Wrong(
        _changed_after,
        "materialize the module before changing it",
        lambda path: (_changed_after(materialize_first=True), torch.ones(3)),
    ),
    "dematerialize what was trained": _Wrong(
        lambda: dematerialize(_trained()), "Save its values", lambda path: _saved(_trained(), path)
    ),
    "dematerialize what was not deferred": _Wrong(
        lambda: dematerialize(nn.Linear(2, 2)),
        "Save its values",
        lambda path: _saved(nn.Linear(2, 2), path),
    ),
    "an address": _Wrong(
        lambda: _address(deferred_init(nn.Linear, 2, 2).weight),
        r"Materialize it first \(materialize_tensor, or materialize_module",
        lambda path: (
            _address(_weight_of(deferred_init(nn.Linear, 2, 2))) > 0,
            torch.tensor(True),
        ),
    ),
    "values of fake_mode": _Wrong(
        lambda: _under(fake_mode(), lambda: torch.ones(3).tolist()),
        "inside deferred_init can be evaluated",
        lambda path: (
            torch.tensor(deferred_init(_Holds, lambda: torch.ones(3)).value.tolist()),
            torch.ones(3),
        ),
    ),
    "sizes in a tensor": _Wrong(
        lambda: _materialized(lambda: torch.arange(3).tensor_split(torch.tensor([1]))[1]),
        r"tolist\(\)",
        _same(lambda: torch.arange(3).tensor_split(torch.tensor([1]).tolist())[1]),
    ),
    "sizes in a tensor, in fake_mode": _Wrong(
        lambda: _under(fake_mode(), lambda: torch.arange(3).tensor_split(torch.tensor([1]))[1]),
        "give it numbers",
        lambda path: (
            torch.tensor(_under(fake_mode(), lambda: torch.arange(3).tensor_split([1])[1]).shape),
            torch.tensor([2]),
        ),
    ),
    "a parameter of a class of its own, in fake_mode": _Wrong(
        lambda: _under(fake_mode(), _marked),
        "outside of fake_mode",
        lambda path: (_marked(), torch.ones(3)),
    ),
    "a storage": _Wrong(
        lambda: _materialized(lambda: torch.tensor(torch.ones(3).untyped_storage().tolist())),
        r"tolist\(\)",
        _same(lambda: torch.tensor(torch.ones(3).tolist())),
    ),
    "a parameter of a class of its own": _Wrong(
        lambda: _materialized(_marked),
        "outside of deferred_init",
        _outside(_marked),
    ),
    "a quantized tensor": _Wrong(
        lambda: _materialized(_quantized),
        "Make them outside deferred_init",
        _outside(_quantized),
    ),
    "a sparse tensor": _Wrong(
        lambda: _materialized(lambda: torch.eye(3).to_sparse()),
        "Make it outside deferred_init",
        _outside(lambda: torch.eye(3).to_sparse()),
    ),
    "an out argument of another shape": _Wrong(
        lambda: _materialized(lambda: torch.add(torch.ones(3), 1, out=torch.empty(2))),
        "Give it one of the right shape",
        _same(lambda: torch.add(torch.ones(3), 1, out=torch.empty(3))),
    ),
    "a resize": _Wrong(
        lambda: _materialized(lambda: torch.ones(3).resize_(10)),
        "Make a new tensor and copy into it",
        _same(lambda: torch.cat([torch.ones(3), torch.zeros(7)]).copy_(torch.arange(10.0))),
    ),
    "two devices": _Wrong(
        lambda: _materialized(lambda: _on_cuda() + torch.ones(3)),
        "Move them to one first",
        lambda path: (
            _materialized(lambda: _on_cuda().cpu() + torch.ones(3), device="cpu"),
            torch.full((3,), 2.0),
        ),
    ),
    "a device that is not pretended": _Wrong(
        lambda: _under(fake_mode(fake_cuda=False), _on_cuda),
        "Leave fake_cuda out",
        lambda path: (
            torch.tensor(_under(fake_mode(), _on_cuda).device.type == "cuda"),
            torch.tensor(True),
        ),
    ),
    "a device that is not there": _Wrong(
        lambda: _materialized(_on_cuda),
        r"materialize_module\(..., device='cpu'\)",
        lambda path: (_materialized(_on_cuda, device="cpu"), torch.ones(3)),
    ),
    "a module on the meta device": _Wrong(
        lambda: materialize_module(_meta()),
        r"to_empty\(\) and load a checkpoint",
        _loaded_over_meta,
    ),
    "a module on the meta device, again": _Wrong(
        lambda: materialize_module(_meta()),
        r"Build the module with deferred_init\(\)",
        lambda path: (
            torch.tensor(_weight_of(deferred_init(nn.Linear, 2, 2)).shape),
            torch.tensor([2, 2]),
        ),
    ),
    "under a fake mode of torch": _Wrong(
        lambda: _under(FakeTensorMode(), lambda: deferred_init(nn.Linear, 2, 2)),
        "leave it before",
        lambda path: (
            _weight_of(deferred_init(nn.Linear, 2, 2)).isfinite().all(),
            torch.tensor(True),
        ),
    ),
    "a fake tensor from outside": _Wrong(
        lambda: _of_a_fake(inside=False),
        "made outside deferred_init",
        lambda path: (_of_a_fake(inside=True), torch.ones(3)),
    ),
}


@pytest.fixture(autouse=True)
def _no_warnings_of_torch() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "An output with one or more elements was resized")
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor.*are deprecated")
        yield


@pytest.mark.parametrize("what", _WRONG)
def test_what_an_error_advises_works(what: str, tmp_path: Path) -> None:
    """The sentence is there, and following it gives the values that the caller wanted."""
    wrong = _WRONG[what]
    if "not there" in what and torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(TorchRelayError, match=wrong.advice):
        wrong.call()
    found, expected = wrong.follow(tmp_path)
    if found.is_sparse:
        found, expected = found.to_dense(), expected.to_dense()
    assert torch.equal(found, expected)

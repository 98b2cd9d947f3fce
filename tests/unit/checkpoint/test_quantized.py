"""Every tensor subclass that users of torchao and bitsandbytes have goes through a save and a load
into a fresh object, and goes on as after ``torch.save``.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrelay.checkpoint import load, save
from torchrelay.errors import MismatchError

WEIGHTS = [
    "Float8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
]
TORCHAO = ["Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8"]
BITSANDBYTES = ["Adam8bit", "AdamW8bit", "AdEMAMix8bit", "Lion8bit", "RMSprop8bit"]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Any:
    """These libraries warn and log when they are imported, and compile, which takes minutes."""
    monkeypatch.setattr(torch, "compile", lambda function=None, **_: function)
    logging.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def _quantized(config: str, seed: int) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128)).bfloat16()
    quantization.quantize_(model, getattr(quantization, config)())
    return model


@pytest.mark.parametrize("config", WEIGHTS)
@pytest.mark.parametrize("form", ["module", "state_dict"])
def test_weights_of_torchao(config: str, form: str, tmp_path: Path) -> None:
    saved, found = _quantized(config, 0), _quantized(config, 1)
    state = (lambda module: module) if form == "module" else (lambda module: module.state_dict())
    save({"model": state(saved)}, tmp_path / "c")
    load({"model": state(found)}, tmp_path / "c")
    inputs = torch.randn(2, 128).bfloat16()
    assert torch.equal(found(inputs), saved(inputs))


def test_weights_that_were_quantized_otherwise(tmp_path: Path) -> None:
    save({"model": _quantized("Int8WeightOnlyConfig", 0)}, tmp_path / "c")
    for config in ("Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"):
        with pytest.raises(MismatchError, match=r"'model\.0\.weight' is of another tensor class"):
            load({"model": _quantized(config, 1)}, tmp_path / "c")
    plain = torch.nn.Sequential(torch.nn.Linear(128, 128)).bfloat16()
    with pytest.raises(MismatchError, match=r"lacks 'model\.0\.weight'"):
        load({"model": plain}, tmp_path / "c")


def _trained(make: Any, seed: int, steps: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 2))
    optimizer = make(model.parameters())
    _train(model, optimizer, range(steps))
    return model, optimizer


def _train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(4, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


OPTIMIZERS = [
    *(("torchao", name) for name in TORCHAO),
    *(("bitsandbytes", name) for name in BITSANDBYTES),
]


@pytest.mark.parametrize(("library", "name"), OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "stepped"])
def test_optimizers_with_quantized_state(
    library: str, name: str, steps: int, tmp_path: Path
) -> None:
    optim = pytest.importorskip(f"{library}.optim")
    kind = getattr(optim, name)
    small = {"min_8bit_size": 16} if "min_8bit_size" in inspect.signature(kind).parameters else {}

    def make(parameters: Any) -> Any:
        return kind(parameters, lr=1e-2, **small)

    model, optimizer = _trained(make, 0, 2)
    save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    other, resumed = _trained(make, 1, steps)
    load({"model": other, "optimizer": resumed}, tmp_path / "c")
    reference, by_torch = _trained(make, 2, 0)
    reference.load_state_dict(model.state_dict())
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    by_torch.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
    for one, its in ((model, optimizer), (other, resumed), (reference, by_torch)):
        _train(one, its, range(2, 5))
    for ours, theirs, original in zip(
        other.parameters(), reference.parameters(), model.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs) and torch.equal(ours, original)


def test_weights_of_bitsandbytes(tmp_path: Path) -> None:
    nn = pytest.importorskip("bitsandbytes.nn")

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        return torch.nn.Sequential(nn.Linear8bitLt(64, 64, has_fp16_weights=False)).to("cpu")

    saved, found = made(0), made(1)
    save({"model": saved}, tmp_path / "c")
    load({"model": found}, tmp_path / "c")
    inputs = torch.randn(2, 64).half()
    assert torch.equal(found(inputs), saved(inputs))

    four = [torch.nn.Sequential(nn.Linear4bit(64, 64)).to("cpu") for _ in range(2)]
    save({"model": four[0]}, tmp_path / "four")
    with pytest.raises(MismatchError, match=r"(?s)refused .*Unexpected key"):  # so does torch.load
        load({"model": four[1]}, tmp_path / "four")

"""Every tensor subclass that users of torchao and bitsandbytes have goes through a save and a load
into a fresh object, and goes on as after ``torch.save``.
"""

from __future__ import annotations

import inspect
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrelay._boxes import Box
from torchrelay.checkpoint import load, save
from torchrelay.checkpoint._types import DTYPES, TensorEntry
from torchrelay.checkpoint.format._quantized import Scales
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


def _snapshot(folder: Path, shapes: dict[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Write a snapshot as those of DeepSeek are; return what it holds, in float32."""
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(0)
    stored, expected = {"norm.weight": torch.randn(7)}, {}
    for name, shape in shapes.items():
        values = torch.randn(shape).to(torch.float8_e4m3fn)
        scales = torch.rand(*(-(-size // 128) for size in shape)) + 0.5
        stored |= {f"{name}.weight": values, f"{name}.weight_scale_inv": scales}
        grown = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        expected[f"{name}.weight"] = values.float() * grown[: shape[0], : shape[1]]
    safetensors.save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    weights = dict.fromkeys(stored, "model.safetensors")
    index = {"metadata": {}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return {**expected, "norm.weight": stored["norm.weight"]}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_snapshots_are_dequantized_as_dcp_does(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.quantized_hf_storage import (
        QuantizedHuggingFaceStorageReader,
    )

    expected = _snapshot(tmp_path, {"a": (300, 130), "b": (128, 256), "c": (5, 3)})

    def blank() -> dict[str, torch.Tensor]:
        return {
            key: torch.zeros(value.shape, dtype=dtype if "norm" not in key else torch.float32)
            for key, value in expected.items()
        }

    state, theirs = blank(), blank()
    load(state, tmp_path)
    reader = QuantizedHuggingFaceStorageReader(str(tmp_path), target_dtype=dtype)
    dcp.load(theirs, storage_reader=reader)
    for key, value in expected.items():
        assert torch.equal(state[key], value.to(state[key].dtype)), key
        assert torch.equal(state[key], theirs[key]), key
    as_it_is = {"a.weight": torch.zeros(300, 130, dtype=torch.float8_e4m3fn)}
    load(as_it_is, tmp_path)
    assert as_it_is["a.weight"].float().abs().sum() > 0


def test_quantized_snapshots_by_module_shard_and_deferred(tmp_path: Path) -> None:
    """Each rank reads and scales its shard; tied tensors and scales that do not fit, too."""
    from torchrelay.deferred import deferred_init

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(130, 300, bias=False)
            self.b = torch.nn.Linear(256, 128, bias=False)
            self.norm = torch.nn.LayerNorm(7, bias=False)

    expected = _snapshot(tmp_path, {"a": (300, 130), "b": (128, 256)})
    model = deferred_init(Model)
    result = load(model, tmp_path)
    assert result == ([], [])
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key])
    state: dict[str, Any] = {"a": {"weight": torch.zeros(300, 130)}}
    state |= {"norm": {"weight": torch.zeros(7)}}
    state["tied"] = state["norm"]  # its second name is not stored
    load(state, tmp_path, strict=False)
    assert torch.equal(state["a"]["weight"], expected["a.weight"])
    with pytest.raises(MismatchError, match=r"float8_e4m3fn .*checkpoint, and int64"):
        load({"a.weight": torch.zeros(300, 130, dtype=torch.int64)}, tmp_path)
    safetensors = pytest.importorskip("safetensors.torch")
    wrong = {"a.weight": torch.zeros(300, 130).to(torch.float8_e4m3fn)}
    wrong["a.weight_scale_inv"] = torch.zeros(5, 3)
    (tmp_path / "wrong").mkdir()
    safetensors.save_file(wrong, tmp_path / "wrong" / "model.safetensors")
    with pytest.raises(MismatchError, match=r"has scales of shape \[5, 3\]; known are .* \[3, 2\]"):
        load({"a.weight": torch.zeros(300, 130)}, tmp_path / "wrong")


@pytest.mark.parametrize(
    "box", [((0, 0), (300, 260)), ((130, 0), (20, 260)), ((100, 120), (60, 9))]
)
def test_any_part_of_a_quantized_tensor(box: tuple[tuple[int, int], tuple[int, int]]) -> None:
    torch.manual_seed(0)
    values, scales = torch.randn(300, 260).to(torch.float8_e4m3fn), torch.rand(3, 3)
    grown = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :260]
    read = Scales(
        "scales",
        TensorEntry(DTYPES["float8_e4m3fn"], (300, 260), ()),
        TensorEntry(DTYPES["float32"], (3, 3), ()),
    )
    read.values.copy_(scales)
    inner, target = Box(*box), torch.empty(box[1])
    memory, fill = read.scaled(inner, target)
    part = inner.within(Box.whole((300, 260)))
    memory.copy_(values[part])
    fill()
    assert torch.equal(target, values[part].float() * grown[part])

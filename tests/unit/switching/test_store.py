"""A stored model is the eager one bit for bit, also when another module is bound to its bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model

import switching_models as models
from torchrelay import checkpoint
from torchrelay.errors import (
    ArgumentError,
    DataError,
    MismatchError,
    ModelError,
    NotFoundError,
    UnsupportedError,
)
from torchrelay.switching import ModelStore
from torchrelay.switching._layout import Binding, Layout, layout_of
from torchrelay.switching._store import StoredModel

TOKENS = torch.arange(24).reshape(2, 12)


def bound(model: StoredModel) -> Any:
    """A skeleton over the model's bytes, as a worker makes it."""
    layout = Layout.from_json(model.layout.to_json())
    binding = Binding(model.factory.build_skeleton().eval(), layout)
    for index in range(len(layout.storages)):
        binding.bind(index, model.storage(index))
    return binding.module


def test_a_bound_skeleton_computes_what_the_eager_model_does() -> None:
    with ModelStore() as store:
        model = store.add("mixed", models.mixed, inputs={"tokens": TOKENS}, seed=3)
        torch.manual_seed(3)
        eager = models.mixed().eval()
        with torch.inference_mode():
            expected, got = eager(TOKENS), bound(model)(TOKENS)
        assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_ties_and_dtypes_are_kept_and_each_storage_is_kept_once() -> None:
    with ModelStore() as store:
        model = store.add("mixed", models.mixed, inputs={"tokens": TOKENS})
        module = bound(model)
        assert module.head.weight is module.embed.weight
        assert module.narrow.weight.dtype is torch.bfloat16 and module.mask.dtype is torch.bool
        assert [spec.paths for spec in model.layout.tensors if len(spec.paths) > 1] == [
            ("embed.weight", "head.weight")
        ]
        assert all(offset % 512 == 0 for offset in model.offsets)
        plain = sum(
            t.untyped_storage().nbytes()
            for t in {p.data_ptr(): p for p in module.parameters()}.values()
        )
        assert model.size_bytes < 40 * 512 + plain


def test_views_of_one_storage_stay_views() -> None:
    module: Any = torch.nn.Module()
    whole = torch.arange(12.0).reshape(3, 4)
    module.register_buffer("whole", whole)
    module.register_buffer("column", whole[:, 1])
    layout, storages = layout_of(module)
    assert layout.storages == (48,) and len(layout.tensors) == 2
    data = torch.zeros(512 + 48, dtype=torch.uint8)[512:]
    data.copy_(storages[0].bytes())
    storages[0].rebind(data)
    module.whole[2, 1] = 100.0
    assert module.column.tolist() == [1.0, 5.0, 100.0] and module.column.stride() == (4,)


def test_weights_come_from_a_safetensors_file(tmp_path: Path) -> None:
    torch.manual_seed(9)
    other = models.mixed().eval()
    save_model(other, str(tmp_path / "other.safetensors"))
    with ModelStore() as store:
        path = tmp_path / "other.safetensors"
        model = store.add("mixed", models.mixed, inputs={"tokens": TOKENS}, weights=path, seed=9)
        with torch.inference_mode():
            assert torch.equal(other(TOKENS)["logits"], bound(model)(TOKENS)["logits"])
        (tmp_path / "damaged.safetensors").write_bytes(path.read_bytes()[:100])
        with pytest.raises(DataError, match="damaged"):
            store.add(
                "m", models.mixed, inputs={"x": TOKENS}, weights=tmp_path / "damaged.safetensors"
            )
        with pytest.raises(ArgumentError, match="does not fit"):
            store.add("m", models.chain, inputs={"x": TOKENS}, weights=path)
        with pytest.raises(ArgumentError, match="no such file"):
            store.add(
                "m", models.chain, inputs={"x": TOKENS}, weights=tmp_path / "none.safetensors"
            )
        assert store.names() == ("mixed",)


def test_weights_come_from_a_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(9)
    other = models.mixed().eval()
    checkpoint.save({"model": other}, tmp_path / "saved")
    with ModelStore() as store:
        add: dict[str, Any] = {
            "inputs": {"tokens": TOKENS},
            "weights": tmp_path / "saved",
            "seed": 9,
        }
        model = store.add("mixed", models.mixed, weights_prefix="model.", **add)
        with torch.inference_mode():
            assert torch.equal(other(TOKENS)["logits"], bound(model)(TOKENS)["logits"])
        with pytest.raises(MismatchError):
            store.add("chain", models.chain, weights_prefix="model.", **add)


def test_wrong_models_are_refused_in_a_sentence() -> None:
    with ModelStore() as store:
        cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
            (lambda: torch.nn.Linear(1, 1), {}, ArgumentError, "top level"),
            (models.not_a_module, {}, ArgumentError, "must return a torch.nn.Module, not int"),
            (models.failing, {}, ModelError, "ValueError: cannot be built"),
            ("torch.nn:NoSuchLayer", {}, ArgumentError, "cannot load"),
            ("nowhere", {}, ArgumentError, "names no function"),
            (models.chain, {"kwargs": {"width": object()}}, ArgumentError, "JSON"),
        ]
        for factory, kwargs, error, message in cases:
            with pytest.raises(error, match=message):
                store.add("m", factory, inputs={"x": TOKENS}, **kwargs)
        with pytest.raises(ArgumentError, match="not a valid name of a model"):
            store.add("../m", models.chain, inputs={"x": TOKENS})
        with pytest.raises(NotFoundError, match="no model 'm'"):
            store.get("m")
        with pytest.raises(NotFoundError):
            store.remove("m")


def test_a_tensor_that_is_not_plain_is_refused() -> None:
    module = torch.nn.Module()
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    with pytest.raises(UnsupportedError, match="sparse is a Tensor of layout"):
        layout_of(module)


def test_a_second_add_replaces_the_model_and_counts_the_version() -> None:
    with ModelStore() as store:
        first = store.add("c", models.chain, inputs={"x": torch.zeros(1, 64)})
        second = store.add("c", models.chain, inputs={"x": torch.zeros(1, 64)}, seed=1)
        assert (first.version, second.version) == (1, 2) and store.get("c") is second
        assert first.fingerprint() == second.fingerprint()
        store.remove("c")
        assert store.names() == ()


def test_inputs_are_checked_against_their_specification() -> None:
    with ModelStore() as store:
        model = store.add("c", models.chain, inputs={"x": (torch.float32, (-1, 64))})
        (spec,) = model.inputs
        assert spec.example().shape == (1, 64)
        spec.check(torch.zeros(7, 64))
        for wrong in (torch.zeros(7, 63), torch.zeros(64), torch.zeros(7, 64, dtype=torch.float64)):
            with pytest.raises(ArgumentError, match="the model takes"):
                spec.check(wrong)

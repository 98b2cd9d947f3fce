"""Encoders of snapshots: how vectors are made of texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import language_models as models
from torchrelay.errors import ArgumentError, MismatchError, UnsupportedError
from torchrelay.switching import ModelStore

pytest.importorskip("transformers")

from torchrelay.switching.models import _encoders

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def states(folder: Path) -> torch.Tensor:
    """What transformers itself computes, without a row's end."""
    from transformers import AutoModel

    module: Any = AutoModel.from_pretrained(folder)
    with torch.inference_mode():
        found: torch.Tensor = module(input_ids=IDS, attention_mask=MASK).last_hidden_state
    return found


EXPECTED = {
    "cls": lambda row: row[0],
    "lasttoken": lambda row: row[-1],
    "max": lambda row: row.amax(0),
    "mean": lambda row: row.mean(0),
}


@pytest.mark.parametrize(
    ("pooling", "said"),
    [
        ("mean", None),
        ("cls", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}),
        ("max", {"pooling_mode_max_tokens": True}),
        ("mean", {"pooling_mode": "mean"}),
        ("lasttoken", {"pooling_mode_lasttoken": True, "include_prompt": True}),
    ],
)
def test_vectors_are_made_as_the_snapshot_says(
    tmp_path: Path, pooling: str, said: dict[str, Any] | None
) -> None:
    models.encoder_snapshot(tmp_path, pooling=said)
    _, module = _encoders.encoder_of(tmp_path, 0)
    with torch.inference_mode():
        found = module(input_ids=IDS, attention_mask=MASK)
    rows = [row[: int(mask.sum())] for row, mask in zip(states(tmp_path), MASK, strict=True)]
    expected = torch.stack([EXPECTED[pooling](row) for row in rows])
    if said is not None:
        expected = torch.nn.functional.normalize(expected, dim=-1)
    torch.testing.assert_close(found, expected)
    assert _encoders.encoding_of(tmp_path, module).max_tokens == (64 if said is None else 40)
    assert _encoders.is_encoder(tmp_path)


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    models.encoder_snapshot(tmp_path, pooling={"pooling_mode_weightedmean_tokens": True})
    with pytest.raises(UnsupportedError, match=r"by the poolings \['weightedmean'\]"):
        _encoders.encoder_of(tmp_path, 0)
    parts = json.loads((tmp_path / "modules.json").read_text())
    parts[1]["type"] = "sentence_transformers.models.Dense"
    (tmp_path / "modules.json").write_text(json.dumps(parts))
    with pytest.raises(UnsupportedError, match="'Dense' is not known"):
        _encoders.encoder_of(tmp_path, 0)


def test_a_snapshot_without_weights_of_the_model_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    models.encoder_snapshot(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored.pop("bert.encoder.layer.1.output.dense.weight")
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with ModelStore() as store:
        with pytest.raises(MismatchError, match=r"lacks 1 tensors of the model: .*layer\.1"):
            store.add("bert", weights=tmp_path, embed=True)
        with pytest.raises(ArgumentError, match="an encoder needs weights"):
            store.add("bert", embed=True)
        with pytest.raises(ArgumentError, match="an encoder needs weights"):
            store.add("bert", models.build, weights=tmp_path, embed=True)
        with pytest.raises(ArgumentError, match="exclude each other"):
            store.add("bert", weights=tmp_path, embed=True, generate=True)


def test_language_models_are_no_encoders(tmp_path: Path) -> None:
    for name in ("GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration"):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
        assert not _encoders.is_encoder(tmp_path)

"""What is read of a snapshot of a language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import language_models as models

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM

from torchrelay.errors import StorageError, UnsupportedError
from torchrelay.switching.generate._models import GenerateOptions, generating, language_model_of


@pytest.mark.parametrize("kind", ["mamba", "falcon_h1"])  # a tied weight and a hook; infinity
def test_a_snapshot_gives_the_model_that_was_saved(kind: str, tmp_path: Path) -> None:
    models.snapshot(tmp_path, kind, 1)
    load: Any = AutoModelForCausalLM.from_pretrained
    expected = load(tmp_path).state_dict()
    found = language_model_of(tmp_path, 0)[1].state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_tokens_that_end_a_text_are_those_of_the_snapshot(tmp_path: Path) -> None:
    models.snapshot(tmp_path, "llama", 1)
    module, file = language_model_of(tmp_path, 0)[1], tmp_path / "generation_config.json"

    def found() -> tuple[int, ...]:
        return generating("x", module, GenerateOptions(), tmp_path).eos

    for text, eos in (('{"eos_token_id": [1, 2]}', (1, 2)), ('{"eos_token_id": 3}', (3,))):
        file.write_text(text)
        assert found() == eos
    file.write_text("{")
    with pytest.raises(StorageError, match=r"generation_config\.json cannot be read"):
        found()
    file.unlink()
    assert found() == (1,)


@pytest.mark.parametrize(("kind", "size"), [("bart", 1), ("bloom", 4), ("llama", 4)])
def test_a_model_that_counts_positions_itself_gets_no_batches(kind: str, size: int) -> None:
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        module = make(AutoConfig.for_model(kind, num_hidden_layers=1, decoder_layers=1))
    assert generating("x", module, GenerateOptions(max_batch_size=4), None).options == (
        GenerateOptions(max_batch_size=size)
    )


SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "n_layer": 1, "n_embd": 32, "d_model": 32}
SMALL |= {"n_head": 2, "d_inner": 32, "num_heads": 2, "vocab_size": models.VOCABULARY}
SMALL |= {"num_attention_heads": 2}


@pytest.mark.parametrize("kind", ["rwkv", "xlstm", "openai-gpt", "xlnet", "recurrent_gemma"])
def test_models_that_keep_states_elsewhere_are_refused_when_they_are_added(kind: str) -> None:
    make: Any = AutoModelForCausalLM.from_config
    module = make(AutoConfig.for_model(kind, **SMALL))
    with pytest.raises(UnsupportedError, match="keeps what it needs of a sequence elsewhere"):
        generating("x", module, GenerateOptions(), None)


@pytest.mark.parametrize("kind", models.KINDS)
def test_models_with_a_cache_are_taken(kind: str) -> None:
    with torch.device("meta"):
        module = models.build(kind)
    if not models.gets_a_cache(module):
        pytest.skip("this transformers gives the model no cache")
    assert generating("x", module, GenerateOptions(), None).vocabulary == models.VOCABULARY

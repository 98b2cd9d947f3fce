"""The models of bench_switching: transformers configurations with random weights, nothing downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["NAMES", "SMOKE", "build", "inputs_of"]

IMAGES = ("resnet152", "vit", "convnext", "tiny-resnet")
NAMES = ("resnet152", "bert", "vit", "gpt2", "convnext", "qwen2")
SMOKE = ("tiny-resnet", "tiny-bert")


def _configuration(name: str) -> tuple[Any, Any]:
    import transformers  # noqa: PLC0415 - takes seconds

    hf: Any = transformers

    choices: dict[str, Callable[[], tuple[Any, Any]]] = {
        "resnet152": lambda: (hf.ResNetModel, hf.ResNetConfig(depths=[3, 8, 36, 3])),
        "bert": lambda: (hf.BertModel, hf.BertConfig()),
        "vit": lambda: (hf.ViTModel, hf.ViTConfig()),
        "gpt2": lambda: (hf.GPT2Model, hf.GPT2Config(use_cache=False)),
        "convnext": lambda: (hf.ConvNextModel, hf.ConvNextConfig()),
        "qwen2": lambda: (
            hf.Qwen2ForCausalLM,
            hf.Qwen2Config(
                hidden_size=896,
                intermediate_size=4864,
                num_hidden_layers=24,
                num_attention_heads=14,
                num_key_value_heads=2,
                vocab_size=151936,
                tie_word_embeddings=True,
                use_cache=False,
                dtype="bfloat16",
            ),
        ),
        "tiny-resnet": lambda: (
            hf.ResNetModel,
            hf.ResNetConfig(depths=[1, 1], hidden_sizes=[32, 64], embedding_size=16),
        ),
        "tiny-bert": lambda: (
            hf.BertModel,
            hf.BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128),
        ),
    }
    return choices[name]()


def build(name: str) -> torch.nn.Module:
    """Return the model; workers call this by the file's name."""
    kind, configuration = _configuration(name)
    model: torch.nn.Module = kind(configuration)
    if name == "qwen2":
        model = model.to(torch.bfloat16)
    return model.eval()


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    """Return one request: an image, or 64 tokens."""
    if name in IMAGES:
        return {"pixel_values": torch.zeros(1, 3, 224, 224)}
    return {"input_ids": torch.arange(64).reshape(1, 64)}

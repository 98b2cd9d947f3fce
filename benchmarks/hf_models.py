"""The models of bench_switching and bench_generate: transformers configurations and a GoogLeNet,
random weights, nothing downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["NAMES", "SMOKE", "build", "inputs_of", "language_model"]

IMAGES = ("resnet152", "vit", "convnext", "inception", "tiny-resnet")
NAMES = ("resnet152", "inception", "bert", "vit", "gpt2", "convnext", "qwen2")
SMOKE = ("tiny-resnet", "tiny-bert")


class _Inception(torch.nn.Module):
    """Branches of several widths side by side, as GoogLeNet's (Szegedy et al., 2015); transformers
    has no such model.
    """

    # Channels of each block's 1x1, 3x3 and 5x5 branches (with what reduces before them) and after
    # its pooling.
    BLOCKS = (
        (64, 96, 128, 16, 32, 32),
        (128, 128, 192, 32, 96, 64),
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
        (256, 160, 320, 32, 128, 128),
        (384, 192, 384, 48, 128, 128),
    )

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Sequential(_convolution(3, 64, 7, 4), _convolution(64, 192, 3, 2))
        self.blocks = torch.nn.ModuleList()
        width = 192
        for one, reduce3, three, reduce5, five, pooled in self.BLOCKS:
            pool = torch.nn.MaxPool2d(3, 1, 1)
            branches = (
                _convolution(width, one, 1),
                torch.nn.Sequential(
                    _convolution(width, reduce3, 1), _convolution(reduce3, three, 3)
                ),
                torch.nn.Sequential(
                    _convolution(width, reduce5, 1), _convolution(reduce5, five, 5)
                ),
                torch.nn.Sequential(pool, _convolution(width, pooled, 1)),
            )
            self.blocks.append(torch.nn.ModuleList(branches))
            width = one + three + five + pooled
        self.head = torch.nn.Linear(width, 1000)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.stem(pixel_values)
        for index, block in enumerate(self.blocks):
            x = torch.cat([branch(x) for branch in block], dim=1)  # type: ignore[attr-defined]
            if index in (1, 6):
                x = torch.nn.functional.max_pool2d(x, 3, 2, 1)
        scores: torch.Tensor = self.head(x.mean((2, 3)))
        return scores


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> torch.nn.Module:
    convolution = torch.nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return torch.nn.Sequential(convolution, torch.nn.BatchNorm2d(outputs), torch.nn.ReLU())


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
            hf.BertConfig(
                hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128
            ),
        ),
    }
    return choices[name]()


def build(name: str) -> torch.nn.Module:
    """Return the model; workers call this by the file's name."""
    if name == "inception":
        return _Inception().eval()
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


def language_model(kind: str, width: int, layers: int) -> torch.nn.Module:
    """Return a language model of transformers with 4,000 tokens and no end of a text."""
    import transformers  # noqa: PLC0415 - takes seconds

    heads = width // 64
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    if kind == "gpt2":
        sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 2048}
    tokens = {"vocab_size": 4000, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    configuration = transformers.AutoConfig.for_model(kind, **sizes, **tokens)
    make: Any = transformers.AutoModelForCausalLM.from_config
    made: torch.nn.Module = make(configuration)
    return made.eval()

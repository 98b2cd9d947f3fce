"""Small language models with random weights, and what transformers itself generates with them;
workers build them by this file's name.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "KINDS",
    "build",
    "build_faulty",
    "continuation",
    "encoder_snapshot",
    "gets_a_cache",
    "prompt_of",
    "snapshot",
    "tokenizer",
]

VOCABULARY = 200
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "initializer_range": 0.5,  # so that the likeliest token changes
}
_MAMBA2 = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
_BAMBA = {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
#: Configurations by name: with grouped heads, tied weights, learned positions, a window,
#: states.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _SIZES),
    "qwen2": ("qwen2", {**_SIZES, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 2048}),
    "mistral": ("mistral", {**_SIZES, "sliding_window": 12}),
    "gemma2": ("gemma2", {**_SIZES, "sliding_window": 12}),  # every other layer has the window
    "mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "bamba": ("bamba", {**_SIZES, **_BAMBA}),  # needs to be told the positions
    "falcon_h1": ("falcon_h1", {**_SIZES, **_MAMBA2}),  # attention and states in each layer
}


def build(kind: str = "llama", eos: int | None = None) -> torch.nn.Module:
    """Build a model of the seed that is set."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, sizes = KINDS[kind]
    tokens = {"bos_token_id": 1, "eos_token_id": eos, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, vocab_size=VOCABULARY, **sizes, **tokens)
    make: Any = AutoModelForCausalLM.from_config
    module: torch.nn.Module = make(config)
    for name, parameter in module.named_parameters():
        if kind == "gpt2" and parameter.dim() > 1 and "wte" not in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return module.eval()


def gets_a_cache(module: torch.nn.Module) -> bool:
    """Return whether the installed transformers gives the model one: Mamba from 5.24 on."""
    taken = inspect.signature(type(module).forward).parameters.keys()
    return not taken.isdisjoint({"cache", "past_key_values"})


def prompt_of(seed: int, size: int = 20) -> list[int]:
    """Return random tokens."""
    draw = random.Random(seed)
    return [draw.randrange(2, VOCABULARY) for _ in range(size)]


def continuation(
    kind: str, seed: int, prompt: list[int], count: int
) -> tuple[list[int], list[float]]:
    """Return what transformers itself generates, and the log-probabilities of its tokens."""
    torch.manual_seed(seed)
    module: Any = build(kind)
    with torch.inference_mode():
        made = module.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    ids = made.sequences[0, len(prompt) :].tolist()
    logprobs = torch.cat(made.logits).float().log_softmax(-1)
    return ids, [float(one[token]) for one, token in zip(logprobs, ids, strict=True)]


def build_faulty() -> torch.nn.Module:
    """Build a model that a token of 1 as the last of a prompt kills; one of 0 raises."""
    module: Any = build()
    forward = module.model.forward

    def faulty(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        last = input_ids[:, -1].tolist()
        if input_ids.shape[1] == 2 and 1 in last:
            os.kill(os.getpid(), signal.SIGKILL)
        if input_ids.shape[1] == 2 and 0 in last:
            raise ValueError("asked to fail")
        return forward(input_ids=input_ids, **kwargs)

    module.model.forward = faulty
    faulted: torch.nn.Module = module
    return faulted


def tokenizer() -> Any:
    """Return a tokenizer of bytes, with a chat template."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>"],
        # As ByteLevel writes bytes: a part of those of other characters than ASCII.
        initial_alphabet=list("abcdefghijklmnopqrstuvwxyzÃ©¤ÂĠĉ .:2+=1"),
        show_progress=False,
    )
    made.train_from_iterator(["once upon a time there was a cat", "two and two"], trainer)
    wrap: Any = PreTrainedTokenizerFast
    return wrap(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    )


def snapshot(folder: Path, kind: str, seed: int) -> None:
    """Write a snapshot: a model, and a tokenizer."""
    torch.manual_seed(seed)
    module: Any = build(kind, eos=1)
    module.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def encoder_snapshot(folder: Path, *, pooling: dict[str, Any] | None = None) -> None:
    """Write a snapshot of a BERT, as transformers does; with `pooling`, as sentence-transformers,
    which also scales the vectors.
    """
    from transformers import BertConfig, BertForMaskedLM, BertModel

    torch.manual_seed(3)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = BertConfig(
        vocab_size=VOCABULARY, num_attention_heads=4, max_position_embeddings=64, **sizes
    )
    make: Any = BertForMaskedLM if pooling is None else BertModel  # its names have a prefix
    make(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    if pooling is None:
        return
    (folder / "1_Pooling").mkdir()
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    parts = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in kinds.items()
    ]
    for path, content in (
        ("modules.json", parts),
        ("1_Pooling/config.json", pooling),
        ("sentence_bert_config.json", {"max_seq_length": 40}),
    ):
        (folder / path).write_text(json.dumps(content))

"""Two language models take turns between tokens in an arena that holds one of them. Their weights
are random, so that nothing is downloaded; the tokens are those of each model alone::

    python examples/generate.py
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from torchrelay.switching import GenerateOptions, ModelStore, Switcher

PROMPT = [5, 17, 42, 7]


def build() -> torch.nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            initializer_range=0.5,
            eos_token_id=None,
        )
    )


def main() -> None:
    with ModelStore() as store:
        for seed, name in enumerate(("first", "second")):
            alone = GenerateOptions(max_batch_size=1)
            store.add(name, build, seed=seed, generate=alone)
        size = store.get("first").size_bytes
        with Switcher(store, arena_bytes=size * 5 // 4, threads=1, slice_s=0.01) as switcher:
            for name in store.names():
                switcher.load(name)
            expected = [switcher.generate(n, PROMPT, max_tokens=60).ids() for n in store.names()]
            streams = [switcher.generate(n, PROMPT, max_tokens=60) for n in store.names()]
            assert [one.ids() for one in streams] == expected
            counts = switcher.status()["counts"]
            print(f"{counts['tokens']} tokens in {counts['slices']} turns, none computed twice")
            assert not counts["recomputed_tokens"]


if __name__ == "__main__":
    main()

"""Keys and values of sequences: moved to stashes and back, and stacked in rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import language_models as models

pytest.importorskip("transformers")

from torchrelay.errors import UnsupportedError
from torchrelay.switching.generate import _kv


def module_of(kind: str) -> Any:
    torch.manual_seed(0)
    return models.build(kind)


def feed(module: Any, cache: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = module(
            input_ids=torch.tensor([tokens]), cache=cache, use_cache=True
        ).logits[0, -1]
    return logits


@pytest.mark.parametrize("kind", models.KINDS)
def test_a_sequence_goes_on_from_its_stash_with_the_same_bits(kind: str) -> None:
    module, tokens = module_of(kind), models.prompt_of(1, 40)
    whole = _kv.new_cache(module.config)
    cache, stash = _kv.new_cache(module.config), None
    for start, end in ((0, 9), (9, 10), (10, 27), (27, 28), (28, 40)):
        expected = feed(module, whole, tokens[start:end])
        assert torch.equal(feed(module, cache, tokens[start:end]), expected)
        if stash is None:
            stash = _kv.Stash.create(_kv.shape_of(cache, 40))
        stash.write(cache)
        again = _kv.Stash.open(stash.segment.fd, stash.shape, end)
        cache = _kv.new_cache(module.config)
        again.read(cache, torch.device("cpu"))
        assert cache.get_seq_length() == end


@pytest.mark.parametrize("kind", models.KINDS)
def test_rows_of_a_batch_compute_what_each_sequence_does(kind: str) -> None:
    """The last bits may differ: matrices of other sizes are multiplied in another order."""
    module = module_of(kind)
    sizes = (5, 17, 11)
    prompts = [models.prompt_of(seed, size + 4) for seed, size in enumerate(sizes)]
    caches, alone = [], []
    for prompt, size in zip(prompts, sizes, strict=True):
        caches.append(_kv.new_cache(module.config))
        feed(module, caches[-1], prompt[:size])
        whole = _kv.new_cache(module.config)
        feed(module, whole, prompt[:size])
        alone.append([feed(module, whole, [one]) for one in prompt[size:]])
    for step in range(4):
        lengths = [size + step for size in sizes]
        stacked = _kv.stack(module.config, caches)
        columns, counts = torch.arange(max(lengths) + 1), torch.tensor(lengths)[:, None]
        with torch.inference_mode():
            logits = module(
                input_ids=torch.tensor(
                    [[one[size + step]] for one, size in zip(prompts, sizes, strict=True)]
                ),
                attention_mask=(columns >= max(lengths) - counts).long(),
                position_ids=counts,
                cache=stacked,
                use_cache=True,
            ).logits[:, -1]
        expected = torch.stack([one[step] for one in alone])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        caches = list(_kv.split(module.config, stacked, [one + 1 for one in lengths]))
        assert [one.get_seq_length() for one in caches] == [one + 1 for one in lengths]


def test_models_that_keep_other_states_are_refused() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("mamba", num_hidden_layers=2, hidden_size=32)
    with pytest.raises(UnsupportedError, match="only models whose layers keep keys and values"):
        _kv.check_cache(config)

"""Keys and values of sequences: moved to stashes and back, and stacked in rows."""

from __future__ import annotations

import inspect
import threading
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
    return compute(module, cache, [tokens])[0]


def compute(module: Any, cache: Any, ids: list[list[int]], **more: Any) -> torch.Tensor:
    known = inspect.signature(type(module).forward).parameters
    if "position_ids" in known and not more:
        more["position_ids"] = cache.get_seq_length() + torch.arange(len(ids[0]))[None]
    more = {name: value for name, value in more.items() if name in known}
    with torch.inference_mode():
        more["cache" if "cache" in known else "past_key_values"] = cache
        found = module(input_ids=torch.tensor(ids), use_cache=True, **more)
        logits: torch.Tensor = found.logits[:, -1]
    return logits


@pytest.mark.parametrize("kind", models.KINDS)
def test_a_sequence_goes_on_from_its_stash_with_the_same_bits(kind: str) -> None:
    module, tokens = module_of(kind), models.prompt_of(1, 40)
    if not models.gets_a_cache(module):
        pytest.skip("this transformers gives the model no cache")
    whole = _kv.new_cache(module.config)
    cache, stash = _kv.new_cache(module.config), None
    for start, end in ((0, 9), (9, 10), (10, 27), (27, 28), (28, 40)):
        expected = feed(module, whole, tokens[start:end])
        assert torch.equal(feed(module, cache, tokens[start:end]), expected)
        if stash is None:
            stash = _kv.Stash.create(_kv.shape_of(cache, 40))
        stash.write(cache, end)
        again = _kv.Stash.open(stash.segment.fd, stash.shape, end)
        cache = _kv.new_cache(module.config)
        assert again.read(cache, torch.device("cpu")) == end


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
        stacked = _kv.stack(module.config, caches, max(lengths))
        columns, counts = torch.arange(max(lengths) + 1), torch.tensor(lengths)[:, None]
        more = {"position_ids": counts, "attention_mask": (columns >= max(lengths) - counts).long()}
        ids = [[one[size + step]] for one, size in zip(prompts, sizes, strict=True)]
        logits = compute(module, stacked, ids, **(more if _kv.has_columns(stacked) else {}))
        expected = torch.stack([one[step] for one in alone])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        caches = list(_kv.split(module.config, stacked, [one + 1 for one in lengths]))
        for cache, length in zip(caches, lengths, strict=True):
            assert not _kv.has_columns(cache) or cache.get_seq_length() == length + 1


def test_a_model_computes_before_all_of_a_stash_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, tokens, reached = module_of("llama"), models.prompt_of(1, 21), threading.Event()
    cache = _kv.new_cache(module.config)
    feed(module, cache, tokens[:20])
    stash = _kv.Stash.create(_kv.shape_of(cache, 20))
    stash.write(cache, 20)
    copied, order = _kv._copied, list[bool]()

    def late(parts: Any, device: torch.device) -> Any:
        if order:
            assert reached.wait(100)  # what is needed last arrives once that is
        order.append(reached.is_set())
        return copied(parts, device)

    monkeypatch.setattr(_kv, "_copied", late)
    module.model.layers[1].register_forward_pre_hook(lambda *_: reached.set())
    again = _kv.new_cache(module.config)
    stash.read(again, torch.device("cpu"))
    assert torch.equal(feed(module, again, tokens[20:]), feed(module, cache, tokens[20:]))
    assert order == [False, True]


def test_states_that_a_writer_left_half_written_are_not_read() -> None:
    module, tokens = module_of("bamba"), models.prompt_of(1, 12)
    cache, device = _kv.new_cache(module.config), torch.device("cpu")
    stash, ends = None, (10, 11, 12)
    for start, end in zip((0, *ends), ends, strict=False):
        feed(module, cache, tokens[start:end])
        stash = stash or _kv.Stash.create(_kv.shape_of(cache, 12))
        stash.write(cache, end)
    assert stash is not None
    for end in (11, 12):  # the one before the last is whole, too: the last may not be reported
        again = _kv.Stash.open(stash.segment.fd, stash.shape, end)
        assert again.read(_kv.new_cache(module.config), device) == end
    again = _kv.Stash.open(stash.segment.fd, stash.shape, 10)
    assert again.read(_kv.new_cache(module.config), device) == 0


def test_models_that_keep_what_they_need_elsewhere_are_refused() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "vocab_size": models.VOCABULARY}
    is_older = "past_key_values" in inspect.signature(type(module_of("llama")).forward).parameters
    # There the other one's cache lacks its states; it is refused when it is added.
    for kind in ["rwkv"] if is_older else ["rwkv", "recurrent_gemma"]:
        config = AutoConfig.for_model(kind, num_hidden_layers=3, num_attention_heads=4, **sizes)
        make: Any = AutoModelForCausalLM.from_config
        cache = _kv.new_cache(config)
        feed(make(config).eval(), cache, [5, 6, 7])
        with pytest.raises(UnsupportedError, match="elsewhere than in the cache"):
            _kv.shape_of(cache, 10)

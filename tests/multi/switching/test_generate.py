"""Models that generate, over real worker processes: what is generated does not depend on switches.

With `slice_s=0`, models take turns at each token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

import language_models as models
import switching_models
from torchrelay.errors import ArgumentError, NotFoundError, OverloadedError, UnsupportedError
from torchrelay.switching import GenerateOptions, ModelStore, Switcher, TokenStream
from waiting import eventually

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(400)

NAMES = {"llama": 0, "gpt2": 1, "gemma2": 2, "falcon_h1": 3, "bamba": 4}  # and their seeds
COUNT = 40


@pytest.fixture(scope="module")
def store() -> Iterator[ModelStore]:
    with ModelStore() as made:
        for kind, seed in NAMES.items():
            # Alone in a batch, sequences have the bits that they have in transformers.
            options = GenerateOptions(max_batch_size=1, max_context=1000)
            kwargs = {"kind": kind}
            made.add(kind, models.build, kwargs=kwargs, seed=seed, generate=options)
        made.add("many", models.build, generate=GenerateOptions(max_batch_size=3, kv_bytes=1 << 20))
        made.add("chain", switching_models.chain, inputs={"x": (torch.float32, (-1, 64))})
        yield made


def open_switcher(store: ModelStore, names: Iterable[str], **options: Any) -> Switcher:
    largest = max(store.get(name).size_bytes for name in store.names())
    known = {"workers": 1, "threads": 1, "queue_limit": 20, "start_timeout_s": 300.0}
    switcher = Switcher(store, arena_bytes=int(1.3 * largest), **{**known, **options})
    for name in names:
        switcher.load(name, timeout_s=300.0)
    return switcher


@pytest.fixture(scope="module")
def switcher(store: ModelStore) -> Iterator[Switcher]:
    with open_switcher(store, store.names(), slice_s=0.0) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[list[int], list[float]]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers have
    try:
        return {
            kind: models.continuation(kind, seed, models.prompt_of(seed), COUNT)
            for kind, seed in NAMES.items()
        }
    finally:
        torch.set_num_threads(threads)


def start(switcher: Switcher, name: str, **options: Any) -> TokenStream:
    given = {"max_tokens": COUNT, **options}
    return switcher.generate(name, models.prompt_of(NAMES.get(name, 0)), **given)


def counts(switcher: Switcher) -> dict[str, int]:
    found: dict[str, int] = switcher.status()["counts"]
    return found


def test_one_model_generates_what_transformers_does(
    switcher: Switcher, expected: dict[str, tuple[list[int], list[float]]]
) -> None:
    for name, (ids, logprobs) in expected.items():
        stream = start(switcher, name, logprobs=2)
        tokens = list(stream)
        assert [one.id for one in tokens] == ids
        assert [one.logprob for one in tokens] == logprobs  # of the same bits
        assert all(one.top_logprobs[0] == (one.id, one.logprob) for one in tokens)
        assert stream.finish_reason == "length" and not list(stream)


def test_models_that_take_turns_at_each_token_generate_the_same(
    switcher: Switcher, expected: dict[str, tuple[list[int], list[float]]]
) -> None:
    before = counts(switcher)
    streams = {name: start(switcher, name, logprobs=0) for name in NAMES}
    inputs = {"x": torch.ones(1, 64)}
    for name, stream in streams.items():
        switcher.infer("chain", inputs)  # which takes its turn, too
        tokens = list(stream)
        assert ([one.id for one in tokens], [one.logprob for one in tokens]) == expected[name]
        assert stream.recomputed_tokens == 0
    after = counts(switcher)
    assert after["recomputed_tokens"] == before["recomputed_tokens"]
    assert after["slices"] - before["slices"] >= len(NAMES)
    assert after["copied_bytes"] > before["copied_bytes"]  # the arena holds one of them


def test_a_long_prompt_passes_in_parts_wherever_it_is_interrupted(switcher: Switcher) -> None:
    prompt = models.prompt_of(5, 900)
    whole = switcher.generate("llama", prompt, max_tokens=8).ids()
    other = start(switcher, "gpt2")
    again = switcher.generate("llama", prompt, max_tokens=8)
    assert again.ids() == whole and again.recomputed_tokens == 0
    other.close()


def test_a_seed_gives_the_same_tokens_whatever_interrupts_them(switcher: Switcher) -> None:
    drawn = {"temperature": 0.9, "top_p": 0.9, "top_k": 50}
    alone = [start(switcher, "llama", seed=seed, **drawn).ids() for seed in (1, 2)]
    assert alone[0] != alone[1]
    other = start(switcher, "gpt2")
    assert start(switcher, "llama", seed=1, **drawn).ids() == alone[0]
    other.close()


def test_stashes_beyond_the_limit_are_computed_again(
    store: ModelStore, expected: dict[str, tuple[list[int], list[float]]]
) -> None:
    with open_switcher(store, NAMES, slice_s=0.0, stash_bytes=0) as switcher:
        stream = start(switcher, "llama", logprobs=0, max_tokens=900)
        tokens = [next(stream)]
        start(switcher, "gpt2", priority=1).ids()  # whose stash leaves no room for the other
        tokens += [next(stream) for _ in range(COUNT - 1)]
        assert ([one.id for one in tokens], [one.logprob for one in tokens]) == expected["llama"]
        # Unless it was done before.
        assert (stream.recomputed_tokens > 0) == (stream._sequence.slices > 1)
        stream.close()
        # All go on, although each turn lasts one step, and begins anew.
        streams = {name: start(switcher, name) for name in NAMES}
        for name, stream in streams.items():
            assert stream.ids() == expected[name][0]


def test_sequences_of_a_model_run_as_a_batch_that_they_join_and_leave(switcher: Switcher) -> None:
    """Rows of a batch may differ in their last bits from a sequence alone, which chooses the same
    token unless two are as likely.
    """
    prompts = [models.prompt_of(seed, 5 + 40 * seed) for seed in range(6)]
    alone = [switcher.generate("many", one, max_tokens=30 + len(one)).ids() for one in prompts]
    before = counts(switcher)["slices"]
    streams = [switcher.generate("many", one, max_tokens=30 + len(one)) for one in prompts]
    together = [stream.ids() for stream in streams]
    assert together == alone
    assert counts(switcher)["slices"] - before <= len(prompts)


def start_many(switcher: Switcher) -> list[TokenStream]:
    """Start sequences of which the last is not done for many seconds: they run one by one."""
    return [start(switcher, "llama", max_tokens=900) for _ in range(10)]


def test_a_higher_priority_goes_first(switcher: Switcher) -> None:
    low = start_many(switcher)
    start(switcher, "gpt2", priority=1).ids()
    assert {one["model"] for one in switcher.status()["sequences"]} == {"llama"}
    for one in low:
        one.close()


def test_sequences_that_nobody_wants_end(switcher: Switcher) -> None:
    low = start_many(switcher)
    next(low[0])
    low[-1].close()
    del low[0]
    with low[0]:
        pass
    assert low[0].finish_reason == "cancelled" and not list(low[0])
    assert len(switcher.status()["sequences"]) <= 7
    del low
    eventually(lambda: not switcher.status()["sequences"])
    assert len(start(switcher, "llama").ids()) == COUNT


def test_a_model_that_is_unloaded_ends_its_sequences(switcher: Switcher) -> None:
    *_, last = start_many(switcher)
    switcher.unload("llama")
    with pytest.raises(NotFoundError, match="'llama' was unloaded"):
        list(last)
    switcher.load("llama", timeout_s=300.0)
    assert len(start(switcher, "llama").ids()) == COUNT


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda s: s.generate("llama", []), ArgumentError, "the prompt is empty"),
        (lambda s: s.generate("llama", [200]), ArgumentError, "has the token 200; model 'llama'"),
        (lambda s: s.generate("llama", [1.5]), ArgumentError, "a list of token ids"),
        (lambda s: s.generate("llama", "text"), UnsupportedError, "'llama' has no tokenizer"),
        (lambda s: s.generate("llama", [1], stop=["x"]), UnsupportedError, "has no tokenizer"),
        (lambda s: s.generate("llama", [1], stop="x"), ArgumentError, "stop='x': it must be"),
        (lambda s: s.generate("llama", [1], stop=[""]), ArgumentError, "none of them empty"),
        (lambda s: s.generate("chain", [1]), ArgumentError, "'chain' does not generate"),
        (lambda s: s.generate("nothing", [1]), NotFoundError, "no model 'nothing'"),
        (lambda s: s.generate("llama", [1] * 1000), ArgumentError, "context length of 1000 tokens"),
        (lambda s: s.generate("llama", [1], max_tokens=1000), ArgumentError, "asks for 1000 more"),
        (lambda s: s.generate("llama", [1], max_tokens=0), ArgumentError, "max_tokens=0: it must"),
        (lambda s: s.generate("llama", [1], temperature=-1), ArgumentError, "temperature=-1"),
        (lambda s: s.generate("llama", [1], temperature=math.nan), ArgumentError, "temperature"),
        (lambda s: s.generate("llama", [1], top_p=0.0), ArgumentError, "top_p=0.0: it must"),
        (lambda s: s.generate("llama", [1], top_k=-1), ArgumentError, "top_k=-1: it must"),
        (lambda s: s.generate("llama", [1], logprobs=21), ArgumentError, "logprobs=21: it must"),
        (lambda s: s.generate("llama", [1], priority=1001), ArgumentError, "priority=1001"),
    ],
)
def test_wrong_calls_are_refused(
    switcher: Switcher, call: Callable[[Switcher], object], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        call(switcher)


def test_more_sequences_than_the_limit_are_refused(switcher: Switcher) -> None:
    streams = [start(switcher, "llama", max_tokens=900) for _ in range(20)]
    with pytest.raises(OverloadedError, match="20 sequences"):
        start(switcher, "llama")
    for one in streams:
        one.close()


def test_models_that_do_not_generate_are_refused() -> None:
    with ModelStore() as store:
        with pytest.raises(UnsupportedError, match="only causal language models of transformers"):
            store.add("chain", switching_models.chain, generate=True)
        with pytest.raises(ArgumentError, match="name a factory"):
            store.add("chain", inputs={"x": (torch.float32, (-1, 64))})
        with pytest.raises(ArgumentError, match="max_batch_size=0"):
            store.add("llama", models.build, generate=GenerateOptions(max_batch_size=0))

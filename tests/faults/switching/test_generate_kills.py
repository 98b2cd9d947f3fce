"""Workers that die while they generate: sequences go on from their stashes, and no token comes
twice.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
import torch

import language_models as models
from torchrelay.errors import ModelError, PeerLostError
from torchrelay.switching import GenerateOptions, ModelStore, Switcher
from waiting import eventually

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(400)

COUNT = 120


@pytest.fixture(scope="module")
def switcher() -> Iterator[Switcher]:
    with ModelStore() as store:
        alone = GenerateOptions(max_batch_size=1)
        store.add("one", models.build, seed=1, generate=alone)
        store.add("two", models.build, kwargs={"kind": "bamba"}, seed=2, generate=alone)
        store.add("faulty", models.build_faulty, generate=GenerateOptions(max_batch_size=4))
        with Switcher(
            store,
            arena_bytes=int(1.3 * store.get("one").size_bytes),
            workers=2,
            threads=1,
            slice_s=0.005,
            start_timeout_s=300.0,
        ) as made:
            for name in store.names():
                made.load(name, timeout_s=300.0)
            yield made


def kill(switcher: Switcher) -> None:
    """Kill the worker that generates, if there is one."""
    for one in switcher.status()["workers"]:
        if one["state"] == "generating":
            os.kill(one["pid"], signal.SIGKILL)


def test_sequences_go_on_in_another_worker_with_the_same_bits(switcher: Switcher) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers have
    seeds = {"one": ("llama", 1), "two": ("bamba", 2)}
    prompts = {name: models.prompt_of(seed, 30) for name, (_, seed) in seeds.items()}
    expected = {
        name: models.continuation(kind, seed, prompts[name], COUNT)
        for name, (kind, seed) in seeds.items()
    }
    torch.set_num_threads(threads)
    streams = {
        name: switcher.generate(name, prompt, max_tokens=COUNT, logprobs=0)
        for name, prompt in prompts.items()
    }
    for name, stream in streams.items():
        tokens = []
        for index, token in enumerate(stream):
            tokens.append(token)
            if index == 2 or (name == "one" and index == COUNT - 9):
                kill(switcher)
        ids, logprobs = expected[name]
        assert [one.id for one in tokens] == ids
        assert [one.logprob for one in tokens] == logprobs


def test_what_kills_its_worker_fails_and_nothing_beside_it(switcher: Switcher) -> None:
    """A prompt with one token kills the worker, one with another raises."""
    good = models.prompt_of(0, 12)
    alone = switcher.generate("faulty", good, max_tokens=30).ids()
    streams = [switcher.generate("faulty", one, max_tokens=30) for one in (good, [5, 1], [6, 0])]
    assert streams[0].ids() == alone
    with pytest.raises(PeerLostError, match="was killed by SIGKILL while it generated with"):
        streams[1].ids()
    with pytest.raises(ModelError, match="asked to fail"):
        streams[2].ids()
    assert switcher.generate("faulty", good, max_tokens=30).ids() == alone


def test_nothing_is_left_of_sequences_that_ended(switcher: Switcher) -> None:
    eventually(lambda: not switcher.status()["sequences"])
    listed = subprocess.check_output(["ls", "-l", f"/proc/{os.getpid()}/fd"], text=True)
    assert "torchrelay" in listed and "torchrelay-stash" not in listed

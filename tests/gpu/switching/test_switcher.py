"""The switcher on a real GPU; the same path runs against a fake driver in tests/multi/switching."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import switching_models as models
from torchrelay.errors import CapacityError, ModelError, PeerLostError
from torchrelay.switching import ModelStore, Switcher

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WAIT_S = 300.0
NAMES = ("chain0", "chain1", "chain2")
WIDTH, DEPTH = 200, 6  # 0.96 MB: two of the three fit an arena of one granule


@pytest.fixture(scope="module")
def switcher() -> Iterator[Switcher]:
    with ModelStore() as store:
        for seed, name in enumerate(NAMES):
            kwargs = {"width": WIDTH, "depth": DEPTH}
            inputs: dict[str, Any] = {"x": (torch.float32, (-1, WIDTH))}
            store.add(name, models.chain, kwargs=kwargs, inputs=inputs, seed=seed)
        inputs = {"x": (torch.float32, (1, 4)), "what": (torch.int64, ())}
        store.add("faulty", models.faulty, inputs=inputs)
        large = {"width": 1000, "depth": 2}
        store.add("large", models.chain, kwargs=large, inputs={"x": (torch.float32, (-1, 1000))})
        with Switcher(
            store, arena_bytes=2 << 20, device="cuda", grouping="layer", start_timeout_s=WAIT_S
        ) as made:
            for name in (*NAMES, "faulty"):
                made.load(name)
            yield made


def test_random_switches_have_the_bits_of_unswitched_models(switcher: Switcher) -> None:
    references = {}
    for seed, name in enumerate(NAMES):
        torch.manual_seed(seed)
        references[name] = models.chain(width=WIDTH, depth=DEPTH).eval().cuda()
    draw = random.Random(1)
    copied = []
    for _ in range(200):
        name = draw.choice(NAMES)
        x = torch.randn(draw.randint(1, 4), WIDTH)
        reply = switcher.submit(name, {"x": x}).result(WAIT_S)
        with torch.inference_mode():
            assert torch.equal(reply.outputs["output"], references[name](x.cuda()).cpu())
        copied.append(reply.copied_bytes)
    assert min(copied) == 0 < max(copied)


def test_a_killed_worker_is_replaced_and_a_large_model_refused(switcher: Switcher) -> None:
    with pytest.raises(PeerLostError, match="SIGKILL"):
        switcher.infer("faulty", {"x": torch.ones(1, 4), "what": torch.tensor(2)})
    with pytest.raises(ModelError):  # it writes to its weights, which breaks the worker's context
        switcher.infer("faulty", {"x": torch.ones(1, 4), "what": torch.tensor(3)})
    x = {"x": torch.ones(1, 4), "what": torch.tensor(0)}
    assert switcher.infer("faulty", x)["output"].shape == (1, 4)
    with pytest.raises(CapacityError, match="larger arena"):
        switcher.load("large")

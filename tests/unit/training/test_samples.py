"""Samples are dealt to members that change: each is taken once in an epoch."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch

from torchrelay.errors import ArgumentError
from torchrelay.training import Elastic, ElasticLoader


class FakeStep:
    """What a loader needs of a step."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.samples = rank, size, 1
        self.callbacks: list[Any] = []

    def on_commit(self, function: Any) -> None:
        self.callbacks.append(function)


@pytest.mark.parametrize(("workers", "shuffle"), [(0, True), (0, False), (1, True)])
def test_each_sample_is_taken_once_whatever_happens(workers: int, shuffle: bool) -> None:
    rng = random.Random(workers)
    data = torch.utils.data.TensorDataset(torch.arange(23))
    loaders = [
        ElasticLoader(data, 5, shuffle=shuffle, seed=3, num_workers=workers)
        for _ in range(2 if workers else 4)
    ]
    taken: list[int] = []
    size = len(loaders)
    orders: list[list[int]] = []
    while len(orders) < (1 if workers else 3):
        if rng.random() < 0.3:
            size = rng.randrange(1, len(loaders) + 1)
            for loader in loaders[1:]:  # those that come get the position
                loader.load_state_dict(loaders[0].state_dict())
        steps: list[Any] = [FakeStep(rank, size) for rank in range(size)]
        batches = [loader.take(step) for loader, step in zip(loaders, steps, strict=False)]
        parts = [[] if batch is None else batch[0].tolist() for batch in batches]
        assert [step.samples for step in steps] == [len(part) for part in parts]
        if rng.random() < 0.3:
            continue  # the step is not committed
        for step in steps:
            for commit in step.callbacks:
                commit()
        taken += [one for part in parts for one in part]
        if len(taken) == 23:
            assert sorted(taken) == list(range(23))
            orders.append(taken)
            taken = []
    del loaders, loader, steps, step, commit
    gc.collect()  # which ends the workers
    assert not shuffle or orders[0] != sorted(orders[0])


def test_a_step_has_one_batch() -> None:
    loader, step = ElasticLoader([1, 2, 3], 1), FakeStep(0, 1)
    loader.take(step)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="make batch_size larger"):
        loader.take(step)  # type: ignore[arg-type]


def test_what_cannot_be_dealt_is_refused() -> None:
    with pytest.raises(ArgumentError, match="batch_size"):
        ElasticLoader([1], 0)
    with pytest.raises(TypeError, match="no option"):
        ElasticLoader([1], 1, sampler=None)


def test_states_that_a_new_member_could_not_get_are_refused_at_once() -> None:
    class Odd:
        def state_dict(self) -> Any:
            return {"when": [1, {2j}]}

        def load_state_dict(self, state: Any) -> None: ...

    model: Any = torch.nn.Linear(1, 1)
    with pytest.raises(ArgumentError, match=r"\['odd'\]\['when'\]\[1\] is a set, which cannot"):
        Elastic({"model": model, "odd": Odd()})
    with pytest.raises(ArgumentError, match="data is a list without state_dict"):
        Elastic({"model": model}, local={"data": [1]})  # type: ignore[dict-item]

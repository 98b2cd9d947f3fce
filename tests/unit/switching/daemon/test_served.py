"""The states of a model that is served: every way through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch

import switching_models as models
from torchrelay.errors import ModelError, NotFoundError
from torchrelay.switching import ModelStore, StoredModel
from torchrelay.switching.daemon._served import Served, State
from torchrelay.switching.models._layout import Grouped
from torchrelay.switching.worker._profile import Output, Profile

PROFILE = Profile(outputs=(Output("output", "float32", 2),))
FAILED, REMOVED = ModelError("no such layer"), NotFoundError("was unloaded")


@pytest.fixture(scope="module")
def model() -> Iterator[StoredModel]:
    with ModelStore() as store:
        yield store.add("chain", models.chain, inputs={"x": torch.ones(1, 64)})


def split(model: StoredModel) -> Grouped:
    storages = range(len(model.layout.storages))
    return Grouped(model.layout, tuple((one,) for one in storages))


def way(served: Served, *, is_known: bool, is_split: bool) -> Iterator[State]:
    """Yield the states of a model until it is READY, and what it would be without a failure."""
    yield served.state
    if not is_known:
        served.built()
        yield served.state
        served.profile = PROFILE
        served.regroup(split(served.model) if is_split else served.grouped)
        yield served.state
    if served.state is State.LOADING:
        served.built()
        yield served.state


@pytest.mark.parametrize(("is_known", "is_split"), list(product((False, True), repeat=2)))
def test_a_model_is_ready_once_it_is_built_in_the_groups_of_its_profile(
    model: StoredModel, is_known: bool, is_split: bool
) -> None:
    whole = Grouped.one_group(model.layout)
    served = Served(model, whole, 0, PROFILE if is_known else None)
    names = [state.name for state in way(served, is_known=is_known, is_split=is_split)]
    expected = ["LOADING"] if is_known else ["LOADING", "PROFILING"]
    expected += ["LOADING", "READY"] if is_split and not is_known else ["READY"]
    assert names == expected
    assert served.ready.result(0) is None and served.error is None
    assert served.outputs == PROFILE.outputs and not served.is_new
    assert served.key == (model.version, int(is_split and not is_known))


@pytest.mark.parametrize("end", ["fail", "leave"])
def test_a_model_may_fail_or_leave_in_each_state(model: StoredModel, end: str) -> None:
    ends: dict[str, Callable[[Served], None]] = {
        "fail": lambda served: served.fail(FAILED),
        "leave": lambda served: served.leave(REMOVED),
    }
    for steps in range(4):
        served = Served(model, Grouped.one_group(model.layout), 0)
        states = way(served, is_known=False, is_split=True)
        for _ in range(steps + 1):
            state = next(states)
        ends[end](served)
        assert served.state is (State.FAILED if end == "fail" else State.LEAVING)
        if state is State.READY:
            assert served.ready.exception(0) is None
        else:
            assert served.ready.exception(0) is (FAILED if end == "fail" else REMOVED)
        served.leave(REMOVED)
        assert served.state is State.LEAVING

"""No answer is computed from bytes that were not the model's, however it reads its weights."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

import switching_models
import weight_reads
from torchrelay.switching import ModelStore, Switcher
from torchrelay.switching.device._contract import align
from torchrelay.switching.models._store import StoredModel

pytestmark = pytest.mark.timeout(400)

WAIT_S = 300.0
REQUESTS = 80


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers have
    yield
    torch.set_num_threads(before)


def pages_of(model: StoredModel) -> int:
    """The bytes of the pages that the model takes if each layer is a group."""
    return sum(align(size_bytes, 4096) for size_bytes in model.layout.storages)


def slow_switcher(
    store: ModelStore, models: float, link_gbps: float = 0.002, grouping: str = "layer"
) -> Switcher:
    """A switcher whose arena holds so many models, over a link on which a copy takes long."""
    largest = max(pages_of(store.get(name)) for name in store.names())
    switcher = Switcher(
        store,
        arena_bytes=int(models * largest),
        workers=1,
        threads=1,
        request_bytes=1 << 20,
        link_gbps=link_gbps,
        grouping=grouping,
        start_timeout_s=WAIT_S,
    )
    for name in store.names():
        switcher.load(name, timeout_s=WAIT_S)
    return switcher


@pytest.mark.parametrize(("seed", "grouping"), [(0, "layer"), (100, "layer"), (200, "one")])
def test_random_modules_answer_as_copies_that_nobody_switches(
    one_thread: None, seed: int, grouping: str
) -> None:
    with ModelStore() as store:
        copies = {
            f"model{index}": weight_reads.add(store, f"model{index}", seed + index, index == 3)
            for index in range(4)
        }
        draw = random.Random(seed)
        with slow_switcher(store, 1.6, grouping=grouping) as switcher:
            cold = 0
            for _ in range(REQUESTS):
                name, given = draw.choice(sorted(copies)), weight_reads.inputs(draw)
                reply = switcher.submit(name, given).result(WAIT_S)
                with torch.no_grad():
                    assert torch.equal(copies[name](**given), reply.outputs["output"]), given
                cold += bool(reply.copied_bytes)
            assert REQUESTS > cold > REQUESTS // 4
            # Another thread's read of what has not arrived ends its worker, once for each model.
            assert switcher.status()["worker_deaths"] <= (grouping == "layer")


def other(name: str) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(1, 64), "program": torch.tensor(int(name == "raw"))}


def test_a_read_that_no_operator_makes_is_never_of_bytes_that_have_not_arrived(
    one_thread: None,
) -> None:
    inputs = {"x": (torch.float32, (-1, 64)), "program": (torch.int64, ())}
    with ModelStore() as store:
        store.add("raw", weight_reads.raw, inputs=inputs, seed=1)
        store.add("other", weight_reads.raw, inputs=inputs, seed=2)
        torch.manual_seed(1)
        copy = weight_reads.raw()
        with torch.no_grad():
            expected = copy(**other("raw"))
        with slow_switcher(store, 1.0, link_gbps=0.0002) as switcher:

            def ask() -> int:
                switcher.infer("other", other("other"))
                got = switcher.infer("raw", other("raw"))["output"]
                assert torch.equal(got, expected)
                deaths: int = switcher.status()["worker_deaths"]
                return deaths

            # The read ends the worker, unless that starts so late that all bytes have arrived.
            assert any(ask() for _ in range(20))
            # Requests to the model then wait for all of it.
            assert [ask() for _ in range(3)] == [1] * 3


@pytest.mark.parametrize(("grouping", "bears"), [("layer", 1), ("layer", 0), ("one", 1)])
def test_operators_wait_only_for_one_of_several_groups(
    one_thread: None, grouping: str, bears: int
) -> None:
    waits = grouping == "layer" and bears > 0  # a model that fails while they wait is one group
    with ModelStore() as store:
        for seed, name in enumerate(("first", "second")):
            inputs, kwargs = {"x": (torch.float32, (-1, 64))}, {"bears": bears}
            store.add(name, switching_models.watching, kwargs=kwargs, inputs=inputs, seed=seed)
        with slow_switcher(store, 1.1, grouping=grouping) as switcher:
            for name in ("first", "second", "first"):
                cold, resident = (
                    switcher.submit(name, {"x": torch.ones(1, 64)}).result(WAIT_S) for _ in range(2)
                )
                assert torch.equal(cold.outputs["output"], resident.outputs["output"])
                assert cold.copied_bytes > 0 == resident.copied_bytes
                assert cold.outputs["modes"].item() == waits
                assert resident.outputs["modes"].item() == 0


@pytest.mark.parametrize("grouping", ["layer", "one"])
def test_what_a_model_keeps_of_its_weights_stays_right_over_switches(
    one_thread: None, grouping: str
) -> None:
    """Views, weak references, and forms that are cached by a weight's address."""
    inputs = {"x": (torch.float32, (-1, 64)), "program": (torch.int64, ())}
    with ModelStore() as store:
        copies: dict[str, torch.nn.Module] = {}
        for seed, kind in enumerate(("keeper", "keeper", "referrer", "preparer", "preparer")):
            name = f"{kind}{seed}"
            store.add(name, getattr(weight_reads, kind), inputs=inputs, seed=seed)
            torch.manual_seed(seed)
            copies[name] = getattr(weight_reads, kind)()
        with slow_switcher(store, 1.1, link_gbps=0.1, grouping=grouping) as switcher:
            draw = random.Random(7)
            cold = 0
            for _ in range(REQUESTS):
                name = draw.choice(sorted(copies))
                reply = switcher.submit(name, other("other")).result(WAIT_S)
                expected = weight_reads.answer(copies[name], other("other"))
                assert torch.equal(expected, reply.outputs["output"])
                cold += bool(reply.copied_bytes)
            assert cold > REQUESTS // 4 and switcher.status()["worker_deaths"] == 0

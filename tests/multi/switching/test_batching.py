"""Requests that run as one: each gets its own rows, and its own error."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError, Future

import pytest
import torch

import switching_models as models
from torchrelay.errors import ArgumentError, ModelError, NotFoundError, PeerLostError
from torchrelay.switching import ModelStore, Reply, Switcher
from waiting import eventually

pytestmark = pytest.mark.timeout(400)

WAIT_S = 300.0
INPUTS = {"x": (torch.float32, (-1, -1))}


@pytest.fixture(scope="module")
def switcher() -> Iterator[Switcher]:
    with ModelStore() as store:
        # A delay that no test waits for: a batch starts when it is full.
        batches = {"max_batch_size": 4, "max_delay_us": 3600 * 10**6}
        store.add("rows", models.rows, inputs=INPUTS, **batches)  # type: ignore[arg-type]
        store.add("eager", models.rows, inputs=INPUTS, max_batch_size=4)
        store.add("single", models.rows, inputs=INPUTS)
        with Switcher(store, arena_bytes=1 << 20, request_bytes=1 << 20, threads=1) as made:
            for name in store.names():
                made.load(name, timeout_s=WAIT_S)
            yield made


def ask(switcher: Switcher, first: float, rows: int = 1, width: int = 8) -> Future[Reply]:
    x = torch.full((rows, width), first)
    return switcher.submit("rows", {"x": x})


def check(future: Future[Reply], first: float, batch: int, rows: int = 1, width: int = 8) -> None:
    outputs = future.result(WAIT_S).outputs
    assert torch.equal(outputs["scaled"], torch.full((rows, width), 3 * first))
    assert outputs["rows"].tolist() == [batch] * rows


def test_requests_of_equal_shape_run_as_one(switcher: Switcher) -> None:
    narrow = [ask(switcher, float(index)) for index in range(3)]
    wide = [ask(switcher, float(index), width=16) for index in range(4)]  # full first
    for index, future in enumerate(wide):
        check(future, index, 4, width=16)
    assert not any(future.done() for future in narrow)
    check(ask(switcher, 7.0), 7.0, 4)
    for index, future in enumerate(narrow):
        check(future, index, 4)
    assert switcher.status()["switches"][0]["requests"] == 4


def test_requests_of_several_rows_fill_a_batch(switcher: Switcher) -> None:
    three, two, one = ask(switcher, 1.0, 3), ask(switcher, 2.0, 2), ask(switcher, 3.0)
    check(three, 1.0, 4, rows=3)
    check(one, 3.0, 4)
    assert not two.done()  # five rows are too many
    check(ask(switcher, 4.0, 2), 4.0, 4, rows=2)
    check(two, 2.0, 4, rows=2)
    check(ask(switcher, 5.0, 9), 5.0, 9, rows=9)  # larger than any batch: by itself


def test_each_request_has_its_own_error(switcher: Switcher) -> None:
    futures = [ask(switcher, first) for first in (1.0, -1.0, 2.0, -1.0)]
    for index in (1, 3):
        with pytest.raises(ModelError, match="asked to fail"):
            futures[index].result(WAIT_S)
    check(futures[0], 1.0, 1)  # again, by itself
    check(futures[2], 2.0, 1)


def test_a_request_that_kills_its_worker_fails_alone(switcher: Switcher) -> None:
    futures = [ask(switcher, first) for first in (1.0, -2.0, 2.0, 3.0)]
    with pytest.raises(PeerLostError, match="while it ran model 'rows'"):
        futures[1].result(WAIT_S)
    check(futures[0], 1.0, 1)
    check(futures[3], 3.0, 1)


def test_a_batch_that_cannot_be_merged_runs_one_by_one(
    switcher: Switcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cat(tensors: object) -> None:
        raise RuntimeError("not enough memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", cat)
        futures = [ask(switcher, float(index)) for index in range(4)]
        for index, future in enumerate(futures):
            check(future, index, 1)


def test_what_cannot_be_split_is_an_error(switcher: Switcher) -> None:
    futures = [ask(switcher, first) for first in (-3.0, 1.0, 2.0, 3.0)]
    for future in futures:
        with pytest.raises(ModelError, match=r"has the shape \(\) for a batch of 4, and cannot"):
            future.result(WAIT_S)


def test_a_deadline_ends_the_wait_for_others(switcher: Switcher) -> None:
    inputs = {"x": torch.full((1, 8), 2.0)}
    waiting = ask(switcher, 1.0)
    urgent = switcher.submit("rows", inputs, deadline_s=WAIT_S)
    check(waiting, 1.0, 2)
    check(urgent, 2.0, 2)


def test_a_cancelled_request_takes_no_place(switcher: Switcher) -> None:
    futures = [ask(switcher, float(index)) for index in range(3)]
    assert futures[1].cancel()
    with pytest.raises(CancelledError):
        futures[1].result(WAIT_S)
    eventually(lambda: len(switcher.status()["queue"]) == 2)
    futures += [ask(switcher, 3.0), ask(switcher, 4.0)]
    for index in (0, 2, 3, 4):
        check(futures[index], index, 4)


def test_a_batch_cancelled_as_it_starts_harms_nobody(
    switcher: Switcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the cancelling threads had not taken their requests off the queue yet.
    monkeypatch.setattr(switcher._daemon, "forget", lambda request: None)
    futures = [ask(switcher, float(index)) for index in range(3)]
    assert all(future.cancel() for future in futures)
    monkeypatch.setattr(switcher._daemon.dispatcher, "fills_batches", False)  # starts them
    assert switcher.infer("single", {"x": torch.ones(1, 8)})["rows"].tolist() == [1]
    assert switcher.failure is None and not switcher.status()["queue"]


def test_without_a_delay_only_what_waits_anyway_is_joined(switcher: Switcher) -> None:
    x = torch.ones(1, 8)
    assert switcher.infer("eager", {"x": x})["rows"].tolist() == [1]
    futures = [switcher.submit("eager", {"x": x}) for _ in range(20)]
    sizes = [future.result(WAIT_S).outputs["rows"].tolist() for future in futures]
    assert all(size in ([1], [2], [3], [4]) for size in sizes)
    futures = [switcher.submit("single", {"x": x}) for _ in range(20)]
    assert all(future.result(WAIT_S).outputs["rows"].tolist() == [1] for future in futures)


def test_what_cannot_be_batched_is_refused() -> None:
    with ModelStore() as store:
        with pytest.raises(ArgumentError, match="first size of each of its inputs must be -1"):
            store.add("x", models.rows, inputs={"x": torch.ones(1, 8)}, max_batch_size=4)
        for wrong in ({"max_batch_size": -1}, {"max_delay_us": -1}):
            with pytest.raises(ArgumentError, match="must be at least 0"):
                store.add("x", models.rows, inputs=INPUTS, **wrong)  # type: ignore[arg-type]


@pytest.fixture
def closing() -> Iterator[Switcher]:
    with ModelStore() as store:
        batches = {"max_batch_size": 4, "max_delay_us": 3600 * 10**6}
        store.add("rows", models.rows, inputs=INPUTS, **batches)  # type: ignore[arg-type]
        with Switcher(
            store, arena_bytes=1 << 20, request_bytes=1 << 20, threads=1, workers=1
        ) as made:
            made.load("rows", timeout_s=WAIT_S)
            yield made


def test_batches_that_wait_are_answered_when_the_switcher_closes(closing: Switcher) -> None:
    futures = [ask(closing, 1.0), ask(closing, 2.0)]
    closing.close(grace_s=WAIT_S)
    check(futures[0], 1.0, 2)
    check(futures[1], 2.0, 2)


def test_requests_of_a_failed_batch_are_answered_when_the_switcher_closes(
    closing: Switcher,
) -> None:
    futures = [ask(closing, first) for first in (1.0, -1.0, 2.0)]
    closing.close(grace_s=WAIT_S)
    check(futures[0], 1.0, 1)
    check(futures[2], 2.0, 1)
    with pytest.raises(ModelError, match="asked to fail"):
        futures[1].result(WAIT_S)


def test_a_model_that_is_unloaded_while_its_batch_fails_ends_alone(closing: Switcher) -> None:
    futures = [ask(closing, first) for first in (1.0, -4.0, 2.0, 3.0)]
    eventually(lambda: not closing.status()["queue"])
    closing.unload("rows")
    errors = [future.exception(WAIT_S) for future in futures]
    assert isinstance(errors[1], ModelError | NotFoundError)
    closing.load("rows", timeout_s=WAIT_S)
    check(ask(closing, 1.0, 4), 1.0, 4, rows=4)

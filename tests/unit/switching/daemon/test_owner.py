"""The thread that owns the daemon's state: what others post to it, and its end."""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from torchrelay.errors import UnavailableError
from torchrelay.switching.daemon._owner import Owner, OwnersFuture

WAIT_S = 60.0


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner(lambda: math.inf, lambda error: None)
    made.start()
    yield made
    made.post(made.stop)
    made.join()


def test_what_is_posted_runs_in_order_in_one_thread_with_a_decision_after_each() -> None:
    done: list[tuple[object, int]] = []

    def decide() -> float:
        done.append(("decision", threading.get_ident()))
        return math.inf

    owner = Owner(decide, lambda error: None)
    owner.start()
    for count in range(3):
        owner.post(lambda count=count: done.append((count, threading.get_ident())))  # type: ignore[misc]
    assert owner.call(lambda: len(done)) == 7
    decision = "decision"
    assert [one for one, _ in done[:7]] == [decision, 0, decision, 1, decision, 2, decision]
    assert len({thread for _, thread in done}) == 1
    owner.post(owner.stop)
    owner.join()


def test_a_decision_is_made_when_it_is_due() -> None:
    moments: list[float] = []
    decided = threading.Event()

    def decide() -> float:
        moments.append(time.monotonic())
        if len(moments) == 2:
            decided.set()
        return moments[0] + 0.01 if len(moments) == 1 else math.inf

    owner = Owner(decide, lambda error: None)
    owner.start()
    assert decided.wait(WAIT_S)
    owner.post(owner.stop)
    owner.join()


def test_an_error_of_a_call_is_the_callers_and_one_of_an_event_ends_the_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: failures.append(args.exc_value))
    crashes: list[Exception] = []

    def crashed(error: Exception) -> None:
        crashes.append(error)
        raise RuntimeError("and another one")

    def fail() -> None:
        raise mistake

    mistake = ValueError("a mistake")
    owner = Owner(lambda: math.inf, crashed)
    owner.start()
    with pytest.raises(ValueError, match="a mistake"):
        owner.call(fail)
    assert owner.call(lambda: 1) == 1
    owner.post_event(fail)
    owner.join()
    assert crashes == failures == [mistake]
    owner.post_event(fail)  # of what is over, nothing happens
    with pytest.raises(UnavailableError, match="closed"):
        owner.call(lambda: 1)


def test_nobody_waits_for_an_owner_that_ends_meanwhile() -> None:
    for _ in range(30):
        owner = Owner(lambda: math.inf, lambda error: None)
        owner.start()
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(call_until_the_end, owner) for _ in range(4)]
            owner.post(owner.stop)
            for call in calls:
                call.result(WAIT_S)
        owner.join()


def call_until_the_end(owner: Owner) -> None:
    while True:
        try:
            assert owner.call(lambda: 1) == 1
        except UnavailableError:
            return


def test_a_callback_runs_outside_of_the_owners_thread_and_may_wait_for_it(owner: Owner) -> None:
    future, values = OwnersFuture[int](owner), list[int]()
    reported: Future[int] = Future()

    def callback(done: Future[int]) -> None:
        assert not owner.is_own_thread
        values.append(done.result())
        values.append(owner.call(lambda: 2))
        reported.set_result(3)

    future.when_done(lambda _: values.append(0) if owner.is_own_thread else None)
    future.add_done_callback(lambda done: done.nothing)  # type: ignore[attr-defined] # logged
    future.add_done_callback(callback)
    owner.post(lambda: future.set_result(1))
    reported.result(WAIT_S)
    assert values == [0, 1, 2]


def test_only_coroutines_may_not_wait(owner: Owner) -> None:
    future = OwnersFuture[int](owner)

    async def guest() -> int:
        with pytest.raises(UnavailableError, match=r"await submit\(\)"):
            owner.check_can_wait()
        assert owner.call(lambda: 1) == owner.read(lambda: 1) == 1
        owner.post(lambda: future.set_result(4))
        return await future

    owner.check_can_wait()
    assert owner.run(guest()).result(WAIT_S) == 4


def test_a_forked_process_is_refused(owner: Owner) -> None:
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process with threads
        child = os.fork()
    if not child:
        try:
            owner.call(lambda: 1)
        except UnavailableError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert b"this one was forked" in pipe.read()
    assert owner.call(lambda: 1) == 1

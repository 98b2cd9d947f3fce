"""The event loop: who may wait, and what is reported."""

from __future__ import annotations

import math
import signal
import threading

import pytest

from torchrelay.errors import UnavailableError
from torchrelay.switching._loop import Loop


def test_results_are_reported_though_ctrl_c_ends_the_loop_in_a_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: failures.append(args.exc_value))
    reported: list[str] = []
    interrupted = KeyboardInterrupt()

    def crashed(error: BaseException) -> None:
        loop.later(lambda: reported.append("failed"))
        loop.stop()

    def interrupt() -> float:
        raise interrupted

    loop = Loop(lambda: math.inf, crashed)
    loop.start()
    loop.decide = interrupt
    with pytest.raises(KeyboardInterrupt):
        loop.call(lambda: loop.later(lambda: reported.append("done")))
    assert reported == ["done", "failed"]
    loop.join()
    assert failures == [interrupted]


def test_results_are_reported_though_ctrl_c_ends_the_report_of_another() -> None:
    reported: list[str] = []

    def report_two() -> None:
        loop.later(interrupt)
        loop.later(lambda: reported.append("done"))

    def interrupt() -> None:
        raise KeyboardInterrupt

    loop = Loop(lambda: math.inf, lambda error: None)
    loop.start()
    with pytest.raises(KeyboardInterrupt):
        loop.call(report_two)
    assert reported == ["done"]
    loop.call(loop.stop)
    loop.join()


@pytest.mark.timeout(60)
def test_a_signal_handler_in_the_middle_of_a_call_is_refused() -> None:
    refusals: list[str] = []

    def handle(*_: object) -> None:
        for call in (lambda: loop.call(lambda: None), loop.check_can_wait):
            try:
                call()
            except UnavailableError as error:
                refusals.append(str(error))

    loop = Loop(lambda: math.inf, lambda error: None)
    loop.start()
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        loop.call(lambda: signal.raise_signal(signal.SIGUSR1))
        assert len(refusals) == 2 and all("start a thread" in one for one in refusals)
        signal.raise_signal(signal.SIGUSR1)
        assert len(refusals) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)
    loop.call(loop.stop)
    loop.join()


def test_a_thread_that_others_wait_for_may_not_wait() -> None:
    refusals: list[str] = []

    def wait() -> None:
        try:
            loop.check_can_wait()
        except UnavailableError as error:
            refusals.append(str(error))

    def wait_around_a_call() -> None:
        wait()
        loop.call(lambda: loop.later(wait))
        wait()

    async def guest() -> None:
        wait()

    loop = Loop(lambda: math.inf, lambda error: None)
    loop.start()
    loop.call(lambda: loop.later(wait_around_a_call))
    loop.run(guest()).result(60)
    assert len(refusals) == 4 and all("use submit()" in one for one in refusals)
    wait()
    loop.call(loop.stop)
    loop.join()
    assert len(refusals) == 4

"""The order in which waiting requests are served."""

from __future__ import annotations

from concurrent.futures import wait

from torchrelay.errors import UnavailableError
from torchrelay.switching.daemon._queue import Request, RequestQueue


def test_requests_with_deadlines_do_not_hold_back_one_without_for_ever() -> None:
    queue = RequestQueue(100)
    patient = Request("a", {}, arrived=1000.0)
    queue.push(patient)
    queue.push(Request("b", {}, deadline=1001.0, arrived=1000.5))
    assert list(queue)[1] is patient
    late = Request("b", {}, deadline=1012.0, arrived=1011.0)
    queue.push(late)
    assert [one for one in list(queue) if one in (patient, late)] == [patient, late]
    urgent = Request("b", {}, priority=1, arrived=1020.0)
    queue.push(urgent)
    assert next(iter(queue)) is urgent
    assert queue.next_deadline == 1001.0


def test_a_cancelled_request_wakes_those_that_wait_for_several_once() -> None:
    request = Request("a", {})
    assert request.future.cancel()
    for _ in range(2):  # the thread that cancelled it, and one that would run it
        assert not request.claim()
    request.fail(UnavailableError("closed"))
    assert wait([request.future], 0).done == {request.future}


def test_of_two_errors_the_first_counts() -> None:
    request, first = Request("a", {}), UnavailableError("first")
    assert request.claim() and request.claim()  # it runs again
    request.fail(first)
    request.fail(UnavailableError("second"))
    request.succeed("late")
    assert request.future.exception() is first

"""The order in which waiting requests are served."""

from __future__ import annotations

from torchrelay.switching._queue import Request, RequestQueue


def test_requests_with_deadlines_do_not_hold_back_one_without_for_ever() -> None:
    queue = RequestQueue(100, 100)
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

"""The order in which waiting requests are served."""

from __future__ import annotations

from concurrent.futures import Future

from torchrelay.switching._queue import Request, RequestQueue


def test_requests_with_deadlines_do_not_hold_back_one_without_for_ever() -> None:
    queue = RequestQueue(100, 100)
    patient = Request("a", {}, Future(), arrived=1000.0)
    queue.push(patient)
    queue.push(Request("b", {}, Future(), deadline=1001.0, arrived=1000.5))
    assert queue.ordered()[1] is patient
    late = Request("b", {}, Future(), deadline=1012.0, arrived=1011.0)
    queue.push(late)
    assert [one for one in queue.ordered() if one in (patient, late)] == [patient, late]
    urgent = Request("b", {}, Future(), priority=1, arrived=1020.0)
    queue.push(urgent)
    assert queue.ordered()[0] is urgent
    assert queue.next_deadline() == 1001.0

"""Which requests reach the worker together, to run one after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from torchrelay.switching._batching import gather_series
from torchrelay.switching._queue import Request
from torchrelay.switching._served import SERIES_S, Served

LIMIT = 1 << 20


def request(model: str, **more: Any) -> Request:
    return Request(model, {"x": torch.ones(1, 8)}, **more)


def test_a_series_ends_at_the_first_request_to_another_model() -> None:
    waiting = [request("a"), request("a"), request("b"), request("a")]
    assert gather_series(waiting[0], waiting, 8, LIMIT) == waiting[:2]


def test_a_series_is_bounded_in_requests_and_bytes() -> None:
    waiting = [request("a") for _ in range(6)]
    assert gather_series(waiting[0], waiting, 4, LIMIT) == waiting[:4]
    assert gather_series(waiting[0], waiting, 8, 3 * 512) == waiting[:3]
    assert gather_series(waiting[0], waiting, 0, LIMIT) == waiting[:1]


def test_a_request_that_failed_in_a_series_and_a_profile_run_alone() -> None:
    for more in ({"is_alone": True}, {"is_profile": True}):
        special, plain = request("a", **more), request("a")
        assert gather_series(special, [special, plain], 8, LIMIT) == [special]
        assert gather_series(plain, [plain, special], 8, LIMIT) == [plain]


def test_a_model_runs_in_series_once_it_has_been_short_for_a_while() -> None:
    served = Served(cast(Any, SimpleNamespace()), cast(Any, None), 0)
    assert served.series == 1
    for _ in range(50):
        served.took(SERIES_S / 10)
    assert served.series == 10
    served.took(5.0)  # a slow run: alone, until many have been short
    for _ in range(20):
        assert served.series == 0
        served.took(SERIES_S / 10)

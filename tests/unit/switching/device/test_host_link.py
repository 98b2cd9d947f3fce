"""The emulated link: copies arrive, and no sooner than on a link of its rate."""

from __future__ import annotations

import types

import pytest
import torch

from torchrelay.switching.device import _host
from torchrelay.switching.device._contract import Copy
from torchrelay.switching.device._host import HostLink


class Clock(types.SimpleNamespace):
    """A clock that only sleeping moves."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(_host, "time", made)
    return made


def copies(*sizes: int) -> list[Copy]:
    return [
        Copy(torch.full((size,), index + 1, dtype=torch.uint8), 512 * index)
        for index, size in enumerate(sizes)
    ]


def test_copies_take_their_time_on_the_link(clock: Clock) -> None:
    arena = torch.zeros(2048, dtype=torch.uint8)
    link = HostLink(arena, gbytes_per_s=1e-6)  # a byte takes a millisecond
    first, second = link.start(copies(100, 200)), link.start(copies(50))
    assert not arena.any()
    first()
    assert clock.now == pytest.approx(100.3)
    assert arena[:100].tolist() == [1] * 100 and arena[512:712].tolist() == [2] * 200
    second()
    assert clock.now == pytest.approx(100.35)
    clock.now += 1.0  # an idle link saves up nothing
    link.start(copies(50))()
    assert clock.now == pytest.approx(101.4)


def test_a_thread_that_wakes_late_catches_up(clock: Clock) -> None:
    link = HostLink(torch.zeros(2048, dtype=torch.uint8), gbytes_per_s=1e-6)
    first, second = link.start(copies(100)), link.start(copies(100))
    first()
    clock.now += 0.02  # the second was on the link meanwhile
    second()
    assert clock.now == pytest.approx(100.2)


def test_memory_s_own_rate_is_not_slowed(clock: Clock) -> None:
    link = HostLink(torch.zeros(2048, dtype=torch.uint8))
    link.start(copies(1000))()
    assert clock.now == 100.0

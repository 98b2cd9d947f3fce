"""Workers and a switch over a simulated network that loses, duplicates and holds back packets."""

from __future__ import annotations

import heapq
import math
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchrelay._native import (
    Dtype,
    SwitchHeader,
    SwitchRetryPolicy,
    SwitchSlotTable,
    SwitchStream,
    SwitchTableShape,
    SwitchVerdict,
    switch_scale,
)

NUMEL = 64
LIMIT_S = 1e5


class Simulation:
    """Carries packets with delays drawn from ``random``; a delay's long tail reorders and outlives
    timeouts.
    """

    def __init__(
        self, num_workers: int, window: int, loss: float, late: float, random: Any
    ) -> None:
        self.table = SwitchSlotTable(SwitchTableShape(num_workers, window, NUMEL, True))
        retry = SwitchRetryPolicy(timeout_s=0.01, threshold=5, increment=5)
        self.streams = [
            SwitchStream(0, window, NUMEL, num_workers, retry) for _ in range(num_workers)
        ]
        self.loss, self.late, self.random = loss, late, random
        self.events: list[tuple[float, int, bool, int, bytes]] = []
        self.now_s, self.count, self.job = 0.0, 0, 0
        self.seen: set[tuple[int, int, int]] = set()

    def deliver(self, to_switch: bool, rank: int, datagram: bytes) -> None:
        for _ in range(1 + (self.random.random() < 0.1)):
            if self.random.random() < self.loss:
                continue
            delay = 0.001 * (1 + self.random.random())
            if self.random.random() < self.late:
                delay *= 10 ** (2 * self.random.random())
            self.count += 1
            heapq.heappush(self.events, (self.now_s + delay, self.count, to_switch, rank, datagram))

    def send(self, rank: int, datagrams: list[bytes]) -> None:
        for datagram in datagrams:
            self.deliver(True, rank, datagram)

    def begin(self, rank: int, array: np.ndarray[Any, Any]) -> list[bytes]:
        dtype = Dtype.int32 if array.dtype == np.int32 else Dtype.float32
        return self.streams[rank].begin(
            array.ctypes.data, array.size, dtype, self.job % 256, self.now_s
        )

    def switch(self, rank: int, datagram: bytes) -> None:
        verdict = self.table.apply(datagram, rank)
        if verdict == SwitchVerdict.MULTICAST:
            header = SwitchHeader.parse(datagram)
            assert header is not None
            for each in range(len(self.streams)):
                self.deliver(False, each, self.table.result(datagram))
        elif verdict == SwitchVerdict.UNICAST:
            self.deliver(False, rank, self.table.result(datagram))
        else:
            assert verdict != SwitchVerdict.REJECTED

    def run(self, arrays: list[np.ndarray[Any, Any]]) -> None:
        """Sum the workers' arrays in place; packets of earlier jobs may still be on their way."""
        self.job += 1
        starts = [self.now_s + 0.02 * self.random.random() for _ in arrays]
        begun: set[int] = set()
        while len(begun) < len(arrays) or not all(stream.done for stream in self.streams):
            timers = [
                (s.next_deadline_s, rank)
                for rank, s in enumerate(self.streams)
                if rank in begun and not s.done
            ]
            timers += [(start, rank) for rank, start in enumerate(starts) if rank not in begun]
            timer_s, rank = min(timers, default=(math.inf, -1))
            if self.events and self.events[0][0] <= timer_s:
                self.now_s, _, to_switch, rank, datagram = heapq.heappop(self.events)
                if to_switch:
                    self.switch(rank, datagram)
                elif rank in begun:  # else its socket keeps nothing
                    self.send(rank, self.streams[rank].receive(datagram, self.now_s))
            else:
                self.now_s = timer_s
                if rank in begun:
                    self.send(rank, self.streams[rank].tick(self.now_s))
                else:
                    begun.add(rank)
                    self.send(rank, self.begin(rank, arrays[rank]))
            assert self.now_s < LIMIT_S, "the job does not end"


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    num_workers=st.sampled_from([1, 2, 3, 5]),
    window=st.sampled_from([1, 2, 3, 5, 12]),
    sizes=st.lists(st.integers(1, 9 * NUMEL), min_size=1, max_size=2),
    loss=st.sampled_from([0.0, 0.02, 0.3]),
    late=st.sampled_from([0.0, 0.05, 0.3]),
    random=st.randoms(use_true_random=False, note_method_calls=False),
)
def test_every_sum_is_right_and_comes(
    num_workers: int, window: int, sizes: list[int], loss: float, late: float, random: Any
) -> None:
    simulation = Simulation(num_workers, window, loss, late, random)
    for size in sizes:
        numbers = np.random.default_rng(random.randrange(1 << 30))
        integers = [
            numbers.integers(-(2**31), 2**31, size).astype(np.int32) for _ in range(num_workers)
        ]
        total = np.sum([array.astype(np.int64) for array in integers], axis=0)
        simulation.run(integers)
        for array in integers:
            np.testing.assert_array_equal(array, total.astype(np.int32))

        floats = [
            (numbers.uniform(-1, 1, size) * 10.0 ** numbers.integers(-44, 30)).astype(np.float32)
            for _ in range(num_workers)
        ]
        check_floats(simulation, floats)


def test_more_workers_than_a_word_has_bits() -> None:
    simulation = Simulation(65, 2, 0.01, 0.01, Random(1))
    integers = [np.full(3 * NUMEL, rank, np.int32) for rank in range(65)]
    simulation.run(integers)
    assert all((array == 65 * 64 // 2).all() for array in integers)


def check_floats(simulation: Simulation, floats: list[np.ndarray[Any, Any]]) -> None:
    """Run the job, and compare with the exact sums within the error bound of the documentation."""
    originals = [array.astype(np.float64) for array in floats]
    exact = np.sum(originals, axis=0)
    workers = len(floats)
    simulation.run(floats)
    for chunk in range(0, len(exact), NUMEL):
        part = slice(chunk, chunk + NUMEL)
        largest = max(float(np.abs(array[part]).max()) for array in originals)
        exponent = max(math.frexp(largest)[1], -126) if largest else -126
        bound = workers**2 * 2.0**exponent / 2**32 * (1 + 1e-6)
        for array in floats:
            rounding = np.spacing(np.abs(array[part])).astype(np.float64) / 2
            assert (np.abs(array[part].astype(np.float64) - exact[part]) <= bound + rounding).all()
    for array in floats:
        np.testing.assert_array_equal(array, floats[0])
        assert not simulation.streams[0].exact_chunks


@pytest.mark.parametrize(
    "special", [np.nan, np.inf, -np.inf, np.float32(2.0**126), np.float32(3.4e38)]
)
def test_a_chunk_that_cannot_be_quantized_is_left_alone_on_all_workers(special: float) -> None:
    simulation = Simulation(3, 2, 0.1, 0.1, Random(1))
    floats = [np.ones(5 * NUMEL, np.float32) for _ in range(3)]
    floats[1][3 * NUMEL + 5] = special
    before = [array.copy() for array in floats]
    simulation.run(floats)
    for rank, stream in enumerate(simulation.streams):
        assert stream.exact_chunks == [3]
        np.testing.assert_array_equal(floats[rank][: 3 * NUMEL], np.float32(3.0))
        np.testing.assert_array_equal(
            floats[rank][3 * NUMEL : 4 * NUMEL], before[rank][3 * NUMEL : 4 * NUMEL]
        )


def test_the_scale_uses_the_integers_fully() -> None:
    assert switch_scale(0, 2) == (2**31 - 1) / 2
    assert switch_scale(-126, 1) == math.ldexp(2**31 - 1, 126)


def test_the_timeout_doubles_after_a_growing_number_of_timeouts() -> None:
    """Twice, then four times, then six times: losses of a long job alone do not make it slow."""
    stream = SwitchStream(
        0, 1, NUMEL, 2, SwitchRetryPolicy(timeout_s=0.01, threshold=2, increment=2)
    )
    values = np.zeros(NUMEL, np.int32)
    stream.begin(values.ctypes.data, values.size, Dtype.int32, 0, 0.0)
    found, now_s = [], 0.0
    for _ in range(13):
        found.append(round(1000 * (stream.next_deadline_s - now_s)))
        now_s = stream.next_deadline_s
        assert len(stream.tick(now_s)) == 1
    assert found == [10] * 2 + [20] * 4 + [40] * 6 + [80]

"""When a worker sends a packet again."""

from __future__ import annotations

import numpy as np

from torchrelay._native import (
    Dtype,
    SwitchRetryPolicy,
    SwitchSlotTable,
    SwitchStream,
    SwitchTableShape,
)

NUMEL = 64


def _stream(window: int, timeout_s: float, threshold: int = 100) -> SwitchStream:
    retry = SwitchRetryPolicy(timeout_s=timeout_s, threshold=threshold, increment=100)
    return SwitchStream(0, window, NUMEL, 1, retry)


def _answers(window: int, datagrams: list[bytes]) -> list[bytes]:
    """What a switch with one worker answers."""
    table = SwitchSlotTable(SwitchTableShape(1, window, NUMEL, True))
    for datagram in datagrams:
        table.apply(datagram, 0)
    return [table.result(datagram) for datagram in datagrams]


def test_a_packet_that_an_eighth_of_the_window_overtook_is_sent_again_once() -> None:
    window = 64
    values = np.ones(window * NUMEL, np.int32)
    stream = _stream(window, timeout_s=1000.0)
    packets = stream.begin(values.ctypes.data, values.size, Dtype.int32, 1, 0.0)
    answers = _answers(window, packets)
    again = [stream.receive(answer, 0.001) for answer in answers[1:]]
    # Packet 8 is the first that was sent 8 packets after packet 0.
    assert again[:7] == [[]] * 7 and again[7] == [packets[0]] and again[8:] == [[]] * 55
    assert not stream.done
    assert stream.receive(answers[0], 0.002) == []
    assert stream.done


def test_two_packets_that_changed_places_are_not_sent_again() -> None:
    window = 8
    values = np.ones(window * NUMEL, np.int32)
    stream = _stream(window, timeout_s=1000.0)
    answers = _answers(window, stream.begin(values.ctypes.data, values.size, Dtype.int32, 1, 0.0))
    answers[0:2] = answers[1::-1]
    assert [stream.receive(answer, 0.001) for answer in answers] == [[]] * window


def test_the_timeout_doubles_without_answers_and_halves_with_them() -> None:
    packets = 10
    values = np.ones(packets * NUMEL, np.int32)
    stream = _stream(window=1, timeout_s=0.01, threshold=3)
    table = SwitchSlotTable(SwitchTableShape(1, 1, NUMEL, True))
    now_s = 0.0

    def timeout_s() -> float:
        return round(stream.next_deadline_s - now_s, 6)

    def answer(datagrams: list[bytes]) -> list[bytes]:
        (datagram,) = datagrams
        table.apply(datagram, 0)
        return stream.receive(table.result(datagram), now_s)

    sent = stream.begin(values.ctypes.data, values.size, Dtype.int32, 1, now_s)
    waited_s = []
    for _ in range(4):
        waited_s.append(timeout_s())
        now_s = stream.next_deadline_s
        assert stream.tick(now_s) == sent
    assert waited_s == [0.01, 0.01, 0.01, 0.02]
    # The answer may be to either of the packets: it says nothing about the network.
    sent = answer(sent)
    assert timeout_s() == 0.02
    # This one is to a packet that was sent once.
    now_s += 0.001
    sent = answer(sent)
    assert timeout_s() == 0.01
    while sent:
        sent = answer(sent)
    assert stream.done and (values == 1).all()

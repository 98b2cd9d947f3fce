"""What a switch does with each packet: the wire format spoken to a running data plane."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from switch_ports import NETWORKS, Network, header, ip_packet, packet, values_of
from torchrelay.aggregation.switch import SessionShape
from torchrelay.aggregation.switch import _control as control
from torchrelay.aggregation.switch._control import ControlKind
from torchrelay.aggregation.switch._data_plane import ControlMessage
from waiting import eventually


@pytest.fixture(scope="module", params=NETWORKS)
def shared_network(request: pytest.FixtureRequest) -> Iterator[Network]:
    with NETWORKS[request.param](4) as network:
        yield network


@pytest.fixture
def network(shared_network: Network) -> Iterator[Network]:
    yield shared_network
    for session_id in {session_id for session_id, _ in shared_network.workers}:
        shared_network.plane.close_session(session_id)
    shared_network.workers.clear()


class Session:
    """Sends packets as the ranks of a session, and checks what each of them gets."""

    def __init__(self, network: Network, num_workers: int, *, session_id: int = 1, numel: int = 64,
                 sequenced: bool = False) -> None:  # fmt: skip
        network.open_session(num_workers, numel, session_id, sequenced)
        self.network, self.session_id, self.numel = network, session_id, numel
        self.workers = [network.workers[session_id, rank] for rank in range(num_workers)]

    def send(self, rank: int, value: int, **fields: int) -> None:
        self.network.send(self.workers[rank], packet(value, numel=self.numel, **fields))

    def expect(self, rank: int, value: int, **fields: int) -> None:
        assert self.workers[rank].receive() == packet(value, numel=self.numel, **fields)

    def expect_all(self, value: int, **fields: int) -> None:
        for rank in range(len(self.workers)):
            self.expect(rank, value, **fields)
        self.expect_nothing()

    def expect_nothing(self) -> None:
        assert [rank for rank, worker in enumerate(self.workers) if worker.has_received()] == []


@pytest.mark.parametrize("numel", [64, 256])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_the_last_packet_sends_the_sum_to_all(
    network: Network, num_workers: int, numel: int
) -> None:
    session = Session(network, num_workers, numel=numel)
    for rank in range(num_workers):
        session.expect_nothing()
        session.send(rank, 10**rank, tsi=7, job=3, slot=5, exponent=rank - 3)
    session.expect_all(
        sum(10**rank for rank in range(num_workers)), tsi=7, job=3, slot=5, exponent=num_workers - 4
    )


def test_each_value_is_summed_by_itself_and_wraps_around(network: Network) -> None:
    session = Session(network, 2, numel=256)
    ours, theirs = list(range(-100, 156)), [2**31 - 1 - i for i in range(256)]
    for worker, values in zip(session.workers, (ours, theirs), strict=True):
        network.send(worker, packet(values, numel=256))
    sums = [(a + b) % (1 << 32) for a, b in zip(ours, theirs, strict=True)]
    for worker in session.workers:
        assert worker.receive() == packet(sums, numel=256)


def test_a_retransmission_before_completion_is_ignored(network: Network) -> None:
    session = Session(network, 3)
    session.send(0, 1)
    session.send(0, 50)
    session.send(1, 2)
    session.send(0, 50)
    session.send(1, 50)
    session.expect_nothing()
    session.send(2, 4)
    session.expect_all(7)


def test_a_retransmission_after_completion_is_answered_to_its_sender_alone(
    network: Network,
) -> None:
    session = Session(network, 2)
    session.send(0, 1)
    session.send(1, 2, exponent=4)
    session.expect_all(3, exponent=4)
    for _ in range(3):
        session.send(1, 50, tsi=9, job=8, exponent=100)
        session.expect(1, 3, tsi=9, job=8, exponent=4)
    session.expect_nothing()


def test_the_other_set_is_another_sum(network: Network) -> None:
    session = Session(network, 2)
    for set_ in (0, 1, 0, 1):
        session.send(0, 10 + set_, set=set_)
        session.send(1, 100, set=set_)
        session.expect_all(110 + set_, set=set_)


def test_workers_may_be_a_set_apart(network: Network) -> None:
    session = Session(network, 2)
    session.send(0, 1, set=0)
    session.send(1, 2, set=0)
    session.expect(0, 3)  # worker 1's result is lost
    assert session.workers[1].receive()
    session.send(0, 10, set=1)
    session.send(1, 50, set=0)  # so it asks again
    session.expect(1, 3)
    session.send(1, 20, set=1)
    session.expect_all(30, set=1)


def test_slots_do_not_share_values(network: Network) -> None:
    session = Session(network, 2)
    for slot in range(8):
        session.send(0, slot, slot=slot)
    for slot in reversed(range(8)):
        session.send(1, 100, slot=slot)
        session.expect_all(100 + slot, slot=slot)


def test_a_slot_is_used_again_and_again(network: Network) -> None:
    session = Session(network, 3)
    for round_ in range(12):
        for rank in (round_ % 3, (round_ + 1) % 3, (round_ + 2) % 3):
            session.send(rank, round_, set=round_ % 2, tsi=round_)
        session.expect_all(3 * round_, set=round_ % 2, tsi=round_)


def test_a_retransmission_from_the_previous_set_is_answered_while_the_next_is_in_progress(
    network: Network,
) -> None:
    session = Session(network, 3)
    for rank in range(3):
        session.send(rank, 1)
    session.expect_all(3)
    session.send(0, 5, set=1)
    session.send(1, 5, set=1)
    session.send(2, 50)
    session.expect(2, 3)
    session.send(2, 5, set=1)
    session.expect_all(15, set=1)


def test_reuse_and_retransmissions_together(network: Network) -> None:
    session = Session(network, 2)
    for round_ in range(1, 7):
        set_ = round_ % 2
        session.send(0, round_, set=set_)
        session.send(0, 50, set=set_)
        session.send(1, 10 * round_, set=set_)
        session.expect_all(11 * round_, set=set_)
        session.send(0, 50, set=set_)
        session.expect(0, 11 * round_, set=set_)
    session.expect_nothing()


def test_datagrams_that_are_no_packet_change_nothing(network: Network) -> None:
    session = Session(network, 2)
    session.send(0, 1)
    good = packet(50)
    garbage = [
        b"",
        b"\x11",
        good[:-1],
        good + b"\0",
        good[:9],
        b"\xff" * 266,
        packet(50, numel=256),
    ]
    garbage += [bytes([first]) + good[1:] for first in (0x01, 0x10, 0x12, 0x13, 0x31)]
    for datagram in garbage:
        session.workers[1].send(datagram)
    session.send(1, 50, slot=9)  # the session has 8 slots
    session.expect_nothing()
    session.send(1, 2)
    session.expect_all(3)


@pytest.mark.parametrize("numel", [64, 256])
def test_a_packet_with_a_wrong_udp_checksum_is_not_summed(network: Network, numel: int) -> None:
    session = Session(network, 2, numel=numel)
    session.send(0, 1)
    worker = session.workers[1]
    ends = (worker.address, worker.port), worker.sock.getpeername()
    right = ip_packet(*ends, packet(2, numel=numel))
    wrong = (int.from_bytes(right[26:28], "big") + 1) % (1 << 16)
    network.forge(1, ip_packet(*ends, packet(2, numel=numel), wrong))
    flipped = bytearray(ip_packet(*ends, packet(2, numel=numel)))
    flipped[-1] ^= 64
    network.forge(1, bytes(flipped))
    network.forge(1, right)
    session.expect_all(3)
    session.send(0, 10, set=1)
    network.forge(1, ip_packet(*ends, packet(20, numel=numel, set=1), 0))  # 0: it has none
    session.expect_all(30, set=1)


def test_only_members_may_write(network: Network) -> None:
    session = Session(network, 2)
    session.send(0, 1)
    same_host = network.connect(1)
    network.send(same_host, packet(50))
    session.expect_nothing()
    assert not same_host.has_received()
    network.plane.add_worker(1, 1, same_host.address, same_host.port, 1)
    network.send(same_host, packet(2))
    session.expect(0, 3)
    assert values_of(same_host.receive()) == {3}, (
        "the answer goes to the port that the packet came from"
    )
    assert not session.workers[1].has_received()


def test_sessions_do_not_touch_each_other(network: Network) -> None:
    first, second = Session(network, 2, session_id=1), Session(network, 3, session_id=2, numel=256)
    first.send(0, 1)
    second.send(0, 10)
    second.send(1, 10)
    first.send(1, 1)
    first.expect_all(2)
    second.expect_nothing()
    network.plane.close_session(1)
    network.send(first.workers[0], packet(50))
    second.send(2, 10)
    second.expect_all(30)
    assert network.plane.missing(2) == []


def test_a_session_opened_again_is_empty(network: Network) -> None:
    session = Session(network, 2)
    session.send(0, 50)
    assert network.plane.missing(1) == [1]
    session = Session(network, 2)
    assert network.plane.missing(1) == []
    session.send(1, 1)
    session.expect_nothing()
    session.send(0, 2)
    session.expect_all(3)


def test_a_sequenced_session_is_safe_from_late_packets(network: Network) -> None:
    session = Session(network, 2, sequenced=True)
    for tsi, set_ in ((4, 0), (8, 1)):
        session.send(0, 1, tsi=tsi, set=set_)
        session.send(1, 2, tsi=tsi, set=set_)
        session.expect_all(3, tsi=tsi, set=set_)
    session.send(0, 50, tsi=4, set=0)  # SwitchML's own algorithm would begin a sum with it
    session.send(0, 10, tsi=12, set=0)
    session.send(1, 50, tsi=4, set=0)
    session.expect_nothing()
    session.send(1, 20, tsi=12, set=0)
    session.expect_all(30, tsi=12, set=0)
    assert network.plane.stats().sessions[0].counts["stale"] == 2


def test_statistics_say_what_happened(network: Network) -> None:
    before = network.plane.stats()
    session = Session(network, 2)
    session.send(0, 1)
    session.send(0, 1)
    session.send(1, 1)
    session.expect_all(2)
    session.send(1, 1)
    session.expect(1, 2)
    network.send(network.connect(0), packet(1))
    session.send(0, 1, slot=8)
    after = network.plane.stats()
    (info,) = after.sessions
    assert info.counts == {
        "received": 5,
        "sent": 3,
        "completed": 1,
        "answered_again": 1,
        "duplicates": 1,
        "stale": 0,
        "forwarded": 0,
        "rejected": 1,
    }
    assert [(worker.received, worker.retransmissions) for worker in info.workers] == [
        (3, 1),
        (2, 1),
    ]
    assert info.session_id == 1
    assert info.shape.num_workers == 2
    assert after.counts["strangers"] - before.counts["strangers"] == 1
    assert after.counts["received"] - before.counts["received"] == 5
    network.plane.close_session(1)
    assert network.plane.stats().counts["received"] == after.counts["received"]


@pytest.mark.parametrize("numel", [64, 256])
def test_replies_are_bit_for_bit_as_switchmls(network: Network, numel: int) -> None:
    """The unused bits are cleared, and the second exponent is a maximum too."""
    network.open_session(2, numel, slots=8192)
    workers = [network.workers[1, rank] for rank in (0, 1)]
    for worker, second in zip(workers, (-3, 5), strict=True):
        head = header(9, 7, 8191, 1, -second, numel, second)
        stray = bytes([head[0] | 8]) + head[1:6] + bytes([head[6] | 0x40]) + head[7:]
        network.send(worker, stray + b"\0\0\0\1" * numel)
    expected = header(9, 7, 8191, 1, 3, numel, 5) + b"\0\0\0\2" * numel
    assert [worker.receive() for worker in workers] == [expected, expected]
    network.send(workers[0], stray + bytes(4 * numel))
    assert workers[0].receive() == expected, "so is an answer that is sent again"
    outside = packet(1, numel=numel)
    network.send(workers[0], outside[:6] + b"\x20\0" + outside[8:])
    assert network.plane.stats().sessions[0].counts["rejected"] == 1


def received_control(network: Network, timeout_s: float = 0.2) -> list[ControlMessage]:
    found = []
    while (message := network.plane.receive_control(timeout_s)) is not None:
        found.append(message)
    return found


def test_the_control_plane_is_kept_from_floods(network: Network) -> None:
    loud, other = network.connect(3), network.connect(2)
    join = control.encode_join(1, control.Join(0, SessionShape(1, 8, 64), 1))
    received_control(network)
    found: list[tuple[str, bool]] = []

    def receive() -> None:  # in each round, so that a slow run fills no queue
        received = received_control(network, 0.001)
        found.extend((message.address, bool(message.data)) for message in received)

    def other_is_heard() -> bool:
        receive()
        return (other.address, True) in found

    begin_s = time.monotonic()
    for _ in range(20):
        receive()
        for datagram in (packet(1), join):
            end = network.dealt_with() + 100
            for _ in range(100):
                loud.send(datagram)
            eventually(lambda end=end: network.dealt_with() >= end)  # type: ignore[misc]
    network.send(other, join)
    seconds = int(time.monotonic() - begin_s) + 2
    eventually(other_is_heard)
    for is_control in (True, False):
        assert 0 < found.count((loud.address, is_control)) <= 256 * seconds


def test_only_requests_reach_the_control_plane(network: Network) -> None:
    session = Session(network, 1)
    received_control(network)
    requests = {ControlKind.JOIN, ControlKind.LEAVE, ControlKind.ASK_MISSING}
    for kind in range(16):
        datagram = control.encode(ControlKind.JOIN, 1, bytes(14))
        network.send(session.workers[0], datagram[:1] + bytes([kind]) + datagram[2:])
    found = [message.data[1] for message in received_control(network)]
    assert set(found) == requests and len(found) == len(requests)

"""A switch's control plane: one server over each kind of data plane."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

import namespaces
from switch_ports import (
    NETWORKS,
    Network,
    Worker,
    beyond_select,
    ip_packet,
    missing_for_xdp,
    packet,
    values_of,
    within,
)
from torchrelay import _native
from torchrelay.aggregation.switch import (
    DataPlane,
    SessionShape,
    SessionStats,
    SwitchServer,
    UdpDataPlane,
    XdpDataPlane,
    _server,
)
from torchrelay.aggregation.switch import _control as control
from torchrelay.aggregation.switch._control import ControlKind
from torchrelay.cli import app
from torchrelay.errors import UnavailableError
from waiting import eventually

SHAPE = SessionShape(2, 8, 64, sequenced=True)
ALONE = SessionShape(1, 8, 64)  # as SwitchML's workers: without signs of life


@pytest.fixture(params=["udp", "xdp-generic"])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    with NETWORKS[request.param](3) as network:
        yield network


def join(
    worker: Worker, session_id: int, rank: int, shape: SessionShape = SHAPE, client: int = 1
) -> tuple[ControlKind, str]:
    """Send a JOIN; return kind and text of the answer."""
    worker.send(control.encode_join(session_id, control.Join(rank, shape, client)))
    answer = control.parse(worker.receive())
    assert answer is not None and answer.session_id == session_id
    return answer.kind, answer.body.decode()


JOINED = (ControlKind.JOINED, "")


def sessions(server: SwitchServer) -> dict[int, SessionStats]:
    return {session.session_id: session for session in server.stats().sessions}


def test_an_answer_that_cannot_be_sent_does_not_end_the_service(network: Network) -> None:
    with SwitchServer(network.plane) as server:
        worker = network.connect(0)
        switch = worker.sock.getpeername()
        request = control.encode_join(1, control.Join(0, SHAPE, 1))
        for datagram in (request + bytes(len(request) % 2), packet(1)):
            network.forge(0, ip_packet((worker.address, 0), switch, datagram))
        eventually(lambda: network.plane.stats().counts["send_lost"] == 2)
        assert network.plane.stats().counts["strangers"] == 1, "port 0 does not stand for all ports"
        server.check()
        assert join(worker, 1, 0) == JOINED


@pytest.mark.parametrize("kind", ["udp", "xdp-generic"])
def test_a_process_may_have_many_descriptors(kind: str) -> None:
    with beyond_select(), NETWORKS[kind](1) as network, SwitchServer(network.plane):
        assert join(network.connect(0), 1, 0) == JOINED


def test_a_request_that_fails_does_not_end_the_service(
    network: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError

    with SwitchServer(network.plane) as server:
        worker = network.connect(0)
        with monkeypatch.context() as patch:
            patch.setattr(server, "join", fail)
            worker.send(control.encode_join(1, control.Join(0, SHAPE, 1)))
            eventually(lambda: "KeyError" in caplog.text)
        server.check()
        assert join(worker, 1, 0) == JOINED


def test_the_command_ends_with_its_control_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: UdpDataPlane, timeout_s: float) -> None:
        raise OSError("the socket is gone")

    monkeypatch.setattr(UdpDataPlane, "receive_control", broken)
    result = CliRunner().invoke(app, ["switch", "--port", "0"])
    assert isinstance(result.exception, UnavailableError)
    assert "its control thread has failed" in str(result.exception)


@pytest.mark.parametrize("kind", ["udp", "xdp-generic"])
def test_the_usual_port_is_sixteen_as_switchmls(kind: str) -> None:
    """In a namespace of its own, where they are free."""
    if reason := namespaces.missing() if kind == "udp" else missing_for_xdp():
        pytest.skip(reason)
    first = _native.SWITCH_UDP_PORT

    def switch() -> DataPlane:
        if kind == "udp":
            return UdpDataPlane("0.0.0.0")
        return XdpDataPlane(["port0", "port1"], mode="generic")

    with namespaces.star(2) as star, contextlib.ExitStack() as stack:
        plane = within(star.switch, switch)
        stack.enter_context(SwitchServer(plane))
        workers = []
        for rank, port in ((0, first + 5), (1, first + 15)):

            def connected(rank: int = rank, port: int = port) -> socket.socket:
                sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                sock.connect((f"10.78.{rank}.1", port))  # it gets nothing from another port
                return sock

            sock = stack.enter_context(within(star.pids[rank], connected))
            workers.append(Worker(sock, *sock.getsockname()))
            while (answer := join(workers[-1], 1, rank)) != JOINED:
                assert answer[0] == ControlKind.BUSY  # its MAC address is not known yet
        for worker in workers:
            worker.send(packet(4))
        assert [values_of(worker.receive()) for worker in workers] == [{8}, {8}]
        assert plane.port == first
        with pytest.raises(UnavailableError, match="cannot be bound"):
            within(star.switch, switch)


# --- sessions


def test_a_session_ends_when_its_workers_are_silent(network: Network) -> None:
    with SwitchServer(network.plane, session_timeout_s=0.1) as server:
        assert join(network.connect(0), 1, 0) == JOINED
        assert join(network.connect(1), 2, 0, ALONE) == JOINED
        eventually(lambda: sessions(server).keys() == {2})


def test_a_sign_of_life_is_one_of_its_worker_alone(network: Network) -> None:
    with SwitchServer(network.plane) as server:
        workers = [network.connect(0), network.connect(1)]
        for rank, worker in enumerate(workers):
            assert join(worker, 1, rank) == JOINED
        eventually(lambda: sessions(server)[1].idle_s > 0.2)
        stranger = network.connect(1)
        for worker in (workers[0], stranger):
            network.send(worker, control.encode(ControlKind.ALIVE, 0))
        stats = sessions(server)[1]
        silent_s = [worker.silent_s for worker in stats.workers]
        assert stats.idle_s == silent_s[0] < silent_s[1]
        assert not any(worker.has_received() for worker in (*workers, stranger))


def test_a_worker_that_comes_back_replaces_itself(network: Network) -> None:
    with SwitchServer(network.plane):
        old = [network.connect(rank) for rank in (0, 1)]
        for rank, worker in enumerate(old):
            assert join(worker, 1, rank, client=7 + rank) == JOINED
            assert join(worker, 1, rank, client=7 + rank) == JOINED, "a repetition does nothing"
        network.send(old[0], packet(50, tsi=9))
        new = [network.connect(rank) for rank in (0, 1)]
        for rank, worker in enumerate(new):
            assert join(worker, 1, rank, client=17 + rank) == JOINED
        network.send(old[1], packet(50, tsi=9))
        answer = control.parse(old[1].receive())
        assert answer is not None and answer.kind == ControlKind.UNKNOWN_SESSION
        for value, worker in zip((1, 2), new, strict=True):
            network.send(worker, packet(value))
        assert [values_of(worker.receive()) for worker in new] == [{3}, {3}]


def test_the_ports_of_a_silent_worker_are_free_for_another_job(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_server, "_TAKEOVER_S", 600.0)  # however slow the next lines run
    with SwitchServer(network.plane) as server:
        worker = network.connect(0)
        assert join(worker, 1, 0) == JOINED
        kind, text = join(worker, 2, 0, ALONE)
        assert kind == ControlKind.BUSY
        assert f"another worker has port {worker.port} of {worker.address}" in text
        monkeypatch.setattr(_server, "_TAKEOVER_S", 0.0)
        assert join(worker, 2, 0, ALONE) == JOINED
        assert sessions(server).keys() == {2}
        network.send(worker, packet(5))
        assert values_of(worker.receive()) == {5}


def test_one_address_has_a_quarter_of_the_sessions(network: Network) -> None:
    with SwitchServer(network.plane, max_sessions=8) as server:
        answers = [join(network.connect(0), session_id, 0) for session_id in (1, 2, 3)]
        assert answers[:2] == [JOINED, JOINED]
        assert answers[2][0] == ControlKind.BUSY
        assert "has opened 2 sessions, and one address may use a quarter" in answers[2][1]
        assert [join(network.connect(1), session_id, 0) for session_id in (4, 5)] == [JOINED] * 2
        assert sessions(server).keys() == {1, 2, 4, 5}


def test_a_full_switch_refuses_until_a_session_has_been_silent_for_long(network: Network) -> None:
    with SwitchServer(network.plane, max_sessions=1, session_timeout_s=60) as server:
        assert join(network.connect(0), 1, 0) == JOINED
        busy, text = join(network.connect(1), 2, 0, ALONE)
        assert busy == ControlKind.BUSY and "1 of this switch's 1 sessions" in text
        server._session_timeout_s = 0.0
        eventually(lambda: not sessions(server))
        assert join(network.connect(1), 2, 0, ALONE) == JOINED


def test_unused_sessions_end_for_new_ones(network: Network) -> None:
    with SwitchServer(network.plane, max_sessions=2, session_timeout_s=0.0) as server:
        summing, waiting = network.connect(0), network.connect(1)
        assert join(summing, 1, 0, ALONE) == JOINED
        network.send(summing, packet(1))
        assert join(waiting, 2, 0, ALONE) == JOINED
        assert join(network.connect(2), 3, 0, ALONE) == JOINED
        assert sessions(server).keys() == {1, 3}


def test_an_address_over_its_share_ends_its_own_unused_sessions_only(network: Network) -> None:
    with SwitchServer(network.plane, max_sessions=8, session_timeout_s=0.0) as server:
        assert join(network.connect(1), 1, 0, ALONE) == JOINED
        summing = network.connect(0)
        assert join(summing, 2, 0, ALONE) == JOINED
        network.send(summing, packet(1))
        for session_id in (3, 4):
            assert join(network.connect(0), session_id, 0, ALONE) == JOINED
        assert sessions(server).keys() == {1, 2, 4}


def test_sessions_of_switchmls_workers_stay_for_longer(network: Network) -> None:
    with SwitchServer(network.plane, session_timeout_s=0.1) as server:
        join(network.connect(0), 1, 0, ALONE)
        eventually(lambda: sessions(server)[1].idle_s > 2)
        server._idle_timeout_s = 0.1
        eventually(lambda: not sessions(server))

"""Messages between hosts when something goes wrong, seen from one rank: the others are sockets."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from torchrelay.aggregation import _messages
from torchrelay.aggregation._messages import Messages
from torchrelay.errors import OperationTimeoutError, PeerLostError

TOKEN = bytes(range(16))
PATIENCE_S = 60.0


def listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


class Rank0:
    """Rank 0, alone on its host; ranks 1 and 2 share the other one."""

    def __init__(self) -> None:
        self.listeners = {rank: listening() for rank in (1, 2)}
        own = listening()
        self.address = own.getsockname()
        addresses = [self.address, *(sock.getsockname() for sock in self.listeners.values())]
        self.messages = Messages(
            0,
            [0, 1, 2],
            addresses,
            [[0], [1, 2]],
            own,
            TOKEN,
            _no_shared_memory,
            lambda failure: None,
        )

    def connection_of(self, rank: int) -> socket.socket:
        """A connection by which ``rank`` sends."""
        sock = socket.create_connection(self.address)
        sock.sendall(_messages._PREAMBLE.pack(b"TRLA", 1, 0, rank, TOKEN))
        return sock

    def close(self) -> None:
        self.messages.close()
        for sock in self.listeners.values():
            sock.close()


def _no_shared_memory(*_: object) -> None:
    raise AssertionError("no message comes through shared memory")


@pytest.fixture
def rank0() -> Iterator[Rank0]:
    one = Rank0()
    yield one
    one.close()


def frame(kind: int, body: bytes, size: int | None = None) -> bytes:
    return _messages._HEADER.pack(kind, 0, 0, 0, len(body) if size is None else size) + body


def failed(text: str, rank: int) -> bytes:
    return frame(2, json.dumps({"text": text, "ranks": [rank], "timeout": False}).encode())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_rank_that_ended_after_its_report_is_not_named(rank0: Rank0) -> None:
    """Rank 1 has died. Rank 2 has noticed, reported it, and ended before it is asked."""
    reporter = rank0.connection_of(2)
    gone = PeerLostError("rank 1 has died", ranks=[1])
    reachable = rank0.messages.is_reachable

    def report_late(rank: int, timeout_s: float) -> bool:
        rank0.listeners[2].close()
        answer = reachable(rank, timeout_s)
        reporter.sendall(failed("rank 2, all_reduce: rank 1 has died", 1))
        return answer

    rank0.messages.is_reachable = report_late  # type: ignore[method-assign]
    assert rank0.messages.with_host(gone, 1) is gone
    assert str(rank0.messages.failure) == "rank 2, all_reduce: rank 1 has died"
    reporter.close()


def test_ranks_that_ended_without_a_word_are_named(rank0: Rank0) -> None:
    rank0.listeners[2].close()
    error = rank0.messages.with_host(PeerLostError("rank 1 has died", ranks=[1]), 1)
    assert error.ranks == (1, 2) and "nor can rank 2 of its host be reached" in str(error)


def test_a_rank_that_is_no_leader_receives_the_cause_too(rank0: Rank0) -> None:
    """Before it sees that the connection ends."""
    with rank0.connection_of(2) as peer:
        # Until it is admitted, a receive connects to rank 2 itself, and the cause goes that way.
        wait_until(lambda: bool(rank0.messages._peers[2].connections))
        peer.sendall(frame(0, b"x"))
        rank0.messages.receive(2, 0, memoryview(bytearray(1))).completion.wait(PATIENCE_S)
        rank0.messages.fail(PeerLostError("rank 1 has died", ranks=[1]))
        peer.settimeout(PATIENCE_S)
        assert b"rank 1 has died" in peer.recv(1000)


def test_a_receive_that_is_half_done_ends_with_the_group(rank0: Rank0) -> None:
    """And what comes later is not written to its memory."""
    buffer = bytearray(1 << 20)
    receive = rank0.messages.receive(1, 0, memoryview(buffer))
    with rank0.connection_of(1) as sender:
        sender.sendall(frame(0, b"\1" * 1000, len(buffer)))
        wait_until(lambda: buffer[999] == 1)
        rank0.messages.fail(OperationTimeoutError("rank 2 is late", ranks=[2]))
        with pytest.raises(OperationTimeoutError, match="rank 2 is late"):
            receive.completion.wait(PATIENCE_S)
        sender.sendall(b"\2" * 1000)
        rank0.close()
    assert buffer.count(2) == 0


def test_a_failure_is_reported_before_connections_end(
    rank0: Rank0, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the thread that reports it takes."""
    dumps = json.dumps

    def dump_late(report: object) -> str:
        time.sleep(3 * _messages._RECONNECT_S)
        return dumps(report)

    with rank0.connection_of(1) as peer:
        wait_until(lambda: bool(rank0.messages._peers[1].connections))
        monkeypatch.setattr(json, "dumps", dump_late)
        rank0.messages.fail(PeerLostError("rank 2 has died", ranks=[2]))
        peer.settimeout(PATIENCE_S)
        assert peer.recv(1 << 16).endswith(failed("rank 2 has died", 2)[_messages._HEADER.size :])


def test_a_message_of_a_rank_that_listens_no_more_arrives(
    rank0: Rank0, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has sent its last message and left, while rank 0 still tries to connect to it."""
    monkeypatch.setattr(_messages, "_RECONNECT_S", PATIENCE_S)
    rank0.listeners[1].close()
    buffer = bytearray(8)
    receive = rank0.messages.receive(1, 0, memoryview(buffer))
    with rank0.connection_of(1) as sender:
        sender.sendall(frame(0, b"\1" * 8) + frame(_messages._Kind.LEFT, b""))
        assert receive.completion.wait(PATIENCE_S)
    assert buffer == b"\1" * 8


@pytest.mark.parametrize("bytes_", [frame(2, b"no json"), frame(2, b"[]")], ids=["text", "list"])
def test_a_peer_that_sends_garbage_is_lost(rank0: Rank0, bytes_: bytes) -> None:
    with rank0.connection_of(1) as sender:
        wait_until(lambda: bool(rank0.messages._peers[1].connections))
        receive = rank0.messages.receive(1, 0, memoryview(bytearray(8)))
        sender.sendall(bytes_)
        with pytest.raises(PeerLostError, match="rank 1"):
            receive.completion.wait(PATIENCE_S)

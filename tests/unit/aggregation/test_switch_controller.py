"""A switch's controller: its messages, sessions that workers form by it, and their mistakes."""

from __future__ import annotations

import dataclasses
import functools
import re
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from switch_ports import packet, values_of, wait_until
from torchrelay.aggregation.switch import (
    Controller,
    SwitchClient,
    SwitchOptions,
    SwitchServer,
    UdpDataPlane,
    _controller_messages,
    _server,
    session_from_controller,
)
from torchrelay.aggregation.switch._controller_messages import (
    MESSAGES,
    BarrierRequest,
    BroadcastRequest,
    BroadcastResponse,
    UdpSessionRequest,
    UdpSessionResponse,
    decode,
    encode,
)
from torchrelay.errors import (
    MismatchError,
    OperationTimeoutError,
    ProtocolError,
    TorchRelayError,
    UnavailableError,
)

OPTIONS = SwitchOptions(num_worker_threads=1, max_outstanding_packets=8, packet_numel=64)
PROTO = Path(_controller_messages.__file__).with_name("controller.proto")
PATIENCE_S = 60.0


@pytest.fixture
def controller() -> Iterator[Controller]:
    pytest.importorskip("grpc", reason="needs grpcio")
    with (
        SwitchServer(UdpDataPlane(port=0), allow=["127.0.0.0/8"]) as server,
        Controller(server, port=0) as one,
    ):
        one.server = server  # type: ignore[attr-defined]
        yield one


def call(controller: Controller, method: str, data: bytes) -> bytes:
    """One call; raises grpc.RpcError."""
    import grpc

    with grpc.insecure_channel(controller.address) as channel:
        name = f"/switchml_proto.{method}"
        return channel.unary_unary(name)(data, timeout=PATIENCE_S)


def in_threads(functions: list[Callable[[], Any]]) -> list[Any]:
    """What they return or raise."""

    def run(function: Callable[[], Any]) -> Any:
        try:
            return function()
        except TorchRelayError as error:
            return error

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(run, functions))


# --- messages


def test_messages_are_those_of_the_proto_file() -> None:
    text = re.sub(r"//.*", "", PROTO.read_text())
    bits = {"uint64": 64, "uint32": 32, "PacketSize": 32}
    declared = {
        name: [
            (field, int(index), bits[kind])
            for kind, field, index in re.findall(r"(\w+) (\w+) = (\d+);", body)
        ]
        for name, body in re.findall(r"message (\w+) \{(.*?)\}", text, re.DOTALL)
    }
    assert declared == {
        kind.__name__: [
            (field.name, field.metadata["index"], field.metadata["bits"])
            for field in dataclasses.fields(kind)
        ]
        for kind in MESSAGES
    }
    assert re.findall(r"^package (.*);", text, re.MULTILINE) == ["switchml_proto"]


def test_bytes_are_protobufs() -> None:
    """The first is the example of protobuf's own description."""
    assert encode(BroadcastResponse(150)) == b"\x08\x96\x01"
    assert (
        encode(UdpSessionRequest(rank=1, packet_size=3, joins=1)) == b"\x10\x01\x38\x03\x88\x01\x01"
    )
    assert encode(BarrierRequest()) == b"" and decode(BarrierRequest, b"") == BarrierRequest()
    # Of other types and numbers.
    others = b"\x7a\x02hi\x79" + bytes(8) + b"\x7d" + bytes(4) + b"\x08\x96\x01"
    assert decode(BroadcastResponse, others) == BroadcastResponse(150)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_messages_survive(wide: int, narrow: int, other: int) -> None:
    message = UdpSessionRequest(wide, narrow, other, wide, narrow, 3, other, 1)
    assert decode(UdpSessionRequest, encode(message)) == message


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(st.binary(max_size=64))
def test_garbage_is_a_message_or_an_error(data: bytes) -> None:
    try:
        found = decode(UdpSessionRequest, data)
    except ProtocolError:
        return
    assert all(0 <= value < 2**64 for value in dataclasses.astuple(found))


# --- sessions


def form(controller: Controller, rank: int, size: int, **more: Any) -> tuple[int, str]:
    return session_from_controller(
        controller.address, rank, size, OPTIONS, **{"timeout_s": PATIENCE_S, "group": 5, **more}
    )


def test_workers_form_sessions_at_the_same_time_and_sum(controller: Controller) -> None:
    def work(rank: int, size: int, group: int) -> tuple[int, float]:
        session_id, switch = form(controller, rank, size, group=group)
        with SwitchClient(switch, rank, size, session_id, OPTIONS) as client:
            tensor = torch.full((1000,), 10**rank, dtype=torch.int32)
            client.all_reduce(tensor, PATIENCE_S)
            return session_id, tensor.unique().item()

    jobs: list[Callable[[], Any]] = [
        functools.partial(work, rank, size, group)
        for size, group in ((3, 1), (2, 2))
        for rank in range(size)
    ]
    found = in_threads(jobs)
    assert [total for _, total in found] == [111, 111, 111, 11, 11]
    assert len({session_id for session_id, _ in found}) == 2


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_the_originals_workers(
    controller: Controller, num_jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They form one session at a time, name no group, send from any port, and never leave: a later
    job takes the place of an earlier one.
    """
    monkeypatch.setattr(_server, "_TAKEOVER_S", 0.1)

    def work(job: int, rank: int) -> tuple[UdpSessionResponse, set[int]]:
        request = BroadcastRequest(job if rank == 0 else 0, rank, 2, 0)
        session_id = decode(
            BroadcastResponse, call(controller, "Sync/Broadcast", encode(request))
        ).value
        barrier = encode(BarrierRequest(2))
        if rank == 1:
            call(controller, "Sync/Barrier", barrier)
        address = int.from_bytes(socket.inet_aton(f"127.0.0.{2 + rank}"), "big")
        join = UdpSessionRequest(session_id, rank, 2, 0xAABB, address, packet_size=1)
        answer = decode(UdpSessionResponse, call(controller, "Session/UdpSession", encode(join)))
        if rank == 0:
            call(controller, "Sync/Barrier", barrier)
        call(controller, "Sync/Barrier", barrier)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind((f"127.0.0.{2 + rank}", 0))
            sock.settimeout(PATIENCE_S)
            sock.connect((socket.inet_ntoa(answer.ipv4.to_bytes(4, "big")), answer.port))
            sock.send(packet(job + rank))
            return answer, values_of(sock.recv(4096))

    for job in range(77, 77 + num_jobs):
        for answer, values in in_threads([functools.partial(work, job, rank) for rank in (0, 1)]):
            assert values == {2 * job + 1} and answer.session_id == job
            assert answer.ipv4 == 0x7F000001 and answer.mac == 0  # loopback has none


# --- mistakes


def test_workers_that_disagree_on_their_number(controller: Controller) -> None:
    first, second = in_threads([lambda: form(controller, 0, 2), lambda: form(controller, 1, 3)])
    assert isinstance(first, MismatchError) and isinstance(second, MismatchError)
    assert {"with 2 workers", "with 3 workers"} & set(re.findall(r"with \d workers", str(first)))
    assert str(first) == str(second) and "2" in str(first) and "3" in str(first)


def test_missing_workers_are_named_to_all(controller: Controller) -> None:
    import grpc

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: in_threads([lambda: form(controller, 2, 4)]))
        wait_until(lambda: bool(controller._gatherings))
        request = encode(BroadcastRequest(0, 0, 4, 0, group=5, timeout_ms=1))
        with pytest.raises(grpc.RpcError, match="workers 1, 3 of 4 did not come") as caught:
            call(controller, "Sync/Broadcast", request)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        (error,) = waiting.result(PATIENCE_S)  # long before its own time is over
    assert isinstance(error, OperationTimeoutError) and error.ranks == (1, 3), error
    assert "workers 1, 3 of 4 did not come" in str(error)


def test_a_worker_that_gave_up_may_come_again(controller: Controller) -> None:
    import grpc

    with grpc.insecure_channel(controller.address) as channel:
        request = encode(BroadcastRequest(0, 1, 2, 0, group=5))
        given_up = channel.unary_unary("/switchml_proto.Sync/Broadcast").future(request)
        wait_until(lambda: bool(controller._gatherings))
        with pytest.raises(grpc.RpcError, match="is already waiting"):
            call(controller, "Sync/Broadcast", request)
        given_up.cancel()
        wait_until(lambda: not controller._gatherings)
    first, second = in_threads([lambda: form(controller, 0, 2), lambda: form(controller, 1, 2)])
    assert first == second and isinstance(first, tuple)


@pytest.mark.parametrize(
    ("method", "message", "text"),
    [
        ("Sync/Barrier", BarrierRequest(0), "there must be 1 to 1024"),
        ("Sync/Barrier", BarrierRequest(2_000_000), "there must be 1 to 1024"),
        ("Sync/Barrier", BarrierRequest(2, 9, rank=2), "there cannot be a worker 2 of 2"),
        ("Sync/Broadcast", BroadcastRequest(0, 2, 2), "there cannot be a worker 2 of 2"),
        ("Sync/Broadcast", BroadcastRequest(0, 0, 2, root=2), "root 2 is not below 2"),
        ("Session/UdpSession", UdpSessionRequest(1, 0, 2, packet_size=2), "256 bytes"),
        ("Session/UdpSession", UdpSessionRequest(1, 2, 2, 0, 0x7F000001, 3), "rank 2 is not below"),
        ("Session/UdpSession", UdpSessionRequest(1, 0, 2, 0, 0x08080808, 3), "8.8.8.8 are not"),
        ("Session/UdpSession", UdpSessionRequest(1, 0, 2, 0, 0, 3), "0.0.0.0 is not the address"),
        ("Session/UdpSession", UdpSessionRequest(1, 0, 2, 0, 0xE0000001, 3), "224.0.0.1 is not"),
        ("Session/UdpSession", UdpSessionRequest(1, 0, 2, 0, 0xFFFFFFFF, 3), "255.255.255.255 is"),
        ("Session/UdpSession", UdpSessionRequest(1, 0, 9999, 0, 0x7F000001, 3), "1024 workers"),
        ("Session/UdpSession", UdpSessionRequest(1, 0, 2, 0, 0x7F000001, 3, 9999), "8192 slots"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused(
    controller: Controller, method: str, message: Any, text: str
) -> None:
    import grpc

    with pytest.raises(grpc.RpcError, match=text) as caught:
        call(controller, method, encode(message))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert not controller._gatherings


def test_jobs_without_a_group_differ_by_their_sizes_and_roots(controller: Controller) -> None:
    """SwitchML's own: a waiting worker of another job spoils nothing."""

    def broadcast(rank: int, size: int, root: int) -> int:
        request = encode(BroadcastRequest(size if rank == root else 0, rank, size, root))
        return decode(BroadcastResponse, call(controller, "Sync/Broadcast", request)).value

    jobs = [(0, 2, 0), (0, 3, 0), (1, 2, 1), (1, 3, 0), (0, 2, 1), (1, 2, 0), (2, 3, 0)]
    found = in_threads([functools.partial(broadcast, *job) for job in jobs])
    assert found == [size for _, size, _ in jobs]
    assert not controller._gatherings


def test_garbage(controller: Controller) -> None:
    import grpc

    for data in (b"\xff" * 20, b"\x0f", b"\x08"):
        for method in ("Sync/Barrier", "Sync/Broadcast", "Session/UdpSession"):
            with pytest.raises(grpc.RpcError) as caught:
                call(controller, method, data)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as caught:
        call(controller, "Sync/Barrier", bytes(1000))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.RpcError) as caught:
        call(controller, "Session/RdmaSession", b"")
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    host, port = controller.address.split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.send(b"\x00garbage\r\n\r\n" * 100)
    first, second = in_threads([lambda: form(controller, 0, 2), lambda: form(controller, 1, 2)])
    assert first == second and isinstance(first, tuple)


def test_no_controller() -> None:
    pytest.importorskip("grpc", reason="needs grpcio")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(UnavailableError, match=f"controller 127.0.0.1:{port}: no answer"):
            session_from_controller(f"127.0.0.1:{port}", 0, 2, timeout_s=0.2)
    with pytest.raises(UnavailableError, match="is `torchrelay switch --controller-port` running"):
        session_from_controller(f"127.0.0.1:{port}", 0, 2, timeout_s=0.2)


def test_a_port_that_is_taken(controller: Controller) -> None:
    server = controller.server  # type: ignore[attr-defined]
    with pytest.raises(UnavailableError, match="cannot be bound"):
        Controller(server, port=controller.port)


def test_without_grpcio_both_sides_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(UnavailableError, match=r"pip install grpcio"):
        session_from_controller("127.0.0.1", 0, 2)
    with (
        SwitchServer(UdpDataPlane(port=0)) as server,
        pytest.raises(UnavailableError, match=r"pip install grpcio"),
    ):
        Controller(server, port=0)

"""A switch's controller: its messages, sessions that workers form by it, and their mistakes."""

from __future__ import annotations

import functools
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from switch_ports import packet, values_of
from torchrelay.aggregation.switch import (
    Controller,
    SwitchServer,
    UdpDataPlane,
    _controller,
    _server,
)
from torchrelay.errors import TorchRelayError, UnavailableError
from waiting import eventually

pytest.importorskip("grpc", reason="needs grpcio")
pb: Any = pytest.importorskip(
    "torchrelay.aggregation.switch._controller_pb2", reason="needs protobuf"
)

PROTO = Path(_controller.__file__).with_name("_controller.proto")
PATIENCE_S = 60.0


@pytest.fixture
def controller() -> Iterator[Controller]:
    with (
        SwitchServer(UdpDataPlane(port=0), allow=["127.0.0.0/8"]) as server,
        Controller(server, port=0) as one,
    ):
        one.server = server  # type: ignore[attr-defined]
        yield one


def call(controller: Controller, method: str, request: Any) -> Any:
    """Call the method with a message or bytes; raises grpc.RpcError."""
    import grpc

    kind = {"Barrier": pb.BarrierResponse, "Broadcast": pb.BroadcastResponse}.get(
        method.split("/")[1], pb.UdpSessionResponse
    )
    data = request if isinstance(request, bytes) else request.SerializeToString()
    with grpc.insecure_channel(controller.address) as channel:
        name = f"/switchml_proto.{method}"
        return kind.FromString(channel.unary_unary(name)(data, timeout=PATIENCE_S))


def broadcast_request(value: int, rank: int, num_workers: int, root: int = 0) -> Any:
    return pb.BroadcastRequest(value=value, rank=rank, num_workers=num_workers, root=root)


def session_request(
    session_id: int, rank: int, num_workers: int, ipv4: int, packet_size: int = 3, mac: int = 0
) -> Any:
    return pb.UdpSessionRequest(
        session_id=session_id,
        rank=rank,
        num_workers=num_workers,
        ipv4=ipv4,
        packet_size=packet_size,
        mac=mac,
    )


def barrier_request(num_workers: int) -> Any:
    return pb.BarrierRequest(num_workers=num_workers)


def in_threads(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """What they return or raise."""

    def run(function: Callable[[], Any]) -> Any:
        try:
            return function()
        except TorchRelayError as error:
            return error

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(run, functions))


# --- messages


def test_generated_messages_are_those_of_the_proto_file() -> None:
    text = re.sub(r"//.*", "", PROTO.read_text())
    types = {"uint64": 4, "PacketSize": 14, "uint32": 13}  # FieldDescriptor.TYPE_...
    declared = {
        name: {
            (field, int(index), types[kind])
            for kind, field, index in re.findall(r"(\w+) (\w+) = (\d+);", body)
        }
        for name, body in re.findall(r"message (\w+) \{(.*?)\}", text, re.DOTALL)
    }
    assert declared == {
        name: {(field.name, field.number, field.type) for field in kind.fields}
        for name, kind in pb.DESCRIPTOR.message_types_by_name.items()
    }
    rpcs = {
        name: re.findall(r"rpc (\w+) \((\w+)\) returns \((\w+)\);", body)
        for name, body in re.findall(r"service (\w+) \{(.*?)\}", text, re.DOTALL)
    }
    assert rpcs == {
        name: [(rpc.name, rpc.input_type.name, rpc.output_type.name) for rpc in service.methods]
        for name, service in pb.DESCRIPTOR.services_by_name.items()
    }
    assert pb.DESCRIPTOR.package == "switchml_proto"


def test_bytes_are_switchmls() -> None:
    assert pb.BroadcastResponse(value=150).SerializeToString() == b"\x08\x96\x01"
    request = pb.UdpSessionRequest(rank=1, packet_size=3)
    assert request.SerializeToString() == b"\x10\x01\x38\x03"


# --- sessions


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_the_originals_workers(
    controller: Controller, num_jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They form one session at a time, name no group, send from any port, and never leave: a later
    job takes the place of an earlier one.
    """
    monkeypatch.setattr(_server, "_TAKEOVER_S", 0.1)

    def work(job: int, rank: int) -> tuple[Any, set[int]]:
        request = broadcast_request(job if rank == 0 else 0, rank, 2)
        session_id = call(controller, "Sync/Broadcast", request).value
        barrier = barrier_request(2)
        if rank == 1:
            call(controller, "Sync/Barrier", barrier)
        address = int.from_bytes(socket.inet_aton(f"127.0.0.{2 + rank}"), "big")
        join = session_request(session_id, rank, 2, address, mac=0xAABB, packet_size=1)
        answer = call(controller, "Session/UdpSession", join)
        if rank == 0:
            call(controller, "Sync/Barrier", barrier)
        call(controller, "Sync/Barrier", barrier)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind((f"127.0.0.{2 + rank}", 0))
            sock.settimeout(PATIENCE_S)
            port = controller.server.plane.port  # type: ignore[attr-defined]
            sock.connect((socket.inet_ntoa(answer.ipv4.to_bytes(4, "big")), port))
            sock.send(packet(job + rank))
            return answer, values_of(sock.recv(4096))

    for job in range(77, 77 + num_jobs):
        for answer, values in in_threads([functools.partial(work, job, rank) for rank in (0, 1)]):
            assert values == {2 * job + 1} and answer.session_id == job
            assert answer.ipv4 == 0x7F000001 and answer.mac == 0  # loopback has none


# --- mistakes


def test_who_waits_too_long_is_released(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    import grpc

    monkeypatch.setattr(_controller, "_MAX_WAIT_S", 0.01)
    for method, request in (
        ("Sync/Broadcast", broadcast_request(5, 1, 4)),
        ("Sync/Barrier", barrier_request(4)),
    ):
        with pytest.raises(grpc.RpcError, match="only 1 of 4 workers came within") as caught:
            call(controller, method, request)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert not controller._waiting


def test_a_worker_that_gave_up_may_come_again(controller: Controller) -> None:
    import grpc

    with grpc.insecure_channel(controller.address) as channel:
        request = broadcast_request(5, 1, 2, root=1)
        given_up = channel.unary_unary("/switchml_proto.Sync/Broadcast").future(
            request.SerializeToString()
        )
        eventually(lambda: bool(controller._waiting))
        with pytest.raises(grpc.RpcError, match="is already waiting"):
            call(controller, "Sync/Broadcast", request)
        given_up.cancel()
        eventually(lambda: not controller._waiting)
    requests = [broadcast_request(6 + rank, rank, 2, root=1) for rank in (0, 1)]
    calls = [functools.partial(call, controller, "Sync/Broadcast", one) for one in requests]
    assert [answer.value for answer in in_threads(calls)] == [7, 7]


@pytest.mark.parametrize(
    ("method", "message", "text"),
    [
        ("Sync/Barrier", barrier_request(0), "there must be 1 to 1024"),
        ("Sync/Barrier", barrier_request(2_000_000), "there must be 1 to 1024"),
        ("Sync/Broadcast", broadcast_request(0, 2, 2), "rank 2 and root 0 must be below 2"),
        ("Sync/Broadcast", broadcast_request(0, 0, 2, root=2), "root 2 must be below 2 workers"),
        ("Session/UdpSession", session_request(1, 0, 2, 0, packet_size=2), "256 bytes"),
        ("Session/UdpSession", session_request(1, 2, 2, 0x7F000001), "rank 2 is not below"),
        ("Session/UdpSession", session_request(1, 0, 2, 0x08080808), "8.8.8.8 are not"),
        ("Session/UdpSession", session_request(1, 0, 2, 0), "0.0.0.0 is not the address"),
        ("Session/UdpSession", session_request(1, 0, 2, 0xE0000001), "224.0.0.1 is not"),
        ("Session/UdpSession", session_request(1, 0, 2, 0xFFFFFFFF), "255.255.255.255 is"),
        ("Session/UdpSession", session_request(1, 0, 9999, 0x7F000001), "1024 workers"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused(
    controller: Controller, method: str, message: Any, text: str
) -> None:
    import grpc

    with pytest.raises(grpc.RpcError, match=text) as caught:
        call(controller, method, message)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert not controller._waiting


def test_jobs_differ_by_their_sizes_and_roots(controller: Controller) -> None:
    """SwitchML's own: a waiting worker of another job spoils nothing."""

    def broadcast(rank: int, size: int, root: int) -> int:
        request = broadcast_request(size if rank == root else 0, rank, size, root)
        return int(call(controller, "Sync/Broadcast", request).value)

    jobs = [(0, 2, 0), (0, 3, 0), (1, 2, 1), (1, 3, 0), (0, 2, 1), (1, 2, 0), (2, 3, 0)]
    found = in_threads([functools.partial(broadcast, *job) for job in jobs])
    assert found == [size for _, size, _ in jobs]
    assert not controller._waiting


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
    call(controller, "Sync/Barrier", barrier_request(1))


def test_a_port_that_is_taken(controller: Controller) -> None:
    server = controller.server  # type: ignore[attr-defined]
    with pytest.raises(UnavailableError, match="cannot be bound"):
        Controller(server, port=controller.port)


def test_without_grpcio_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    with (
        SwitchServer(UdpDataPlane(port=0)) as server,
        pytest.raises(UnavailableError, match=r"pip install grpcio"),
    ):
        Controller(server, port=0)

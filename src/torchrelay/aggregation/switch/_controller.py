"""The controller of a switch, over gRPC, through which SwitchML's workers form their session.

See ``_controller.proto``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from torchrelay._addresses import DISCARD_PORT, address_of_device, address_towards, mac_of_device
from torchrelay._resource import Resource
from torchrelay.aggregation.switch._control import Join
from torchrelay.aggregation.switch._data_plane import SessionShape
from torchrelay.aggregation.switch._server import SwitchServer
from torchrelay.errors import (
    OperationTimeoutError,
    ProtocolError,
    TorchRelayError,
    UnavailableError,
)

if TYPE_CHECKING:
    from torchrelay.aggregation.switch import _controller_pb2 as pb

__all__ = ["Controller"]

_NUMEL_OF_SIZE = {1: 64, 3: 256}  # PacketSize, and the values of a packet
_MAX_BYTES = 256  # of a message; the longest here has 64
_MAX_GROUP = 1024  # workers, as of a session
_MAX_CALLS = 2 * _MAX_GROUP  # at a time; each takes a thread
_MAX_WAIT_S = 600.0
_POLL_S = 0.2  # to look whether a caller that waits is still there
_MAX_JOIN_S, _RETRY_S = 15.0, 0.2  # for a place in the switch

_Key = tuple[int, ...]  # numbers of workers, and root; SwitchML's workers name no job


class Controller(Resource):
    """Serves the calls of ``_controller.proto`` for a switch, until :meth:`close`.

    Nothing is encrypted or authenticated: whoever reaches the port may form sessions.

    Args:
        server: the switch; it must be closed after the controller.
        address: to bind; an IPv4 address of this host.
        port: TCP; 0 is any free one.

    Raises:
        UnavailableError: grpcio or protobuf is missing, or the port cannot be bound.
    """

    def __init__(self, server: SwitchServer, address: str = "127.0.0.1", port: int = 50099) -> None:
        try:
            import grpc  # noqa: PLC0415 - optional

            from torchrelay.aggregation.switch import _controller_pb2  # noqa: PLC0415
        except ImportError as error:
            raise UnavailableError(
                f"the controller of a switch needs the packages grpcio and protobuf ({error}): "
                "pip install grpcio protobuf"
            ) from error
        self._grpc: Any = grpc
        self._messages: Any = _controller_pb2
        self._server = server
        self._waiting: dict[_Key, dict[int, int]] = {}  # values by rank
        self._changed = threading.Condition()
        self._calls = grpc.server(
            ThreadPoolExecutor(_MAX_CALLS, "switch-controller"),
            options=[("grpc.max_receive_message_length", _MAX_BYTES), ("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=_MAX_CALLS,
        )
        services: dict[str, dict[str, Any]] = {
            "Session": {"UdpSession": self._udp_session},
            "Sync": {"Barrier": self._barrier, "Broadcast": self._broadcast},
        }
        for service, answers in services.items():
            handlers = {name: self._handler(name, answer) for name, answer in answers.items()}
            self._calls.add_generic_rpc_handlers(
                [grpc.method_handlers_generic_handler(f"switchml_proto.{service}", handlers)]
            )
        try:
            self.port: int = self._calls.add_insecure_port(f"{address}:{port}")
        except Exception as error:  # gRPC names none
            raise UnavailableError(
                f"controller {address}:{port} cannot be bound: {error}"
            ) from error
        self.address = f"{address}:{self.port}"
        self._calls.start()

    def close(self) -> None:
        """Stop serving; calls in progress fail. Idempotent."""
        self._calls.stop(grace=None).wait()

    def _handler(self, name: str, answer: Any) -> Any:
        """Return a method's handler, which sends errors of ``answer`` as status and text."""
        from google.protobuf.message import DecodeError  # noqa: PLC0415 - optional

        status = self._grpc.StatusCode
        codes = {
            OperationTimeoutError: status.DEADLINE_EXCEEDED,
            UnavailableError: status.RESOURCE_EXHAUSTED,
        }

        def handle(data: bytes, context: Any) -> bytes:
            try:
                request = getattr(self._messages, f"{name}Request").FromString(data)
                return bytes(answer(request, context).SerializeToString())
            except DecodeError as error:
                context.abort(status.INVALID_ARGUMENT, f"not a {name}Request: {error}")
            except TorchRelayError as error:
                context.abort(codes.get(type(error), status.INVALID_ARGUMENT), str(error))
            raise AssertionError  # abort() raises

        return self._grpc.unary_unary_rpc_method_handler(handle)

    # --- Sync

    def _barrier(self, request: pb.BarrierRequest, context: Any) -> Any:
        self._gather("barrier", (request.num_workers,), context)
        return self._messages.BarrierResponse()

    def _broadcast(self, request: pb.BroadcastRequest, context: Any) -> Any:
        size, root = request.num_workers, request.root
        if not (request.rank < size and root < size):
            raise ProtocolError(
                f"broadcast: rank {request.rank} and root {root} must be below {size} workers"
            )
        values = self._gather("broadcast", (size, root), context, request.rank, request.value)
        return self._messages.BroadcastResponse(value=values[root])

    def _gather(
        self, step: str, key: _Key, context: Any, rank: int | None = None, value: int = 0
    ) -> dict[int, int]:
        """Return the values of all workers of a group, by rank; waits for them."""
        size, *_ = key
        if not 1 <= size <= _MAX_GROUP:
            raise ProtocolError(f"{step}: {size} workers; there must be 1 to {_MAX_GROUP}")
        deadline_s = time.monotonic() + _MAX_WAIT_S
        with self._changed:
            values = self._waiting.setdefault(key, {})
            if rank is None:
                rank = next(free for free in range(size) if free not in values)
            elif rank in values:
                raise ProtocolError(f"{step}: worker {rank} of {size} is already waiting")
            values[rank] = value
            if len(values) == size:
                del self._waiting[key]
                self._changed.notify_all()
            while len(values) < size:
                self._changed.wait(_POLL_S)
                if len(values) < size and not (
                    context.is_active() and time.monotonic() < deadline_s
                ):
                    came = len(values)
                    del values[rank]
                    if not values:
                        del self._waiting[key]
                    raise OperationTimeoutError(
                        f"{step}: only {came} of {size} workers came within {_MAX_WAIT_S:g} s"
                    )
            return values

    # --- Session

    def _udp_session(self, request: pb.UdpSessionRequest, _: Any) -> Any:
        address = str(ipaddress.IPv4Address(request.ipv4))
        self._join(request, address)
        mac, own = _own_address(self._server.plane.address, address)
        return self._messages.UdpSessionResponse(
            session_id=request.session_id, mac=mac, ipv4=int(ipaddress.IPv4Address(own))
        )

    def _join(self, request: pb.UdpSessionRequest, address: str) -> None:
        """Admit the packets of a worker of SwitchML, from any port of its address."""
        numel = _NUMEL_OF_SIZE.get(request.packet_size)
        if numel is None:
            raise ProtocolError(
                f"packet_size {request.packet_size}: a packet has 256 bytes (1) or 1024 (3)"
            )
        if request.rank == 0:  # it makes the session, whose slots must be clear
            self._server.reset(request.session_id)
        shape = SessionShape(request.num_workers, self._server.max_slots, numel)
        join = Join(request.rank, shape, client=0)
        deadline_s = time.monotonic() + _MAX_JOIN_S
        while True:
            try:
                return self._server.join(request.session_id, join, address, (0, 0))
            except UnavailableError:  # an earlier job's session, say, which is about to end
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(_RETRY_S)


def _own_address(bound: str, worker: str) -> tuple[int, str]:
    """Return this host's MAC address (0 if it has none) and IPv4 address towards a worker."""
    if bound == "0.0.0.0":
        with contextlib.suppress(OSError):
            bound = address_towards((worker, DISCARD_PORT))
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):  # it has no IPv4 address
            if address_of_device(name) == bound:
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                    return int.from_bytes(mac_of_device(name, probe), "big"), bound
    return 0, bound

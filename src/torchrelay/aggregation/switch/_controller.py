"""The controller of a switch, over gRPC.

SwitchML's workers form their session through it; groups of ``sml`` ask it for the switch's address.

See ``_controller.proto``. One thread serves all calls with asyncio: a worker that waits for others
takes no thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchrelay._addresses import DISCARD_PORT, address_of_device, address_towards, mac_of_device
from torchrelay._resource import Resource
from torchrelay.aggregation.switch._control import Join
from torchrelay.aggregation.switch._data_plane import SessionShape
from torchrelay.aggregation.switch._server import SwitchServer
from torchrelay.aggregation.switch._service import ServiceThread
from torchrelay.errors import (
    OperationTimeoutError,
    ProtocolError,
    TorchRelayError,
    UnavailableError,
)

if TYPE_CHECKING:
    from torchrelay.aggregation.switch import _controller_pb2 as pb

__all__ = ["DEFAULT_PORT", "Controller", "import_grpc"]

DEFAULT_PORT = 50099
_NUMEL_OF_SIZE = {1: 64, 3: 256}  # PacketSize, and the values of a packet
_MAX_BYTES = 256  # of a message; the longest here has 64
_MAX_CALLS = 4096  # at a time
_MAX_GROUP = 1024  # workers, as of a session
_MAX_WAIT_S = 600.0
_MAX_JOIN_S, _RETRY_S = 15.0, 0.2  # for a place in the switch


def import_grpc() -> tuple[Any, Any]:
    """Return the module ``grpc``, and the messages of ``_controller.proto``.

    Raises:
        UnavailableError: a package is not installed.
    """
    try:
        import grpc  # noqa: PLC0415 - optional

        from torchrelay.aggregation.switch import _controller_pb2  # noqa: PLC0415
    except ImportError as error:
        raise UnavailableError(
            f"the controller of a switch needs the packages grpcio and protobuf ({error}): pip "
            "install grpcio protobuf"
        ) from error
    return grpc, _controller_pb2


@dataclass
class _Gathering:
    """Workers that wait for each other, with their values by rank."""

    done: asyncio.Future[dict[int, int]]
    values: dict[int, int] = field(default_factory=dict)


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

    def __init__(
        self, server: SwitchServer, address: str = "127.0.0.1", port: int = DEFAULT_PORT
    ) -> None:
        self._grpc, self._messages = import_grpc()
        self._server = server
        self._gatherings: dict[_Key, _Gathering] = {}
        self._stop = asyncio.Event()
        started: Future[int] = Future()
        self._thread = ServiceThread(
            "switch-controller", lambda: asyncio.run(self._serve(address, port, started))
        )
        self.port = started.result()
        self.address = f"{address}:{self.port}"

    def check(self) -> None:
        """Raise if the thread has ended.

        Raises:
            UnavailableError: calls are no longer served.
        """
        self._thread.check()

    def close(self) -> None:
        """Stop serving; calls in progress fail. Idempotent."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self, address: str, port: int, started: Future[int]) -> None:
        from grpc import aio  # noqa: PLC0415 - optional

        self._loop = asyncio.get_running_loop()
        options = [("grpc.max_receive_message_length", _MAX_BYTES), ("grpc.so_reuseport", 0)]
        server = aio.server(options=options, maximum_concurrent_rpcs=_MAX_CALLS)
        answers = {
            "UdpSession": self._udp_session,
            "Barrier": self._barrier,
            "Broadcast": self._broadcast,
        }
        for service in self._messages.DESCRIPTOR.services_by_name.values():
            handlers = {
                method.name: self._handler(method, answers[method.name])
                for method in service.methods
            }
            server.add_generic_rpc_handlers(
                [self._grpc.method_handlers_generic_handler(service.full_name, handlers)]
            )
        try:
            bound = server.add_insecure_port(f"{address}:{port}")
            await server.start()
        except Exception as error:  # gRPC names none
            started.set_exception(
                UnavailableError(f"controller {address}:{port} cannot be bound: {error}")
            )
            return
        started.set_result(bound)
        await self._stop.wait()
        await server.stop(grace=None)

    def _handler(self, method: Any, answer: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return a method's handler, which sends errors of ``answer`` as status and text."""
        status = self._grpc.StatusCode
        codes = {
            OperationTimeoutError: status.DEADLINE_EXCEEDED,
            UnavailableError: status.RESOURCE_EXHAUSTED,
        }

        async def handle(data: bytes, context: Any) -> bytes:
            try:
                answered = await answer(self._parse(method.input_type.name, data))
                return bytes(answered.SerializeToString())
            except TorchRelayError as error:
                await context.abort(codes.get(type(error), status.INVALID_ARGUMENT), str(error))
                raise

        return self._grpc.unary_unary_rpc_method_handler(handle)

    def _parse(self, kind: str, data: bytes) -> Any:
        from google.protobuf.message import DecodeError  # noqa: PLC0415 - optional

        try:
            return getattr(self._messages, kind).FromString(data)
        except DecodeError as error:
            raise ProtocolError(f"not a {kind}: {error}") from error

    # --- Sync

    async def _barrier(self, request: pb.BarrierRequest) -> pb.BarrierResponse:
        await self._gather("barrier", (request.num_workers,))
        answer: pb.BarrierResponse = self._messages.BarrierResponse()
        return answer

    async def _broadcast(self, request: pb.BroadcastRequest) -> pb.BroadcastResponse:
        size, root = request.num_workers, request.root
        if not (request.rank < size and root < size):
            raise ProtocolError(
                f"broadcast: rank {request.rank} and root {root} must be below {size} workers"
            )
        values = await self._gather("broadcast", (size, root), request.rank, request.value)
        answer: pb.BroadcastResponse = self._messages.BroadcastResponse(value=values[root])
        return answer

    async def _gather(
        self, step: str, key: _Key, rank: int | None = None, value: int = 0
    ) -> dict[int, int]:
        """Wait for all workers of a job; return their values.

        The calls of a barrier name no rank, so they are numbered.
        """
        size, *_ = key
        if not 1 <= size <= _MAX_GROUP:
            raise ProtocolError(f"{step}: {size} workers; there must be 1 to {_MAX_GROUP}")
        gathering = self._gatherings.get(key)
        if gathering is None:
            gathering = _Gathering(asyncio.get_running_loop().create_future())
            self._gatherings[key] = gathering
        values = gathering.values
        if rank is None:
            rank = next(free for free in range(size) if free not in values)
        elif rank in values:
            raise ProtocolError(f"{step}: worker {rank} of {size} is already waiting")
        values[rank] = value
        if len(values) == size:
            del self._gatherings[key]
            gathering.done.set_result(values)
        try:
            return await asyncio.wait_for(asyncio.shield(gathering.done), _MAX_WAIT_S)
        except asyncio.TimeoutError:
            raise OperationTimeoutError(
                f"{step}: only {len(values)} of {size} workers came within {_MAX_WAIT_S:g} s"
            ) from None
        finally:
            if not gathering.done.done():  # the caller gave up, or is gone
                del values[rank]
                if not values:
                    del self._gatherings[key]

    # --- Session

    async def _udp_session(self, request: pb.UdpSessionRequest) -> pb.UdpSessionResponse:
        address = str(ipaddress.IPv4Address(request.ipv4))
        if not request.joins:
            await self._join(request, address)
        mac, own = _own_address(self._server.plane.address, address)
        answer: pb.UdpSessionResponse = self._messages.UdpSessionResponse(
            session_id=request.session_id,
            mac=mac,
            ipv4=int(ipaddress.IPv4Address(own)),
            port=self._server.plane.port,
        )
        return answer

    async def _join(self, request: pb.UdpSessionRequest, address: str) -> None:
        """Admit the packets of a worker of SwitchML, from any port of its address."""
        numel = _NUMEL_OF_SIZE.get(request.packet_size)
        if numel is None:
            raise ProtocolError(
                f"packet_size {request.packet_size}: a packet has 256 bytes (1) or 1024 (3)"
            )
        if request.rank == 0:  # it makes the session, whose slots must be clear
            await asyncio.to_thread(self._server.reset, request.session_id)
        shape = SessionShape(request.num_workers, self._server.max_slots, numel)
        join = Join(request.rank, shape, client=0)
        deadline_s = time.monotonic() + _MAX_JOIN_S
        while True:
            try:
                await asyncio.to_thread(
                    self._server.join, request.session_id, join, address, (0, 0)
                )
            except UnavailableError:  # an earlier job's session, say, which is about to end
                if time.monotonic() > deadline_s:
                    raise
                await asyncio.sleep(_RETRY_S)
            else:
                return


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

"""The controller of a switch: workers form sessions by it, over gRPC.

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
from torchrelay._waiting import listed
from torchrelay.aggregation.switch._control import Join
from torchrelay.aggregation.switch._data_plane import SessionShape
from torchrelay.aggregation.switch._server import SwitchServer
from torchrelay.aggregation.switch._service import ServiceThread
from torchrelay.errors import (
    MismatchError,
    OperationTimeoutError,
    ProtocolError,
    TorchRelayError,
    UnavailableError,
)

if TYPE_CHECKING:
    from torchrelay.aggregation.switch import _controller_pb2 as pb

__all__ = ["DEFAULT_PORT", "NUMEL_OF_SIZE", "Controller", "import_grpc"]

DEFAULT_PORT = 50099
NUMEL_OF_SIZE = {1: 64, 3: 256}  # PacketSize, and the values of a packet
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


_Key = tuple[str, int, tuple[int | None, ...]]  # step, group, and more where there is no group


@dataclass
class _Gathering:
    """Workers of a group that wait for each other, and what they have said."""

    num_workers: int
    root: int | None
    done: asyncio.Future[int]
    present: dict[int, int] = field(default_factory=dict)  # values by rank, or by order of arrival

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.num_workers) if rank not in self.present]


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

    def _handler(self, method: Any, answer: Callable[[Any, float], Awaitable[Any]]) -> Any:
        """A method's handler. The errors of ``answer`` go to the caller as status and text."""
        status = self._grpc.StatusCode
        codes = {
            MismatchError: status.FAILED_PRECONDITION,
            OperationTimeoutError: status.DEADLINE_EXCEEDED,
            ProtocolError: status.INVALID_ARGUMENT,
            UnavailableError: status.RESOURCE_EXHAUSTED,
        }

        async def handle(data: bytes, context: Any) -> bytes:
            try:
                answered = await answer(self._parse(method.input_type.name, data), _left_s(context))
                return bytes(answered.SerializeToString())
            except TorchRelayError as error:
                missing = ",".join(map(str, getattr(error, "ranks", ())))
                await context.abort(
                    codes.get(type(error), status.INVALID_ARGUMENT),
                    str(error),
                    (("missing", missing),) if missing else (),
                )
                raise

        return self._grpc.unary_unary_rpc_method_handler(handle)

    def _parse(self, kind: str, data: bytes) -> Any:
        from google.protobuf.message import DecodeError  # noqa: PLC0415 - optional

        try:
            return getattr(self._messages, kind).FromString(data)
        except DecodeError as error:
            raise ProtocolError(f"not a {kind}: {error}") from error

    # --- Sync

    async def _barrier(self, request: pb.BarrierRequest, left_s: float) -> pb.BarrierResponse:
        await self._gather("barrier", request, left_s, request.rank, None, 0)
        answer: pb.BarrierResponse = self._messages.BarrierResponse()
        return answer

    async def _broadcast(self, request: pb.BroadcastRequest, left_s: float) -> pb.BroadcastResponse:
        if request.root >= request.num_workers:
            raise ProtocolError(f"root {request.root} is not below {request.num_workers} workers")
        value = await self._gather(
            "broadcast", request, left_s, request.rank, request.root, request.value
        )
        answer: pb.BroadcastResponse = self._messages.BroadcastResponse(value=value)
        return answer

    async def _gather(
        self,
        step: str,
        request: pb.BarrierRequest | pb.BroadcastRequest,
        left_s: float,
        rank: int,
        root: int | None,
        value: int,
    ) -> int:
        """Wait for all workers of a group; return the root's value."""
        size = request.num_workers
        if not 1 <= size <= _MAX_GROUP:
            raise ProtocolError(f"{step}: {size} workers; there must be 1 to {_MAX_GROUP}")
        if rank >= size:
            raise ProtocolError(f"{step}: there cannot be a worker {rank} of {size}")
        # SwitchML's workers name no group: only these tell their jobs apart.
        key = (step, request.group, () if request.group else (size, root))
        gathering = self._gatherings.get(key)
        if gathering is None:
            gathering = _Gathering(size, root, asyncio.get_running_loop().create_future())
            self._gatherings[key] = gathering
        if step == "barrier" and request.group == 0:  # of SwitchML: it has no rank
            rank = gathering.missing[0]
        if (size, root) != (gathering.num_workers, gathering.root):
            at_root = "" if root is None else f" and root {root}"
            text = (
                f"{step}: worker {rank} came with {size} workers{at_root}, others with "
                f"{gathering.num_workers}{'' if root is None else f' and root {gathering.root}'}"
            )
            self._end(key, gathering, MismatchError(text))
            raise MismatchError(text)
        if rank in gathering.present:
            raise ProtocolError(f"{step}: worker {rank} of {size} is already waiting")
        gathering.present[rank] = value
        if not gathering.missing:
            self._end(key, gathering, gathering.present.get(root or 0, 0))
        return await self._wait(
            key, gathering, rank, min(left_s, request.timeout_ms / 1e3 or left_s)
        )

    async def _wait(self, key: _Key, gathering: _Gathering, rank: int, timeout_s: float) -> int:
        try:
            return await asyncio.wait_for(asyncio.shield(gathering.done), timeout_s)
        except asyncio.TimeoutError:  # or that of another worker, which result() raises again
            missing = gathering.missing
            error = OperationTimeoutError(
                f"{key[0]}: {listed('worker', missing)} of {gathering.num_workers} did not come "
                f"within {timeout_s:.3g} s",
                missing,
            )
            self._end(key, gathering, error)  # all that wait get the same error
            return gathering.done.result()
        except asyncio.CancelledError:  # the caller is gone
            gathering.present.pop(rank, None)
            if not gathering.present and self._gatherings.get(key) is gathering:
                del self._gatherings[key]
            raise

    def _end(self, key: _Key, gathering: _Gathering, result: int | TorchRelayError) -> None:
        if self._gatherings.get(key) is gathering:
            del self._gatherings[key]
        if gathering.done.done():
            return
        if isinstance(result, int):
            gathering.done.set_result(result)
        else:
            gathering.done.set_exception(result)
            gathering.done.exception()  # it counts as seen, if nobody waits

    # --- Session

    async def _udp_session(
        self, request: pb.UdpSessionRequest, left_s: float
    ) -> pb.UdpSessionResponse:
        numel = NUMEL_OF_SIZE.get(request.packet_size)
        if numel is None:
            raise ProtocolError(
                f"packet_size {request.packet_size}: a packet has 256 bytes (1) or 1024 (3)"
            )
        shape = SessionShape(
            request.num_workers,
            request.num_slots or self._server.max_slots,
            numel,
            sequenced=bool(request.joins),
        )
        address = str(ipaddress.IPv4Address(request.ipv4))
        deadline_s = time.monotonic() + min(left_s, _MAX_JOIN_S)
        while True:
            try:
                await asyncio.to_thread(self._admit, request, shape, address)
            except UnavailableError:  # an earlier job's session, say, which is about to end
                if time.monotonic() > deadline_s:
                    raise
                await asyncio.sleep(_RETRY_S)
            else:
                break
        mac, own = _own_address(self._server.plane.address, address)
        answer: pb.UdpSessionResponse = self._messages.UdpSessionResponse(
            session_id=request.session_id,
            mac=mac,
            ipv4=int(ipaddress.IPv4Address(own)),
            port=self._server.plane.port,
        )
        return answer

    def _admit(self, request: pb.UdpSessionRequest, shape: SessionShape, address: str) -> None:
        if request.rank == 0:  # it makes the session, whose slots must be clear
            self._server.reset(request.session_id)
        if request.joins:
            self._server.open(request.session_id, request.rank, shape, address)
        else:
            join = Join(request.rank, shape, client=0)
            self._server.join(request.session_id, join, address, (0, 0))


def _left_s(context: Any) -> float:
    left_s = context.time_remaining()
    return _MAX_WAIT_S if left_s is None else min(left_s, _MAX_WAIT_S)


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

"""How workers form a session by a switch's controller."""

from __future__ import annotations

import ipaddress
import secrets
import time
from typing import TYPE_CHECKING, Any

from torchrelay._addresses import address_towards
from torchrelay.aggregation.switch._controller import (
    DEFAULT_PORT,
    NUMEL_OF_SIZE,
    import_grpc,
)
from torchrelay.aggregation.switch._joining import parse_address
from torchrelay.config import Aggregation
from torchrelay.errors import (
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    ProtocolError,
    TorchRelayError,
    UnavailableError,
)

if TYPE_CHECKING:
    from torchrelay.aggregation.switch import _controller_pb2 as pb

__all__ = ["session_from_controller"]

_GRACE_S = 10.0  # the controller says who is late; this much later it counts as lost
_SIZE_OF_NUMEL = {numel: size for size, numel in NUMEL_OF_SIZE.items()}


def session_from_controller(
    controller: str,
    rank: int,
    num_workers: int,
    options: Aggregation | None = None,
    *,
    group: int = 0,
    timeout_s: float = 30.0,
) -> tuple[int, str]:
    """Form a session through the controller of a switch (``torchrelay switch --controller-port``);
    blocks until all workers have joined.

    Args:
        controller: ``host`` or ``host:port``; the port's default is 50099.
        rank: of this worker in the session.
        num_workers: of the session, one per host.
        options: equal on all workers.
        group: a number that the session's workers share and those of other sessions do not; 64
            bits. Without one, a controller can form one session of each size at a time.
        timeout_s: how long to wait for the controller, and for the other workers.

    Returns:
        The session id and the switch's address, for :class:`SwitchClient`.

    Raises:
        UnavailableError: grpcio or protobuf is missing, the controller does not answer, or it
            refuses this worker.
        OperationTimeoutError: names the workers that did not join, in ``ranks`` too.
        MismatchError: the workers disagree on their number.
        PeerLostError: the controller was stopped meanwhile.
        ProtocolError: the server that answers is not a controller.
    """
    options = options or Aggregation()
    host, port = parse_address(controller, DEFAULT_PORT)
    with _Calls(f"{host}:{port}", rank, num_workers, group, timeout_s) as calls:
        session_id = calls.broadcast(secrets.randbits(64) if rank == 0 else 0)
        if rank == 0:
            answer = calls.session(session_id, options, _own_address(host))
            calls.barrier()
        else:
            calls.barrier()
            answer = calls.session(session_id, options, _own_address(host))
        calls.barrier()
    address = str(ipaddress.IPv4Address(answer.ipv4)) if answer.ipv4 else host
    return session_id, f"{address}:{answer.port}" if answer.port else address


def _own_address(host: str) -> int:
    """Return this host's IPv4 address on the way to another one; the switch expects packets from
    it.
    """
    try:
        return int(ipaddress.IPv4Address(address_towards((host, DEFAULT_PORT))))
    except OSError as error:
        raise UnavailableError(f"controller {host}: no IPv4 route there: {error}") from error


class _Calls:
    """One worker's calls to a controller, all within ``timeout_s``."""

    def __init__(
        self, controller: str, rank: int, num_workers: int, group: int, timeout_s: float
    ) -> None:
        self._grpc, self._messages = import_grpc()
        self._controller, self._group = controller, group
        self._rank, self._num_workers = rank, num_workers
        self._timeout_s, self._deadline_s = timeout_s, time.monotonic() + timeout_s
        self._channel = self._grpc.insecure_channel(controller)

    def __enter__(self) -> _Calls:
        try:
            self._grpc.channel_ready_future(self._channel).result(self._timeout_s)
        except self._grpc.FutureTimeoutError:
            self._channel.close()
            raise UnavailableError(
                f"controller {self._controller}: no answer within {self._timeout_s:g} s; is "
                "`torchrelay switch --controller-port` running there, and does the network let TCP "
                "through?"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def broadcast(self, value: int) -> int:
        """Return worker 0's value."""
        request = self._messages.BroadcastRequest(value=value, rank=self._rank, **self._shared())
        return int(self._call("Sync", "Broadcast", request).value)

    def barrier(self) -> None:
        request = self._messages.BarrierRequest(rank=self._rank, **self._shared())
        self._call("Sync", "Barrier", request)

    def session(self, session_id: int, options: Aggregation, ipv4: int) -> pb.UdpSessionResponse:
        request = self._messages.UdpSessionRequest(
            session_id=session_id,
            rank=self._rank,
            num_workers=self._num_workers,
            ipv4=ipv4,
            packet_size=_SIZE_OF_NUMEL[options.packet_numel],
            num_slots=options.max_outstanding_packets,
            joins=1,
        )
        answer: pb.UdpSessionResponse = self._call("Session", "UdpSession", request)
        return answer

    def _shared(self) -> dict[str, int]:
        return {
            "num_workers": self._num_workers,
            "group": self._group,
            "timeout_ms": self._left_ms(),
        }

    def _left_ms(self) -> int:
        return max(1, int((self._deadline_s - time.monotonic()) * 1e3))

    def _call(self, service_name: str, method: str, request: Any) -> Any:
        service = self._messages.DESCRIPTOR.services_by_name[service_name]
        answer = getattr(self._messages, service.methods_by_name[method].output_type.name)
        call = self._channel.unary_unary(
            f"/{service.full_name}/{method}", type(request).SerializeToString, answer.FromString
        )
        try:
            return call(request, timeout=self._left_ms() / 1e3 + _GRACE_S)
        except self._grpc.RpcError as error:
            raise self._translate(method, error) from None

    def _translate(self, method: str, error: Any) -> TorchRelayError:
        """Return our error for gRPC's."""
        status, code, text = self._grpc.StatusCode, error.code(), error.details()
        where = f"controller {self._controller}"
        if code == status.DEADLINE_EXCEEDED:
            missing = dict(error.trailing_metadata() or ()).get("missing", "")
            ranks = [int(rank) for rank in missing.split(",") if rank.isdecimal()]
            return OperationTimeoutError(f"{where}: {text}", ranks)
        if code == status.FAILED_PRECONDITION:
            return MismatchError(f"{where}: {text}")
        if code in (status.INVALID_ARGUMENT, status.RESOURCE_EXHAUSTED):
            return UnavailableError(f"{where} refuses worker {self._rank}: {text}")
        if code in (status.UNAVAILABLE, status.CANCELLED):
            return PeerLostError(f"{where} was stopped or cannot be reached any more: {text}")
        return ProtocolError(
            f"{where} does not answer {method} as a controller does: {code.name}: {text}"
        )

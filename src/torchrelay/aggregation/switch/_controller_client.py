"""How a group finds the switch of a controller."""

from __future__ import annotations

import ipaddress

from torchrelay._addresses import address_towards
from torchrelay.aggregation.switch._controller import DEFAULT_PORT, import_grpc
from torchrelay.aggregation.switch._joining import parse_address
from torchrelay.errors import UnavailableError

__all__ = ["switch_of_controller"]


def switch_of_controller(controller: str, timeout_s: float = 30.0) -> str:
    """Return the address of the switch whose controller (``torchrelay switch --controller-port``)
    runs at ``host`` or ``host:port``; blocks.

    Raises:
        UnavailableError: grpcio or protobuf is missing, or no controller answers there.
    """
    grpc, messages = import_grpc()
    host, port = parse_address(controller, DEFAULT_PORT)
    where = f"controller {host}:{port}"
    try:
        towards_it = ipaddress.IPv4Address(address_towards((host, port)))
    except OSError as error:
        raise UnavailableError(f"{where}: no IPv4 route there: {error}") from error
    request = messages.UdpSessionRequest(ipv4=int(towards_it), joins=1)
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        call = channel.unary_unary(
            "/switchml_proto.Session/UdpSession",
            messages.UdpSessionRequest.SerializeToString,
            messages.UdpSessionResponse.FromString,
        )
        try:
            answer = call(request, timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise UnavailableError(
                    f"{where}: no answer within {timeout_s:g} s; is `torchrelay switch "
                    "--controller-port` running there, and does the network let TCP through?"
                ) from None
            raise UnavailableError(
                f"{where} does not name its switch: {error.code().name}: {error.details()}"
            ) from None
    address = str(ipaddress.IPv4Address(answer.ipv4)) if answer.ipv4 else host
    return f"{address}:{answer.port}" if answer.port else address

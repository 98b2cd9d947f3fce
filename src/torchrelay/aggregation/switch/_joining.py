"""How a worker, or a leaf switch, asks a switch for something: datagrams until one is answered."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import time

from torchrelay import _native
from torchrelay.aggregation.switch import _control as control
from torchrelay.aggregation.switch._control import ControlKind, ControlRequest, Join
from torchrelay.aggregation.switch._data_plane import SessionShape
from torchrelay.errors import ConfigError, UnavailableError

__all__ = ["RESEND_S", "ask_missing", "connect", "join_session", "leave", "parse_address"]

RESEND_S = 0.2


def parse_address(text: str, default_port: int = _native.SWITCH_UDP_PORT) -> tuple[str, int]:
    """Return host and port of ``host`` or ``host:port``.

    Raises:
        ConfigError: the port is not a number from 1 to 65535.
    """
    host, _, port = text.partition(":")
    if not host or (port and not (port.isdecimal() and 0 < int(port) < 1 << 16)):
        raise ConfigError(f"switch address {text!r}: it must be host or host:port")
    return host, int(port) if port else default_port


def connect(switch: str) -> socket.socket:
    """Return a UDP socket that is connected to a switch (``host:port``)."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.connect(parse_address(switch))
    except OSError as error:
        sock.close()
        raise UnavailableError(f"switch {switch}: {error}") from error
    return sock


def _ask(
    sock: socket.socket,
    session_id: int,
    request: bytes,
    kinds: tuple[ControlKind, ...],
    deadline_s: float,
) -> ControlRequest | None:
    """Send ``request`` until an answer of one of ``kinds`` about the session arrives, and return
    it; None at the deadline (of ``time.monotonic()``), or when the socket was closed.
    """
    while (left_s := deadline_s - time.monotonic()) > 0 and sock.fileno() >= 0:
        try:
            sock.send(request)
            while select.select([sock], [], [], min(left_s, RESEND_S))[0]:
                answer = control.parse(sock.recv(2048))
                if answer and answer.kind in kinds and answer.session_id == session_id:
                    return answer
        except (OSError, ValueError):  # no route, or closed, or nobody listens there yet
            time.sleep(min(left_s, RESEND_S))
    return None


def ask_missing(sock: socket.socket, session_id: int, timeout_s: float) -> list[int] | None:
    """Return the ranks of the workers that a session waits for; None if the switch does not
    answer.
    """
    request, deadline_s = control.encode(ControlKind.ASK_MISSING, session_id), time.monotonic()
    kinds = (ControlKind.MISSING,)
    answer = _ask(sock, session_id, request, kinds, deadline_s + timeout_s)
    return None if answer is None else control.decode_ranks(answer.body)


def leave(sock: socket.socket, session_id: int, rank: int) -> None:
    """Notify the switch that a worker has left its session."""
    with contextlib.suppress(OSError):  # the switch is gone
        sock.send(control.encode(ControlKind.LEAVE, session_id, control.encode_ranks([rank])))


def join_session(
    sockets: list[socket.socket],
    switch: str,
    session_id: int,
    rank: int,
    shape: SessionShape,
    timeout_s: float,
) -> None:
    """Make a worker a member of a session, with each of its sockets; blocks.

    Raises:
        UnavailableError: the switch does not answer, is full, or refuses the worker; the message
            gives the reason.
    """
    request = control.encode_join(session_id, Join(rank, shape, client=secrets.randbits(64)))
    kinds = (ControlKind.JOINED, ControlKind.REFUSED, ControlKind.BUSY)
    deadline_s, reason = time.monotonic() + timeout_s, "no answer"
    why = "; is `torchrelay switch` running there, and does the network let UDP through?"
    waiting = list(reversed(sockets))
    while waiting:
        answer = _ask(waiting[-1], session_id, request, kinds, deadline_s)
        if answer is None:
            raise UnavailableError(f"switch {switch}: {reason} within {timeout_s:g} s{why}")
        if answer.kind == ControlKind.REFUSED:
            raise UnavailableError(f"switch {switch} refuses worker {rank}: {answer.body.decode()}")
        if answer.kind == ControlKind.JOINED:
            waiting.pop()
        else:
            reason, why = f"worker {rank} was not admitted", f": {answer.body.decode()}"
            time.sleep(RESEND_S)

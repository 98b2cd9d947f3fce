"""Connections to a switch: a worker joins a session and sums tensors over the session's workers; in
a tree of switches, a rack's switch joins the session of the one above it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import select
import socket
import time
from dataclasses import dataclass

import torch

from torchrelay import _native
from torchrelay._platform import need_core
from torchrelay._resource import Resource
from torchrelay._torch import is_host_memory
from torchrelay._waiting import listed
from torchrelay.aggregation.switch import _control as control
from torchrelay.aggregation.switch._control import ControlKind, ControlRequest, Join
from torchrelay.aggregation.switch._data_plane import SessionShape
from torchrelay.config import Aggregation
from torchrelay.errors import (
    ArgumentError,
    ConfigError,
    OperationTimeoutError,
    PeerLostError,
    UnavailableError,
)

__all__ = ["SwitchClient", "Uplink"]

_RESEND_S = 0.2
_ANSWER_S = 0.5  # of the switch above; less than workers wait until they ask again
_DTYPES = {torch.int32: _native.Dtype.int32, torch.float32: _native.Dtype.float32}


class SwitchClient(Resource):
    """One worker of a session. Workers make the same calls in the same order.

    Args:
        switch: ``host`` or ``host:port``.
        rank: of this worker in the session.
        num_workers: of the session, one per host.
        session_id: 64 random bits that all workers of the session know, and nobody else.
        options: how it uses the switch, from ``num_worker_threads`` to
            ``timeout_threshold_increment``; equal on all workers.
        timeout_s: how long to wait for the switch to answer, and to have a free session.

    Raises:
        UnavailableError: the switch does not answer, is full, or refuses the worker; the
            message gives the reason.
    """

    def __init__(
        self,
        switch: str,
        rank: int,
        num_workers: int,
        session_id: int,
        options: Aggregation | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        need_core("a worker of a switch")
        self.rank, self.num_workers, self.session_id = rank, num_workers, session_id
        self.switch = "{}:{}".format(*_parse_address(switch))
        self._is_closed = False
        options = options or Aggregation()
        window, numel = options.max_outstanding_packets, options.packet_numel
        shape = SessionShape(num_workers, window, numel, sequenced=True)
        retry = _native.SwitchRetryPolicy(
            options.packet_timeout_s, options.timeout_threshold, options.timeout_threshold_increment
        )
        with contextlib.ExitStack() as unless_joined:
            self._control, *sockets = (
                unless_joined.enter_context(_connect(self.switch))
                for _ in range(1 + options.num_worker_threads)
            )
            _join_session(sockets, self.switch, session_id, rank, shape, timeout_s)
            descriptors = [sock.detach() for sock in sockets]
            self._native = _native.SwitchWorker(
                descriptors, self.switch, rank, num_workers, numel, window, retry
            )
            unless_joined.pop_all()

    def all_reduce(self, tensor: torch.Tensor, timeout_s: float = 300.0) -> None:
        """Replace ``tensor`` by its sum over the workers; blocks, without Python's lock.

        float32 is quantized: with 2^e above every value of a chunk of ``packet_numel`` on all n
        workers, a sum's error is at most n^2 * 2^e / 2^32, and one rounding. A chunk with NaN, Inf,
        or a value of 2^126 and more on some worker is summed exactly in the order of the ranks, at
        n times the traffic. int32 wraps around. All workers get the same bits.

        Args:
            tensor: contiguous, on the CPU, int32 or float32; its memory must not be used meanwhile.

        Raises:
            ArgumentError: the tensor is not such.
            OperationTimeoutError: names the switch and, in ``ranks``, the workers whose packets are
                missing.
            PeerLostError: the switch was stopped or restarted, or an earlier call on this client
                failed.
        """
        if tensor.dtype not in _DTYPES or not is_host_memory(tensor):
            raise ArgumentError(
                f"switch: it sums contiguous CPU tensors of int32 and float32, not {tensor.dtype} "
                f"on {tensor.device}, {'' if tensor.is_contiguous() else 'not '}contiguous"
            )
        if self._is_closed:
            raise PeerLostError(f"switch {self.switch}: this client is closed")
        try:
            self._native.all_reduce(
                tensor.data_ptr(), tensor.numel(), _DTYPES[tensor.dtype], timeout_s
            )
        except OperationTimeoutError as error:
            raise OperationTimeoutError(*self._who_is_missing(str(error))) from None

    def stats(self) -> _native.SwitchWorkerStats:
        """Return what this worker has done so far."""
        return self._native.stats()

    def close(self) -> None:
        """Leave the session. A call in progress raises PeerLostError. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._native.close()
        _leave(self._control, self.session_id, self.rank)
        self._control.close()

    def _who_is_missing(self, message: str) -> tuple[str, list[int]]:
        ranks = _ask_missing(self._control, self.session_id, 5 * _RESEND_S)
        if ranks is None:
            return f"{message}; the switch does not answer", []
        if not ranks:
            return (
                f"{message}; no worker is missing, so results are lost on their way here, as from "
                "an XDP switch whose driver needs --mode generic"
            ), []
        return f"{message}; it waits for {listed('worker', ranks)}", ranks


@dataclass(frozen=True)
class Uplink:
    """The place of a leaf switch below another one, of which it is a worker.

    Of a session's n workers, rack ``i`` has the ``i``-th n / num_racks. The leaf adds what they
    send, and joins the session above it as worker ``rack`` of ``num_racks``, so any switch can be
    above it, also another leaf.

    Args:
        switch: above; ``host`` or ``host:port``.
        rack: index of this leaf.
        num_racks: below that switch.

    Raises:
        ConfigError: ``rack`` is not below ``num_racks``.
    """

    switch: str
    rack: int
    num_racks: int

    def __post_init__(self) -> None:
        if not 0 <= self.rack < self.num_racks:
            raise ConfigError(
                f"rack {self.rack} of {self.num_racks}: racks have numbers from 0 to "
                f"{self.num_racks - 1}"
            )

    def ranks(self, shape: SessionShape) -> range:
        """Return the ranks of this rack's workers.

        Raises:
            ArgumentError: the racks cannot have equally many.
        """
        size, rest = divmod(shape.num_workers, self.num_racks)
        if rest or not size:
            raise ArgumentError(
                f"a session of {shape.num_workers} workers cannot be divided among "
                f"{self.num_racks} racks"
            )
        return range(self.rack * size, (self.rack + 1) * size)

    def join(self, session_id: int, shape: SessionShape) -> socket.socket:
        """Return a socket that the switch above knows as this rack's.

        Raises:
            UnavailableError: it does not admit this rack within half a second. Try again.
        """
        above = dataclasses.replace(shape, num_workers=self.num_racks)
        sock = _connect(self.switch)
        try:
            _join_session(
                [sock], self.switch, _above(session_id, shape), self.rack, above, _ANSWER_S
            )
        except BaseException:
            sock.close()
            raise
        return sock

    def leave(self, session_id: int, shape: SessionShape) -> None:
        """Notify the switch above that this rack's workers have left."""
        with contextlib.suppress(UnavailableError), _connect(self.switch) as sock:
            _leave(sock, _above(session_id, shape), self.rack)

    def missing(self, session_id: int, shape: SessionShape) -> list[int] | None:
        """Return all ranks of the racks that the switch above waits for; None if it does not
        answer.
        """
        with _connect(self.switch) as sock:
            racks = _ask_missing(sock, _above(session_id, shape), _ANSWER_S)
        if racks is None:
            return None
        return [
            rank for rack in racks for rank in dataclasses.replace(self, rack=rack).ranks(shape)
        ]


def _above(session_id: int, shape: SessionShape) -> int:
    """Return the session's id above, where racks that expect different numbers of workers must not
    meet: their float32 sums would have different scales.
    """
    return (session_id + shape.num_workers) % (1 << 64)


# --- how a worker, or a leaf switch, asks a switch: datagrams until one is answered


def _parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ``host`` or ``host:port``.

    Raises:
        ConfigError: the port is not a number from 1 to 65535.
    """
    host, _, port = text.partition(":")
    if not host or (port and not (port.isdecimal() and 0 < int(port) < 1 << 16)):
        raise ConfigError(f"switch address {text!r}: it must be host or host:port")
    return host, int(port) if port else _native.SWITCH_UDP_PORT


def _connect(switch: str) -> socket.socket:
    """Return a UDP socket that is connected to a switch (``host:port``)."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.connect(_parse_address(switch))
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
            answers = select.poll()
            answers.register(sock, select.POLLIN)
            sock.send(request)
            while answers.poll(1000 * min(left_s, _RESEND_S)):
                answer = control.parse(sock.recv(2048))
                if answer and answer.kind in kinds and answer.session_id == session_id:
                    return answer
        except (OSError, ValueError):  # no route, or closed, or nobody listens there yet
            time.sleep(min(left_s, _RESEND_S))
    return None


def _ask_missing(sock: socket.socket, session_id: int, timeout_s: float) -> list[int] | None:
    """Return the ranks of the workers that a session waits for; None if the switch does not
    answer.
    """
    request, deadline_s = control.encode(ControlKind.ASK_MISSING, session_id), time.monotonic()
    kinds = (ControlKind.MISSING,)
    answer = _ask(sock, session_id, request, kinds, deadline_s + timeout_s)
    return None if answer is None else control.decode_ranks(answer.body)


def _leave(sock: socket.socket, session_id: int, rank: int) -> None:
    """Notify the switch that a worker has left its session."""
    with contextlib.suppress(OSError):  # the switch is gone
        sock.send(control.encode(ControlKind.LEAVE, session_id, control.encode_ranks([rank])))


def _join_session(
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
            time.sleep(_RESEND_S)

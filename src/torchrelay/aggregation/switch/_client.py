"""A host's connection to a switch: it joins a session and sums tensors over the session's
workers.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import time

import torch
from torch.distributed import Store

from torchrelay import _native
from torchrelay._resource import Resource
from torchrelay._waiting import listed, read_key
from torchrelay.aggregation.switch import _control as control
from torchrelay.aggregation.switch._control import ControlKind
from torchrelay.aggregation.switch._data_plane import SessionShape
from torchrelay.config import Aggregation
from torchrelay.errors import (
    ArgumentError,
    ConfigError,
    OperationTimeoutError,
    PeerLostError,
    UnavailableError,
)

__all__ = [
    "SwitchClient",
    "parse_address",
    "session_from_store",
]

_RESEND_S = 0.2
_DTYPES = {torch.int32: _native.Dtype.int32, torch.float32: _native.Dtype.float32}


def parse_address(text: str, default_port: int = _native.SWITCH_UDP_PORT) -> tuple[str, int]:
    """Return host and port of ``host`` or ``host:port``.

    Raises:
        ConfigError: the port is not a number from 1 to 65535.
    """
    host, _, port = text.partition(":")
    if not host or (port and not (port.isdecimal() and 0 < int(port) < 1 << 16)):
        raise ConfigError(f"switch address {text!r}: it must be host or host:port")
    return host, int(port) if port else default_port


def session_from_store(store: Store, key: str, rank: int, timeout_s: float = 300.0) -> int:
    """Return a session id, which rank 0 draws and the others read from ``store``. Blocks.

    Raises:
        OperationTimeoutError: rank 0 did not write it within ``timeout_s``.
    """
    if rank == 0:
        store.set(key, str(secrets.randbits(64)))
    message = (
        f"rank {rank}: rank 0 did not write the switch's session to the store within {{elapsed_s}} "
        "s; is it running, and does it use the same store and key?"
    )
    return int(read_key(store, key, 0, message, timeout_s))


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
        self.options = options or Aggregation()
        self.rank, self.num_workers, self.session_id = rank, num_workers, session_id
        self._shape = SessionShape(
            num_workers,
            self.options.max_outstanding_packets,
            self.options.packet_numel,
            sequenced=True,
        )
        host, port = parse_address(switch)
        self.switch = f"{host}:{port}"
        self._control = self._connect(host, port)
        self._is_closed = True
        sockets: list[socket.socket] = []
        try:
            sockets = [self._connect(host, port) for _ in range(self.options.num_worker_threads)]
            self._join(sockets, timeout_s)
            self._native = self._start(sockets)
            self._is_closed = False
        except BaseException:
            for sock in (*sockets, self._control):
                sock.close()
            raise

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
        if tensor.dtype not in _DTYPES or tensor.device.type != "cpu" or not tensor.is_contiguous():
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
        """Leave the session. A call in progress in another thread raises PeerLostError.
        Idempotent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._native.close()
        with contextlib.suppress(OSError):  # the switch is gone
            ranks = control.encode_ranks([self.rank])
            self._control.send(control.encode(ControlKind.LEAVE, self.session_id, ranks))
        self._control.close()

    def _connect(self, host: str, port: int) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            sock.connect((host, port))
        except OSError as error:
            sock.close()
            raise UnavailableError(f"switch {host}:{port}: {error}") from error
        return sock

    def _join(self, sockets: list[socket.socket], timeout_s: float) -> None:
        join = control.Join(self.rank, self._shape, client=secrets.randbits(64))
        request = control.encode_join(self.session_id, join)
        deadline, why = time.monotonic() + timeout_s, ""
        waiting = list(reversed(sockets))
        while waiting:
            kinds = (ControlKind.JOINED, ControlKind.REFUSED, ControlKind.BUSY)
            answer = self._ask(waiting[-1], request, kinds, deadline)
            if answer is None and why:
                raise UnavailableError(
                    f"switch {self.switch} has not admitted worker {self.rank} within "
                    f"{timeout_s:g} s: {why}"
                )
            if answer is None:
                raise UnavailableError(
                    f"switch {self.switch}: no answer within {timeout_s:g} s; is `torchrelay "
                    "switch` running there, and does the network let UDP through?"
                )
            if answer.kind == ControlKind.REFUSED:
                raise UnavailableError(
                    f"switch {self.switch} refuses worker {self.rank}: {answer.body.decode()}"
                )
            if answer.kind == ControlKind.JOINED:
                waiting.pop()
            else:
                why = answer.body.decode()
                time.sleep(_RESEND_S)

    def _ask(
        self, sock: socket.socket, request: bytes, kinds: tuple[ControlKind, ...], deadline: float
    ) -> control.ControlRequest | None:
        """Send ``request`` until an answer of one of ``kinds`` arrives, and return it; None at the
        deadline, or when the socket was closed.
        """
        while (left := deadline - time.monotonic()) > 0 and sock.fileno() >= 0:
            try:
                sock.send(request)
                while select.select([sock], [], [], min(left, _RESEND_S))[0]:
                    answer = control.parse(sock.recv(2048))
                    if (
                        answer is not None
                        and answer.kind in kinds
                        and answer.session_id == self.session_id
                    ):
                        return answer
            except (OSError, ValueError):  # no route, or closed, or nobody listens there yet
                time.sleep(min(left, _RESEND_S))
        return None

    def _start(self, sockets: list[socket.socket]) -> _native.SwitchWorker:
        options = self.options
        retry = _native.SwitchRetryPolicy(
            options.packet_timeout_s, options.timeout_threshold, options.timeout_threshold_increment
        )
        return _native.SwitchWorker(
            [sock.detach() for sock in sockets],
            self.switch,
            self.rank,
            self.num_workers,
            options.packet_numel,
            options.max_outstanding_packets,
            retry,
        )

    def _who_is_missing(self, message: str) -> tuple[str, list[int]]:
        request = control.encode(ControlKind.ASK_MISSING, self.session_id)
        answer = self._ask(
            self._control, request, (ControlKind.MISSING,), time.monotonic() + 5 * _RESEND_S
        )
        if answer is None:
            return f"{message}; the switch does not answer", []
        ranks = control.decode_ranks(answer.body)
        if not ranks:
            return f"{message}; no worker is missing, so results are lost on their way here", []
        return f"{message}; it waits for {listed('worker', ranks)}", ranks

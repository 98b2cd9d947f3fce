"""A host's connection to a switch: it joins a session and sums tensors over the session's
workers.
"""

from __future__ import annotations

import contextlib

import torch

from torchrelay import _native
from torchrelay._resource import Resource
from torchrelay._torch import is_host_memory
from torchrelay._waiting import listed
from torchrelay.aggregation.switch._data_plane import SessionShape
from torchrelay.aggregation.switch._joining import (
    RESEND_S,
    ask_missing,
    connect,
    join_session,
    leave,
    parse_address,
)
from torchrelay.config import Aggregation
from torchrelay.errors import ArgumentError, OperationTimeoutError, PeerLostError

__all__ = ["SwitchClient"]

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
        with contextlib.ExitStack() as unless_joined:
            self._control, *sockets = (
                unless_joined.enter_context(connect(self.switch))
                for _ in range(1 + self.options.num_worker_threads)
            )
            join_session(sockets, self.switch, session_id, rank, self._shape, timeout_s)
            retry = _native.SwitchRetryPolicy(
                self.options.packet_timeout_s,
                self.options.timeout_threshold,
                self.options.timeout_threshold_increment,
            )
            self._native = _native.SwitchWorker(
                [sock.detach() for sock in sockets],
                self.switch,
                rank,
                num_workers,
                self.options.packet_numel,
                self.options.max_outstanding_packets,
                retry,
            )
            self._is_closed = False
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
        """Leave the session. A call in progress in another thread raises PeerLostError.
        Idempotent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._native.close()
        leave(self._control, self.session_id, self.rank)
        self._control.close()

    def _who_is_missing(self, message: str) -> tuple[str, list[int]]:
        ranks = ask_missing(self._control, self.session_id, 5 * RESEND_S)
        if ranks is None:
            return f"{message}; the switch does not answer", []
        if not ranks:
            return (
                f"{message}; no worker is missing, so results are lost on their way here, as from "
                "an XDP switch whose driver needs --mode generic"
            ), []
        return f"{message}; it waits for {listed('worker', ranks)}", ranks

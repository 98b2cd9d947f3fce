"""Sums between hosts through an aggregation switch: one worker for each host, its leader."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

import torch

from torchrelay._group import Op
from torchrelay._native import Failure, Group
from torchrelay._waiting import listed
from torchrelay.aggregation._plane import LinkStats
from torchrelay.aggregation.switch._client import SwitchClient
from torchrelay.config import Aggregation
from torchrelay.errors import (
    OperationTimeoutError,
    PeerLostError,
    TorchRelayError,
    UnavailableError,
)
from torchrelay.world import Ranks

__all__ = ["SwitchTransport", "join", "terms"]

_INTEGERS = (torch.int32,)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_WINDOWS_PER_PIECE = 32  # before float32 data a window of packets goes that carry exponents only
_ANSWER_S = 30.0
_POLL_S = 0.1
_STOP_S = 10.0
_DONE_S = 1.0  # a leader that is gone may have done its part


def terms(settings: Aggregation) -> str:
    """Return what must be equal on all ranks, as text.

    The address may differ: a switch may have one for each host.
    """
    names = (
        "exact",
        "num_worker_threads",
        "max_outstanding_packets",
        "packet_numel",
        "unencrypted_switch",
    )
    values = ", ".join(f"{name}={getattr(settings, name)}" for name in names)
    return f"with {values}" if settings.switch else "off"


def join(
    ranks: Ranks, leaders: Sequence[int], settings: Aggregation, timeout_s: float
) -> SwitchClient | None:
    """Join a session of all hosts' leaders; collective over all ranks, blocks.

    Returns a client on the leaders, None on other ranks.

    Raises:
        UnavailableError: the switch does not answer a leader within half a minute, or refuses;
            raised on every rank.
        OperationTimeoutError, PeerLostError: a leader is late or was lost.
    """
    client, trouble = None, ""
    answer_s = min(timeout_s, _ANSWER_S)
    if ranks.rank in leaders:
        session_id, worker = int(ranks.attempt, 16), leaders.index(ranks.rank)
        try:
            client = SwitchClient(
                settings.switch, worker, len(leaders), session_id, settings, answer_s
            )
        except TorchRelayError as error:
            trouble = str(error)
    try:
        # A leader always answers, and knows more than who waits for it: that wait is longer.
        troubles = ranks.gather("switch", trouble, answer_s + _ANSWER_S + timeout_s)
        for other, text in zip(ranks.names, troubles, strict=True):
            if text:
                raise UnavailableError(
                    f"{ranks.name}, sml: rank {other} could not join its switch: {text}"
                )
    except BaseException:
        if client is not None:
            client.close()
        raise
    return client


class SwitchTransport:
    """Sums and averages of int32 and float32, and of float16 and bfloat16 as float32, to all hosts.

    Each host's leader sends its piece to the switch once and receives the sum once. A float32 sum
    is quantized; see :meth:`torchrelay.aggregation.switch.SwitchClient.all_reduce`.

    Args:
        leaders: of the hosts, in the order of the switch's workers.
        names: the ranks as users know them.
        client: on a leader; owned from now on.
        messages: of the same ranks; the switch does not know who is lost, they do.
        check: called while waiting; raises to stop.
    """

    def __init__(
        self,
        leaders: Sequence[int],
        names: Sequence[int],
        settings: Aggregation,
        client: SwitchClient | None,
        messages: Group,
        check: Callable[[], None],
    ) -> None:
        self._leaders, self._names = leaders, names
        self._client = client
        self._messages, self._check = messages, check
        self._dtypes = _INTEGERS if settings.exact else (*_INTEGERS, *_FLOATS)
        self._last: Future[None] | None = None
        window_bytes = settings.max_outstanding_packets * settings.packet_numel * 4
        self.piece_bytes = _WINDOWS_PER_PIECE * window_bytes
        self._sent_bytes, self._waited_s = 0, 0.0
        self.address = settings.switch if client is None else client.switch

    @property
    def reason(self) -> str:
        """What goes through the switch, and which one that is."""
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in self._dtypes)
        return f"all_reduce with SUM or AVG of {dtypes} through {self.address}"

    def takes(self, dtype: torch.dtype, op: Op) -> bool:
        """Return whether it sums such tensors; equal on all ranks."""
        return op in (Op.SUM, Op.AVG, Op.PREMUL_SUM) and dtype in self._dtypes

    def calls(
        self, tensor: torch.Tensor, op: Op, ranks_here: int
    ) -> tuple[Callable[[int, int, float], None], Callable[[], Failure | None]]:
        """Return the functions with which the native core starts to sum a piece of a flat tensor,
        and waits for the oldest sum, where an average is divided by the number of ranks. A piece
        is the sum of this host's ``ranks_here`` ranks; of float16 with AVG, their average.
        """
        started: deque[tuple[torch.Tensor, torch.Tensor, Future[None]]] = deque()
        # Another thread may call the two, and inference mode is each thread's own.
        mode = torch.inference_mode(tensor.is_inference())

        @mode
        def start(first: int, count: int, timeout_s: float) -> None:
            assert self._client is not None
            piece = tensor[first : first + count]
            wide = piece.float() if piece.dtype in _FLOATS else piece
            if op is Op.AVG and piece.dtype is torch.float16:  # whose sums would overflow
                wide *= ranks_here
            started.append((piece, wide, self._submit(self._client, wide, timeout_s)))

        @mode
        def finish() -> Failure | None:
            piece, wide, job = started.popleft()
            try:
                self._wait(job)
            except TorchRelayError as error:
                is_late = isinstance(error, OperationTimeoutError)
                return Failure(str(error), list(getattr(error, "ranks", ())), is_late)
            self._sent_bytes += wide.nbytes
            if op is Op.AVG:
                rounding = None if wide.is_floating_point() else "trunc"
                wide.div_(len(self._names), rounding_mode=rounding)
            if wide is not piece:
                piece.copy_(wide)
            return None

        return start, finish

    def stats(self) -> LinkStats:
        return LinkStats("switch", self.reason, self._sent_bytes, self._waited_s)

    def close(self) -> None:
        """Leave the session. A sum in progress fails; its tensor is not used any more.
        Idempotent.
        """
        if self._client is not None:
            self._client.close()
        if self._last is not None:
            wait([self._last], _STOP_S)

    def _submit(self, client: SwitchClient, tensor: torch.Tensor, timeout_s: float) -> Future[None]:
        """Sum ``tensor`` in a thread, after the one before it."""
        before, job = self._last, Future[None]()

        def run() -> None:
            if before is not None:
                wait([before])
            try:
                client.all_reduce(tensor, timeout_s)
                job.set_result(None)
            except BaseException as error:
                job.set_exception(error)

        threading.Thread(target=run, name="sml-switch", daemon=True).start()
        self._last = job
        return job

    def _wait(self, job: Future[None]) -> None:
        started_s = time.monotonic()
        try:
            while not self._is_done(job, _POLL_S):
                self._check()
                lost = self._messages.lost(self._leaders)
                if lost is not None and not self._is_done(job, _DONE_S):
                    raise PeerLostError(lost.message, ranks=lost.ranks)
        except BaseException:
            self.close()
            raise
        finally:
            self._waited_s += time.monotonic() - started_s

    def _is_done(self, job: Future[None], timeout_s: float) -> bool:
        if not wait([job], timeout_s).done:
            return False
        try:
            job.result()
        except OperationTimeoutError as error:
            raise self._name_missing(error) from None
        return True

    def _name_missing(self, error: OperationTimeoutError) -> OperationTimeoutError:
        """Translate the workers that a switch waits for to ranks."""
        leaders = [self._leaders[worker] for worker in error.ranks]
        if not leaders:
            return error
        ranks = [self._names[leader] for leader in leaders]
        named = Failure(f"{error}: {listed('rank', ranks)}", ranks, True)
        failure = self._messages.with_host(named, leaders[0])
        return OperationTimeoutError(failure.message, ranks=failure.ranks)

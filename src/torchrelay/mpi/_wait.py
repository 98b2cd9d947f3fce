"""Waiting for other ranks, never for ever.

No call blocks inside MPI: every communication is started without blocking and tested until it is done. A rank
that waits longer than ``timeout_s`` asks the others over a communicator of its own what they are doing, tells
all of them that it gives up, and raises an error that names the call and who is missing. A rank that ends with
an exception tells the others, which then raise at once. After such an error MPI's state is lost: further
communications raise, and the process ends the job with ``MPI_Abort`` when it exits, since ``MPI_Finalize``
would wait for what never completes.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import time
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from torchrelay.errors import MismatchError, OperationTimeoutError, PeerLostError, TorchRelayError
from torchrelay.mpi._library import MPI
from torchrelay.mpi._settings import settings

if TYPE_CHECKING:
    from torchrelay.mpi.communicator import Communicator

__all__ = ["Testable", "Waiting", "barrier", "check_usable", "failed", "finish", "listen", "register"]

# Tests in a tight loop, some 0.3 us each, before the core is offered to others: a rank that shares its core with
# another holds up the very message it waits for, one that does not loses a time slice to whoever else is there.
SPINS = 3000 if MPI.COMM_WORLD.size <= len(os.sched_getaffinity(0)) else 50
TESTS = max(1, SPINS // 10)  # and then between two offers: what is under way moves while it is tested
YIELD_S = 1.0  # after that, give the core to others, but go on at full speed
NAP_S = 2e-4  # after a second, the peer is late rather than slow
LISTEN_S = 0.02  # how often a waiting rank looks for what others tell or ask

QUESTION, ANSWER, FAREWELL, MISMATCH = 1, 2, 3, 4  # tags on the control communicator
MESSAGE_BYTES = 1024


class Testable(Protocol):
    """A request, as far as waiting goes."""

    def Test(self) -> bool: ...


class Waiting(Protocol):
    """A communication that can be waited for and named."""

    comm: Communicator

    def describe(self) -> str: ...
    def peers(self) -> Iterable[int]: ...


_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()
_abandoned: list[Any] = []  # requests that will never complete; freeing their buffers would corrupt memory
_broken: str | None = None
_waiting: tuple[Waiting, float] | None = None
_told = False


def register(comm: Communicator) -> None:
    """Answers questions that arrive over ``comm`` while this rank waits anywhere."""
    _communicators.add(comm)


def check_usable() -> None:
    """Raises :class:`PeerLostError` if a communication failed before: messages would no longer match."""
    if _broken is not None:
        raise PeerLostError(
            f"MPI cannot be used any more, because an earlier communication failed: {_broken}"
        )


def finish(request: Testable, call: Waiting) -> None:
    """Returns when ``request`` is done.

    Raises:
        OperationTimeoutError: it was not done within ``timeout_s``; ``ranks`` names those that are missing.
        PeerLostError: a rank reported that it ended with an exception.
        MismatchError: MPI refused it, mostly because a message is longer than the memory for it.
    """
    test = request.Test
    try:
        for _ in range(SPINS):
            if test():
                return
        _finish_late(request, call)
    except MPI.Exception as error:
        raise MismatchError(
            f"rank {call.comm.rank}: {call.describe()} on {call.comm.name} failed: {error.Get_error_string()}; do all ranks "
            "give tensors of the same shape and dtype? TORCHRELAY_MPI_DEBUG=1 compares them before each call"
        ) from error


class _Barrier:
    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def describe(self) -> str:
        return "Barrier()"

    def peers(self) -> Iterable[int]:
        return range(self.comm.size)


def barrier(comm: Communicator) -> None:
    """Returns when all ranks have called it."""
    check_usable()
    finish(comm.mpi.Ibarrier(), _Barrier(comm))


def _finish_late(request: Testable, call: Waiting) -> None:
    global _waiting  # noqa: PLW0603
    before, start = _waiting, time.monotonic()
    _waiting = (call, start)
    heard = start
    try:
        while not any(request.Test() for _ in range(TESTS)):
            now = time.monotonic()
            if now - heard > LISTEN_S:
                heard = now
                listen()
                if now - start > settings.timeout_s and _give_up(request, call, start):
                    return
            if now - start < YIELD_S:
                os.sched_yield()
            else:
                time.sleep(NAP_S)
    except BaseException:
        _abandoned.append(request)
        raise
    finally:
        _waiting = before


def listen() -> list[tuple[int, str]]:
    """Answers questions, raises on farewells, and returns the answers that came."""
    answers = []
    status = MPI.Status()
    for comm, tag in itertools.product(list(_communicators), (QUESTION, ANSWER, FAREWELL, MISMATCH)):
        while comm.control.Iprobe(MPI.ANY_SOURCE, tag, status):
            source = status.Get_source()
            text = _receive(comm, source, tag)
            if tag == QUESTION:
                _send(comm, source, ANSWER, _whereabouts())
            elif tag == ANSWER:
                answers.append((source, text))
            else:
                what = f"rank {comm.rank}: {_whereabouts()}, and rank {source} gave up: {text}"
                raise failed(PeerLostError(what, (source,)) if tag == FAREWELL else MismatchError(what))
    return answers


def _whereabouts() -> str:
    if _waiting is None:
        return "in no communication"
    call, start = _waiting
    return f"waiting in {call.describe()} on {call.comm.name} for {time.monotonic() - start:.1f} s"


def _give_up(request: Testable, call: Waiting, start: float) -> bool:
    """Asks who is where, then raises. True: the communication completed while asking."""
    comm = call.comm
    peers = [rank for rank in call.peers() if rank != comm.rank]
    for rank in peers:
        _send(comm, rank, QUESTION, "")
    answers: dict[int, str] = {}
    asked = time.monotonic()
    while time.monotonic() - asked < settings.grace_s and len(answers) < len(peers):
        if request.Test():
            return True
        answers.update(listen())
        time.sleep(NAP_S)
    what = f"{call.describe()} on {comm.name}"
    missing = [rank for rank in peers if what not in answers.get(rank, "")]
    places = [f"rank {rank} is {answers.get(rank, 'in no communication')}" for rank in peers]
    who = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}"
    raise failed(
        OperationTimeoutError(
            f"rank {comm.rank}: {what} did not end within {time.monotonic() - start:.1f} s; "
            f"{who + ' did not take part' if missing else 'all ranks take part, but no message moves'} "
            f"({'; '.join(places)}). Do all ranks make the same calls in the same order? "
            "TORCHRELAY_MPI_DEBUG=1 compares them before each call, TORCHRELAY_MPI_TIMEOUT_S sets the time",
            missing,
        )
    )


def failed(error: TorchRelayError) -> TorchRelayError:
    """``error``, to be raised: messages would no longer match, so all ranks are told, and communication ends."""
    global _broken  # noqa: PLW0603
    _broken = str(error)
    _tell_all(_broken, MISMATCH if isinstance(error, MismatchError) else FAREWELL)
    return error


def _tell_all(reason: str, tag: int = FAREWELL) -> None:
    global _told  # noqa: PLW0603
    if _told:
        return
    _told = True
    for comm in list(_communicators):
        for rank in range(comm.size):
            if rank != comm.rank:
                _send(comm, rank, tag, reason)


def _send(comm: Communicator, rank: int, tag: int, text: str) -> None:
    message = bytearray(text.encode()[: MESSAGE_BYTES - 1])
    request = comm.control.Isend([message, len(message), MPI.BYTE], rank, tag)
    if not request.Test():
        _abandoned.append((request, message))


def _receive(comm: Communicator, source: int, tag: int) -> str:
    message = bytearray(MESSAGE_BYTES)
    status = MPI.Status()
    comm.control.Recv([message, MESSAGE_BYTES, MPI.BYTE], source, tag, status)
    return message[: status.Get_count(MPI.BYTE)].decode(errors="replace")


def _leave() -> None:
    """At exit: after a failure, give the others a moment to report theirs, then end the job."""
    error = getattr(sys, "last_value", None)
    if (_broken is None and error is None) or MPI.COMM_WORLD.size == 1 or MPI.Is_finalized():
        return
    if not isinstance(error, KeyboardInterrupt):
        _tell_all(f"it ended with {type(error).__name__}: {error}" if _broken is None else _broken)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(max(1.0, 20 * LISTEN_S))
    MPI.COMM_WORLD.Abort(1)


atexit.register(_leave)

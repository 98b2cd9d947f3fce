"""Waiting for other ranks, with a timeout.

Waits start a non-blocking communication and test it until it is done. (Collectives may call
blocking functions of MPI after all ranks have arrived.) A rank that waits longer than ``timeout_s``
asks the others for their state over a control communicator, notifies them, and raises an error that
names the call and the missing ranks. A rank that ends with an exception notifies the others, which
raise at once. After such an error the state of the transport is undefined: further communications
raise, and the process exits with status 1. Under MPI it ends the job with ``MPI_Abort``, because
``MPI_Finalize`` would never return.

A rank that ends without an exception notifies the others; under MPI it first waits for them. Those
that wait for it raise once all other ranks they wait for are in the same call.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torchrelay._platform import usable_cores
from torchrelay._waiting import listed
from torchrelay.errors import (
    ArgumentError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    TorchRelayError,
    UnavailableError,
)
from torchrelay.mpi._chain import Slot, main
from torchrelay.mpi._library import is_worker, refusal
from torchrelay.mpi._settings import settings
from torchrelay.mpi._transport import Testable

if TYPE_CHECKING:
    from torchrelay.mpi._comm import Comm, Lease
    from torchrelay.mpi.transports._mailbox import Mailbox
    from torchrelay.mpi.transports._mpi4py import End

__all__ = [
    "CALL",
    "CALLS_GRACES",
    "Job",
    "Named",
    "Waiting",
    "abandon",
    "check_usable",
    "finish",
    "process",
    "send",
]

# Tests in a tight loop, about 0.3 us each, before yielding the core. A rank that shares its core
# delays the message it waits for; one that does not would lose a time slice by yielding.
SPINS, CROWDED_SPINS = 3000, 50
TESTS, CROWDED_TESTS = 300, 5  # tests between two yields; testing makes progress
CORES = usable_cores()
YIELD_S = 1.0  # then yield, but continue to test
NAP_S = 2e-4  # sleep between tests after a second
LISTEN_S = 0.02  # interval at which a waiting rank checks for control messages

ENDING_S = 1.0  # how long a rank waits at exit before it notifies the others
CALLS_GRACES = 5  # grace periods that a rank waits for descriptions of the others' calls

# What a control message is: its first letter.
QUESTION, ANSWER, FAREWELL, MISMATCH, ENDED, CALL = "QAFMEC"


class Waiting(Protocol):
    """A communication that can be waited for and named."""

    @property
    def comm(self) -> Comm: ...

    def describe(self) -> str: ...
    def peers(self) -> Iterable[int]: ...


# Requests that may never complete, with memory whose freeing would corrupt it.
_abandoned: list[Any] = []


class Job:
    """One rank's part in a job, which its communicators share.

    Attributes:
        slot: holds the chain that compiled code joins.
        leases: the communicators over which it answers questions while it waits anywhere.
        mailboxes: what holds its messages until they are sent.
        end: how the ranks end together.
        broken: why no communication is possible any more.
        is_rank: whether it is not a process that a rank started.
    """

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self.mailboxes: weakref.WeakSet[Mailbox] = weakref.WeakSet()
        self.end: End | None = None
        self.broken: str | None = None
        self.is_rank = True
        self._has_ended = False
        self._waiting: tuple[Waiting, float] | None = None

    def check_usable(self) -> None:
        """Check that messages of this rank still match those of others.

        Raises:
            PeerLostError: a communication failed before.
            UnavailableError: this process is not a rank, but was started by one.
        """
        if self.broken is None:
            return
        if not self.is_rank:
            raise UnavailableError(self.broken)
        raise PeerLostError(
            f"no communication is possible any more, because an earlier one failed: {self.broken}"
        )

    def disable(self) -> None:
        """Disable communication in a process that inherited its rank from another."""
        self.broken = (
            "this process was started by a rank, and is none itself: communicate in the rank"
        )
        self.is_rank = False
        atexit.unregister(self.leave)

    @contextlib.contextmanager
    def waiting_in(self, call: Waiting, waited_s: float = 0.0) -> Iterator[float]:
        """Answer questions within the block with ``call``; gives the time of its start."""
        before, start = self._waiting, time.monotonic() - waited_s
        self._waiting = (call, start)
        try:
            yield start
        finally:
            self._waiting = before

    def listen(self) -> None:
        """Receive control messages: answer questions, raise on notices of failure."""
        for lease in list(self.leases):
            for source, message in lease.control.posted():
                letters = message.decode(errors="replace")
                kind, text = letters[0], letters[1:]
                if kind == QUESTION:
                    send(lease, source, ANSWER, self._current_call())
                elif kind == ANSWER:
                    lease.answers[source] = text
                elif kind == CALL:
                    lease.calls[source] = text
                elif kind == ENDED:
                    lease.ended.add(source)
                else:
                    here = f"rank {lease.rank}: {self._current_call()}"
                    what = f"{here}, and rank {source} gave up: {text}"
                    raise self.failed(
                        PeerLostError(what, (source,)) if kind == FAREWELL else MismatchError(what)
                    )

    def _current_call(self) -> str:
        if self._has_ended:
            return "no longer running: it has exited"
        if self._waiting is None:
            return "in no communication"
        call, start = self._waiting
        waited_s = time.monotonic() - start
        return f"waiting in {call.describe()} on {call.comm.name} for {waited_s:.1f} s"

    def failed(self, error: TorchRelayError) -> TorchRelayError:
        """Notify all ranks, end communication, and return ``error`` to be raised."""
        is_first, self.broken = self.broken is None, str(error)
        if is_first:
            kind = MISMATCH if isinstance(error, MismatchError) else FAREWELL
            self._send_all(kind, self.broken)
        return error

    def _send_all(self, kind: str, text: str) -> None:
        for lease in list(self.leases):
            for rank in range(lease.size):
                if rank != lease.rank:
                    send(lease, rank, kind, text)

    def _end_together(self, request: Testable) -> None:
        """Wait until all ranks end. Raise if another one fails."""
        start, has_notified = time.monotonic(), False
        while not any(request.Test() for _ in range(TESTS)):
            self.listen()
            if not has_notified and time.monotonic() - start > ENDING_S:
                has_notified = True
                self._send_all(ENDED, "")
            time.sleep(NAP_S if not has_notified else LISTEN_S)

    def _wait_until_sent(self) -> None:
        """Wait until other ranks have read enough that all messages are sent."""
        until = time.monotonic() + settings.timeout_s
        while any(each.has_unsent() for each in self.mailboxes) and time.monotonic() < until:
            time.sleep(LISTEN_S)

    def _close(self) -> None:
        for mailbox in list(self.mailboxes):
            mailbox.close()

    def leave(self) -> None:
        """Wait for the others at exit. After a failure, let them report, then end the job."""
        end = self.end
        if not any(lease.size > 1 for lease in self.leases) or (end is not None and end.is_over()):
            return
        error = getattr(sys, "last_value", None)
        if self.broken is None and error is None:
            self._has_ended = True
            if end is None:
                self._wait_until_sent()  # but not for this notice, which ranks that ended ignore
                self._send_all(ENDED, "")
                self._close()
                return
            try:
                self._end_together(end.start())
            except TorchRelayError as lost:
                error = lost
                print(f"{type(lost).__name__}: {lost}", file=sys.stderr)
            else:
                return
        if self.broken is None and not isinstance(error, KeyboardInterrupt):
            self._send_all(FAREWELL, f"it ended with {type(error).__name__}: {error}")
        sys.stdout.flush()
        sys.stderr.flush()
        if end is not None:
            time.sleep(max(1.0, 20 * LISTEN_S))
            end.abort()
            return
        self._close()
        if error is None:
            os._exit(1)  # the script went on after a failure, of which its launcher must know


process = Job(main)
"""That of the rank that this process is."""


def check_usable(comm: Comm) -> None:
    """Check that ``comm`` exists, and that its rank can communicate; see :class:`Job`."""
    if comm.lease.is_freed:
        raise ArgumentError(f"{comm.name} was freed")
    if comm.job.broken is not None:
        comm.job.check_usable()


def abandon(memory: object) -> None:
    """Keep memory alive that MPI may still read or write."""
    _abandoned.append(memory)


def finish(request: Testable, call: Waiting, memory: object = None) -> None:
    """Wait until ``request``, which uses ``memory``, is done.

    Raises:
        OperationTimeoutError: it was not done within ``timeout_s``; ``ranks`` are the missing ones.
        PeerLostError: a rank ended with an exception.
        MismatchError: MPI reported an error, mostly a message longer than its memory.
    """
    test, is_crowded, job = request.Test, call.comm.size > CORES, call.comm.job
    try:
        for _ in range(CROWDED_SPINS if is_crowded else SPINS):
            if test():
                return
        _finish_late(request, call, CROWDED_TESTS if is_crowded else TESTS)
    except BaseException as error:
        abandon((request, memory))
        if isinstance(error, (MismatchError, OperationTimeoutError, PeerLostError)) and (
            job.broken is None
        ):
            if isinstance(error, OperationTimeoutError):
                with job.waiting_in(call, settings.timeout_s):
                    _check_peers(None, call, settings.timeout_s, error.ranks)
            with job.waiting_in(call) as start:
                while time.monotonic() - start < settings.grace_s:
                    job.listen()  # raises what another rank reports, if this is a consequence of it
                    time.sleep(NAP_S)
            what = f"rank {call.comm.rank}: {call.describe()} on {call.comm.name}: {error}"
            ranks = (error.ranks,) if isinstance(error, PeerLostError) else ()
            raise job.failed(type(error)(what, *ranks)) from error
        cause = refusal(error)
        if cause is None:
            raise
        raise job.failed(
            MismatchError(
                f"rank {call.comm.rank}: {call.describe()} on {call.comm.name} failed: {cause}; do "
                "sender and receiver pass tensors of the same shape and dtype? "
                "TORCHRELAY_MPI_DEBUG=1 compares them"
            )
        ) from error


class Named:
    """An operation of all ranks of a communicator, identified by its name."""

    def __init__(self, comm: Comm, name: str) -> None:
        self.comm = comm
        self.name = name

    def describe(self) -> str:
        return self.name

    def peers(self) -> Iterable[int]:
        return range(self.comm.size)


def _finish_late(request: Testable, call: Waiting, tests: int) -> None:
    job = call.comm.job
    with job.waiting_in(call) as start:
        checked = asked = start
        while not any(request.Test() for _ in range(tests)):
            now = time.monotonic()
            if now - checked > LISTEN_S:
                checked = now
                job.listen()
                waited_s, ended = now - start, call.comm.lease.ended
                if waited_s > settings.timeout_s or (ended and now - asked > settings.grace_s):
                    if _check_peers(request, call, waited_s):
                        return
                    asked = time.monotonic()
            if now - start < YIELD_S:
                os.sched_yield()
            else:
                time.sleep(NAP_S)


def _check_peers(
    request: Testable | None, call: Waiting, waited_s: float, late: Sequence[int] = ()
) -> bool:
    """Ask the other ranks that ``call`` waits for. Return True if it completed meanwhile.

    A rank may end before others when its part is done, such as the root of a broadcast, so one that
    is not in this call may be the missing one.

    Args:
        request: None, if it has failed.
        late: the ranks that are missing if all answer that they are in this call.

    Raises:
        OperationTimeoutError: it waited for ``timeout_s``.
        PeerLostError: it waits only for ranks that have ended.
    """
    comm, lease, job = call.comm, call.comm.lease, call.comm.job
    is_late = waited_s >= settings.timeout_s
    peers = [rank for rank in call.peers() if rank != lease.rank and rank >= 0]
    ended = [rank for rank in peers if rank in lease.ended]
    asked = peers if is_late else [rank for rank in peers if rank not in ended]
    if not (is_late or ended):
        return False
    lease.answers.clear()
    for rank in asked:
        send(lease, rank, QUESTION, "")
    until = time.monotonic() + settings.grace_s
    while time.monotonic() < until and (len(lease.answers) < len(asked) or not asked):
        if request is not None and request.Test():
            return True
        job.listen()
        time.sleep(NAP_S)
    what = f"{call.describe()} on {comm.name}"
    missing = [rank for rank in asked if what not in lease.answers.get(rank, "")]
    if is_late:
        missing = missing or list(late)
        silent = "in no communication"
        places = [f"rank {rank} is {lease.answers.get(rank, silent)}" for rank in peers]
        cause = (
            f"{listed('rank', missing)} did not take part"
            if missing
            else "all ranks take part, but no message moves"
        )
        raise job.failed(
            OperationTimeoutError(
                f"rank {comm.rank}: {what} did not end within {waited_s:.1f} s; {cause} "
                f"({'; '.join(places)}). Do all ranks make the same calls in the same order? "
                "TORCHRELAY_MPI_TIMEOUT_S sets the time",
                missing,
            )
        )
    if missing:
        return False
    raise job.failed(
        PeerLostError(
            f"rank {comm.rank}: {what} cannot complete, because {listed('rank', ended)} ended "
            "without taking part: the end of the script, or sys.exit",
            ended,
        )
    )


def send(lease: Lease, rank: int, kind: str, text: str) -> None:
    """Send a control message, without waiting for its receiver."""
    lease.control.post(rank, (kind + text).encode())


def _forked() -> None:
    if process.end is not None or process.leases:
        process.disable()


atexit.register(process.leave)
os.register_at_fork(after_in_child=_forked)
if is_worker:
    process.disable()

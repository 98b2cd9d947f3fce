"""The worker processes: started, watched, replaced when they die."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from torchrelay.config import Switching
from torchrelay.errors import (
    OperationTimeoutError,
    PeerLostError,
    ProtocolError,
    SegmentError,
    TorchRelayError,
    UnavailableError,
)
from torchrelay.switching.daemon._owner import Owner
from torchrelay.switching.device._cache import SharedCache
from torchrelay.switching.device._contract import align
from torchrelay.switching.worker import _messages
from torchrelay.switching.worker._fork_server import ForkServer, Start
from torchrelay.switching.worker._request_buffer import BufferPool

__all__ = ["Fleet", "WorkerProcess", "WorkerUser"]

_log = logging.getLogger("torchrelay.switching")

_FAILED_STARTS = 3  # in a row, from which on requests fail instead of waiting
_RETRY_S = 2.0
_PARTS_AT_ONCE = 64  # descriptors of the arena that are open at a time


class WorkerUser(Protocol):
    """Protocol of what a worker works for: it gets the worker's messages, and its loss."""

    activity: str  # for people: "starting", "loading", ...

    def on_message(self, worker: WorkerProcess, message: Any, descriptors: list[int]) -> None:
        """Handle a message; the last one of the work releases the worker."""

    def on_lost(self, worker: WorkerProcess) -> None:
        """Handle the worker's end, with :meth:`WorkerProcess.loss` as the error."""


class WorkerProcess:
    """A started worker: its process, request buffers, and what it works for."""

    def __init__(self, server: ForkServer, cache: SharedCache, options: Switching) -> None:
        """Let `server` start a process, one of `options.workers` that share the device.

        Raises:
            OSError, SegmentError: no memory, descriptors or processes are left.
            PeerLostError, ProtocolError: the server has died, or does not answer.
        """
        self.buffers = BufferPool(align(options.request_bytes))
        start = Start(cache.describe(read_only=True), options.threads, options.workers)
        self.process = server.start(start, [one.descriptor for one in self.buffers.all])
        self.channel = self.process.channel
        self.pid = self.process.pid
        self.user: WorkerUser | None = None  # None: it is idle
        self.loaded: dict[str, tuple[int, int]] = {}  # model -> (version, plan)
        self.failed: set[str] = set()  # models that it could not build
        self.mapped: set[str] = set()  # models of whose memory it may have some
        self._unmaps: list[tuple[str, int]] = []  # groups whose memory it must give up
        self.last_model = ""
        self.last_used = 0.0
        self.exit_reason = ""  # once it is lost
        self.is_late = False  # lost because it took too long

    def work_for(self, user: WorkerUser, limit_s: float = math.inf) -> None:
        """Give the worker to `user`, for at most so long."""
        self.user, self.limit_s, self.due = user, limit_s, time.monotonic() + limit_s

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send; a dead worker is noticed when its channel is read."""
        try:
            self.channel.send(message, descriptors)
        except PeerLostError:
            _log.warning("a message to worker %d could not be sent", self.pid)

    def unmap(self, groups: Iterable[tuple[str, int]]) -> None:
        """Let the worker give up the memory of groups before it does anything else: now, or when it
        is idle.
        """
        self._unmaps += [one for one in groups if one[0] in self.mapped]
        if self._unmaps and self.user is None:
            self.send(_messages.Unmap(self._unmaps))
            self._unmaps = []

    def release(self) -> None:
        """Mark the worker as idle."""
        self.user, self.due, self.last_used = None, math.inf, time.monotonic()
        self.unmap(())

    def note_built(self, built: _messages.Built) -> None:
        """Note that the worker lacks a module that it could not build."""
        if built.error is not None:
            self.loaded.pop(built.model, None)
            self.failed.add(built.model)

    def end(self, reason: str) -> None:
        """Kill the process, unless it is dead, and reap it. Idempotent."""
        if not reason:
            reason = self.process.exit_reason()
            if self.process.exit_code == -signal.SIGSEGV:
                reason += "; does the model write to its parameters or buffers?"
        self.exit_reason = reason
        self.process.kill()
        self.channel.close()

    @property
    def broke_memory(self) -> bool:
        """Whether the ended process read or wrote where it has no memory, or its device did."""
        code = self.process.exit_code
        return code is not None and (code > 0 or -code in (signal.SIGSEGV, signal.SIGBUS))

    def loss(self, did: str) -> TorchRelayError:
        """Return the error of what the ended worker did."""
        kind = OperationTimeoutError if self.is_late else PeerLostError
        return kind(f"worker {self.pid} {self.exit_reason} while it {did}")


class Fleet:
    """Keeps the workers alive."""

    activity = "starting"

    def __init__(self, owner: Owner, cache: SharedCache, options: Switching) -> None:
        self.cache = cache
        self.workers: list[WorkerProcess] = []
        self.deaths = 0
        self.server: ForkServer | None = None
        self._server_due = 0.0  # when it must have imported what workers need
        self._owner = owner
        self._options = options
        self._is_closing = False
        self._failed_starts = 0
        self._next_start = 0.0
        self._problem = ""

    @property
    def is_importing(self) -> bool:
        """Whether the server that workers are forked from is not ready."""
        return self.server is not None and self.server.can_fork is None

    @property
    def broken(self) -> UnavailableError | None:
        """The reason why there is no worker and will be none soon, if so."""
        if self._failed_starts < _FAILED_STARTS or any(
            one.user is not self for one in self.workers
        ):
            return None
        return UnavailableError(
            f"the last {self._failed_starts} workers did not start ({self._problem}); their output "
            f"has the cause. The next start is tried within {_RETRY_S:g} s"
        )

    def idle(self, model: str) -> WorkerProcess | None:
        """Return the best idle worker for `model`: one that has its module, and ran it last, else
        the one longest unused.
        """
        return min(
            [worker for worker in self.workers if worker.user is None],
            key=lambda one: (model not in one.loaded, one.last_model != model, one.last_used),
            default=None,
        )

    def lose(self, worker: WorkerProcess, reason: str = "") -> None:
        """Kill a worker that is dead, stuck or useless, and start another."""
        if worker not in self.workers:
            return
        self.workers.remove(worker)
        self._owner.unwatch(worker.channel.fileno())
        worker.end(reason)
        self.deaths += 1
        if worker.user is not None:
            worker.user.on_lost(worker)
        self._fill()

    def check(self) -> None:
        """Start workers where that is due, and replace those that take too long."""
        now = time.monotonic()
        if self.server is not None and self.is_importing and self._server_due <= now:
            self._end(self.server)
            self._start_failed(f"it took more than {self._options.start_timeout_s:g} s")
        self._fill()
        for worker in [one for one in self.workers if one.due <= now]:
            worker.is_late = True
            self.lose(worker, f"took more than {worker.limit_s:g} s")

    def next_check(self) -> float:
        """Return when to call :meth:`check` again."""
        moments = [worker.due for worker in self.workers]
        if len(moments) < self._options.workers:
            moments.append(self._server_due if self.is_importing else self._next_start)
        return min(moments)

    def unmap(self, groups: list[tuple[str, int]]) -> None:
        """Let all workers give up the memory of groups, (model, group)."""
        for worker in self.workers:
            worker.unmap(groups)

    def on_message(self, worker: WorkerProcess, message: object, _: list[int]) -> None:
        """Send a worker the arena, or handle that it is ready."""
        if isinstance(message, _messages.WantParts):
            self._send_parts(worker, message.first)
            return
        worker.release()
        self._failed_starts = 0
        self._next_start = 0.0

    def on_lost(self, worker: WorkerProcess) -> None:
        """Handle that a worker did not start."""
        self._start_failed(worker.exit_reason)

    def _send_parts(self, worker: WorkerProcess, first: int) -> None:
        descriptors: list[int] = []
        try:
            for part in range(first, min(first + _PARTS_AT_ONCE, self.cache.memory.parts)):
                descriptors.append(self.cache.export(part, read_only=True))
            worker.send(_messages.Parts(), descriptors)
        except (OSError, SegmentError) as error:
            self.lose(worker, f"could not get the arena: {error}")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _read(self, worker: WorkerProcess) -> None:
        try:
            received = worker.channel.receive(0)
        except PeerLostError:
            self.lose(worker)
        except ProtocolError as error:
            self.lose(worker, f"sent a malformed message: {error}")
        else:
            if received is not None and worker.user is not None:
                worker.user.on_message(worker, *received)

    def status(self) -> list[dict[str, Any]]:
        """Return the workers, and the process that they will be forked from, for people."""
        found = [
            (one.pid, one.user.activity if one.user else "standby", one.last_model)
            for one in self.workers
        ]
        if self.server is not None and self.is_importing:
            found.append((self.server.process.pid, self.activity, ""))
        return [{"pid": pid, "state": state, "model": model} for pid, state, model in found]

    def close(self, timeout_s: float) -> None:
        """Ask all workers to end, and kill those that have not after `timeout_s`."""
        self._is_closing = True
        deadline = time.monotonic() + timeout_s
        idle = [worker for worker in self.workers if worker.user is None]
        for worker in self.workers:
            self._owner.unwatch(worker.channel.fileno())
        for worker in idle:
            worker.send(_messages.Exit())
        for worker in idle:
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        while self.workers:
            self.workers.pop().end("was closed")
        if self.server is not None:
            self._end(self.server)

    def _fill(self) -> None:
        """Start workers until there are enough; after a failure, some time later."""
        while len(self.workers) < self._options.workers and not self._is_closing:
            if self.is_importing or time.monotonic() < self._next_start:
                return
            try:
                if self.server is None:
                    self.server = ForkServer()
                    self._server_due = time.monotonic() + self._options.start_timeout_s
                    descriptor = self.server.channel.fileno()
                    self._owner.watch(descriptor, partial(self._read_server, self.server))
                    return
                worker = WorkerProcess(self.server, self.cache, self._options)
            except (OSError, PeerLostError, ProtocolError, SegmentError) as error:
                if self.server is not None and isinstance(error, PeerLostError | ProtocolError):
                    self._end(self.server)
                self._start_failed(str(error))
                return
            if not self.server.can_fork:  # it is the worker
                self._owner.unwatch(self.server.channel.fileno())
                self.server = None
            worker.work_for(self, self._options.start_timeout_s)
            self.workers.append(worker)
            self._owner.watch(worker.channel.fileno(), partial(self._read, worker))

    def _read_server(self, server: ForkServer) -> None:
        """Note that the server can start workers, or has died, and its workers with it."""
        try:
            received = server.channel.receive(0)
        except (PeerLostError, ProtocolError):
            self._end(server)
            self._start_failed(f"what forks them {server.process.exit_reason()}")
        else:
            if received is not None:
                server.can_fork = received[0]

    def _end(self, server: ForkServer) -> None:
        self._owner.unwatch(server.channel.fileno())
        server.end()
        self.server = None

    def _start_failed(self, reason: str) -> None:
        self._failed_starts += 1
        self._next_start, self._problem = time.monotonic() + _RETRY_S, reason
        _log.warning("a worker did not start: %s; the next try is in %g s", reason, _RETRY_S)

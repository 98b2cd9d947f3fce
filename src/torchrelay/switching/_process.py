"""A worker process, from the daemon's side."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Sequence

from torchrelay._helper import HelperProcess
from torchrelay.errors import PeerLostError
from torchrelay.switching._cache import SharedCache
from torchrelay.switching._request_buffer import BufferPool

__all__ = ["WorkerProcess"]

_log = logging.getLogger("torchrelay.switching")

PROGRAM = HelperProcess.command("torchrelay.switching._worker")


class WorkerProcess:
    """A started worker: its process and request buffers. Everything else is the daemon's state."""

    def __init__(self, cache: SharedCache, request_bytes: int, threads: int, workers: int) -> None:
        """Start a process, one of `workers` that share the device."""
        self.buffers = BufferPool(request_bytes)
        described = json.dumps(cache.describe(read_only=True))
        arena = cache.export(read_only=True)
        try:
            self.process = HelperProcess(
                [*PROGRAM, described, str(threads), str(workers)],
                [arena, self.buffers.current.descriptor],
            )
        finally:
            os.close(arena)
        self.channel = self.process.channel
        self.pid = self.process.pid
        self.started = time.monotonic()
        self.ready = False
        self.has_reader = False  # a caller's thread reads the channel
        self.loading = ""  # the model whose module it is building
        self.loading_since = 0.0
        self.loaded: dict[str, tuple[int, int]] = {}  # model -> (version, plan)
        self.unwanted: set[str] = set()  # unloaded models whose modules it may hold
        self.last_model = ""
        self.last_used = 0.0
        self.request_id = 0  # of what it runs, or 0

    @property
    def idle(self) -> bool:
        return self.ready and not self.request_id and not self.loading

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send; a dead worker is noticed when its channel is read."""
        try:
            self.channel.send(message, descriptors)
        except PeerLostError:
            _log.warning("a message to worker %d could not be sent", self.pid)

    def release(self) -> None:
        """Mark the worker as idle."""
        self.request_id = 0
        self.last_used = time.monotonic()

    def kill(self) -> None:
        """Kill the process and reap it. Idempotent."""
        self.process.kill()
        if not self.has_reader:  # else the reader closes it
            self.channel.close()

    @property
    def broke_memory(self) -> bool:
        """Whether the ended process read or wrote where it has no memory, or its device did."""
        code = self.process.exit_code
        return code is not None and (code > 0 or -code in (signal.SIGSEGV, signal.SIGBUS))

    def exit_reason(self) -> str:
        """Describe how the process ended."""
        reason = self.process.exit_reason()
        if self.process.exit_code == -signal.SIGSEGV:
            return f"{reason}; does the model write to its parameters or buffers?"
        return reason

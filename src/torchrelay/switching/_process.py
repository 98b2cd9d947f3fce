"""A worker process, from the daemon's side."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence

from torchrelay._python import module_command, search_path
from torchrelay.errors import PeerLostError
from torchrelay.switching._cache import SharedCache
from torchrelay.switching._channel import Channel, Message
from torchrelay.switching._request_buffer import BufferPool

__all__ = ["WorkerProcess"]

_log = logging.getLogger("torchrelay.switching")

PROGRAM = module_command("torchrelay.switching._worker")


class WorkerProcess:
    """A started worker: its process, channel and request buffers. Everything else is the daemon's
    state.
    """

    def __init__(self, cache: SharedCache, request_bytes: int, threads: int, workers: int) -> None:
        """Start a process, one of `workers` that share the device."""
        self.buffers = BufferPool(request_bytes)
        requests = self.buffers.current.descriptor
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        arena = cache.export(read_only=True)
        try:
            # The command line names inherited descriptors.
            arguments = {
                "channel": theirs.fileno(),
                "arena": arena,
                "requests": requests,
                "threads": threads,
                "workers": workers,
                "cache": json.dumps(cache.describe(read_only=True)),
            }
            command = [*PROGRAM]
            for name, value in arguments.items():
                command += [f"--{name}", str(value)]
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno(), arena, requests],
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "PYTHONPATH": search_path(),
                },
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(arena)
        self.channel = Channel(ours)
        self.started = time.monotonic()
        self.ready = False
        self.loading = ""  # the model whose modules it is building
        self.loading_since = 0.0
        self.loaded: dict[str, tuple[int, int]] = {}  # model -> (version, plan)
        self.unwanted: set[str] = set()  # unloaded models whose modules it may hold
        self.last_model = ""
        self.last_used = 0.0
        self.request_id = 0  # of what it runs, or 0

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def idle(self) -> bool:
        return self.ready and not self.request_id and not self.loading

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
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
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self.channel.close()

    def wait(self, timeout_s: float) -> None:
        """Wait for the process to end, for at most `timeout_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)

    @property
    def broke_memory(self) -> bool:
        """Whether the ended process read or wrote where it has no memory, or its device did."""
        code = self.process.returncode
        return code is not None and (code > 0 or -code in (signal.SIGSEGV, signal.SIGBUS))

    def exit_reason(self) -> str:
        """Describe how the process ended; its channel closes a moment before it does."""
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed its channel"
        if code < 0:
            name = signal.Signals(-code).name
            hint = (
                "; does the model write to its parameters or buffers?"
                if -code == signal.SIGSEGV
                else ""
            )
            return f"was killed by {name}{hint}"
        return f"ended with exit code {code}"

"""The process that workers are forked from: it has imported what they need, and nothing of a model.

Where a fork would not be safe, it becomes a worker itself, and each has its own.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import struct
from typing import Any, NamedTuple

from torchrelay._helper import Channel, HelperProcess, describe_exit, module_command
from torchrelay.errors import PeerLostError

__all__ = ["ForkServer", "ForkedProcess", "Start", "serve"]

PROGRAM = module_command("torchrelay.switching.worker._worker")
_REPLY_S = 10.0  # for a fork, or for the news that a killed process has ended
_STATUS = struct.Struct("=i")


class Start(NamedTuple):
    """Start a worker; answered by its pid, or a text of an error. With it come the write end of a
    pipe for its exit code, its own end of a channel, and its request buffers.

    A server that said that it cannot fork gets only the last, becomes the worker and answers none.
    """

    arena: dict[str, Any]  # as of SharedCache.describe
    threads: int
    workers: int  # that share the device


class ForkServer:
    """The daemon's side of a server process."""

    def __init__(self) -> None:
        """Start the process.

        Raises:
            OSError: no memory, descriptors or processes are left.
        """
        self.process = HelperProcess(PROGRAM)
        self.channel = self.process.channel
        self.can_fork: bool | None = None  # None: it still imports

    def start(self, start: Start, descriptors: list[int]) -> HelperProcess | ForkedProcess:
        """Start a worker, which gets `descriptors`. A server that cannot fork is of no use then.

        Raises:
            OSError: no memory, descriptors or processes are left.
            PeerLostError: the server has died, or is stopped.
        """
        if not self.can_fork:
            self.channel.send(start, descriptors)
            return self.process
        channel, theirs = Channel.pair()
        status, writer = os.pipe()
        try:
            self.channel.send(start, [writer, theirs.fileno(), *descriptors])
            answer = self.channel.receive(_REPLY_S)
            if answer is None:
                raise PeerLostError(f"what forks workers did not answer within {_REPLY_S:g} s")
            if isinstance(answer[0], str):
                raise OSError(answer[0])
            return ForkedProcess(answer[0], channel, status)
        except BaseException:
            channel.close()
            os.close(status)
            raise
        finally:
            theirs.close()
            os.close(writer)

    def end(self) -> None:
        """Kill the process, and with it all that it has forked."""
        self.process.kill()
        self.channel.close()


class ForkedProcess:
    """A worker that a server has forked, with the methods of :class:`HelperProcess`."""

    def __init__(self, pid: int, channel: Channel, status: int) -> None:
        """Take ownership of `channel`, and of `status`, from which the exit code can be read."""
        self.pid = pid
        self.channel = channel
        self.exit_code: int | None = None
        self._status = status

    def wait(self, timeout_s: float) -> None:
        """Wait for the process to exit, for at most `timeout_s`."""
        if self.exit_code is not None:
            return
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        if poll.poll(1e3 * timeout_s):
            # A server that has died has taken its workers with it.
            data = os.read(self._status, _STATUS.size)
            self._ended(_STATUS.unpack(data)[0] if data else -signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process, unless it has ended. Idempotent."""
        self.wait(0)
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait(_REPLY_S)
        if self.exit_code is None:  # the server is stopped
            self._ended(-signal.SIGKILL)
        self.channel.shut_down()

    def exit_reason(self) -> str:
        """Describe how the process ended; its channel closes a moment before that is known."""
        self.wait(1.0)
        return describe_exit(self.exit_code)

    def _ended(self, code: int) -> None:
        self.exit_code = code
        os.close(self._status)


# --- in the server


def serve(channel: Channel) -> tuple[Channel, Start, list[int]]:
    """Fork workers until the daemon ends. Return in each of them its channel, what it was started
    with, and the descriptors of its buffers.
    """
    can_fork = _can_fork()
    channel.send(can_fork)
    message: Any = None
    if not can_fork:
        message = channel.receive()
        return channel, *message
    gc.freeze()  # workers share the memory of what they do not change
    ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    statuses: dict[int, int] = {}  # by the worker's pid, the descriptors for their exit codes
    poll = select.poll()
    for descriptor in (channel.fileno(), ended):
        poll.register(descriptor, select.POLLIN)
    while True:
        poll.poll()
        with contextlib.suppress(BlockingIOError):
            os.read(ended, 1 << 12)
        _report(statuses)
        message = channel.receive(0)
        if message is None:
            continue
        start, (status, own, *buffers) = message
        try:
            answer: int | str = os.fork()
        except OSError as error:
            answer = str(error)
        if answer == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            channel.close()
            for descriptor in (ended, wake, status, *statuses.values()):
                os.close(descriptor)
            return Channel(socket.socket(fileno=own)), start, buffers
        channel.send(answer)
        if isinstance(answer, int):
            statuses[answer] = status
        else:
            os.close(status)
        for descriptor in (own, *buffers):
            os.close(descriptor)


def _report(statuses: dict[int, int]) -> None:
    """Pass on the exit codes of the workers that have ended."""
    for pid in list(statuses):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            with contextlib.suppress(BrokenPipeError):
                os.write(statuses[pid], _STATUS.pack(os.waitstatus_to_exitcode(status)))
            os.close(statuses.pop(pid))


def _can_fork() -> bool:
    """Return whether this process has no other threads, and has not touched a GPU."""
    # A fork ends the threads of NumPy's OpenBLAS, which come back when they are needed.
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    files = [os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
    has_gpu = any(one.startswith("/dev/nvidia") for one in files)
    return len(os.listdir("/proc/self/task")) == 1 and not has_gpu

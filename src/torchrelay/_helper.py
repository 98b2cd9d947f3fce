"""Helper processes, and the channels over which processes exchange messages and file descriptors.

Messages are pickles, so both ends of a channel must trust each other: a helper is started by its
owner, as the same user, to run the same code.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from torchrelay.errors import PeerLostError, ProtocolError

__all__ = ["Channel", "HelperProcess", "code_command", "module_command"]

# A peer that is stuck in the middle of a message is given up.
_STALL_TIMEOUT_S = 30
_TIMEVAL = struct.Struct("@ll")
# `python -m` and `python -c` put the current directory before the standard library, so that a
# secrets.py in it would be imported instead. `-P` prevents that from Python 3.11 on.
_WITHOUT_CURRENT_DIRECTORY = "import sys; sys.path[:] = filter(None, sys.path)\n"


class Channel:
    """One end of a Unix stream socket that carries messages and file descriptors.

    One thread at a time may send, and one may receive.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Take ownership of ``connection``."""
        limit = _TIMEVAL.pack(_STALL_TIMEOUT_S, 0)
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._connection = Connection(connection.detach())
        self._poll = select.poll()  # select() refuses descriptors from 1024 on
        self._poll.register(self._connection.fileno(), select.POLLIN)

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Return one end as a channel, and the other as a socket for another process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send one message; the receiver gets duplicates of ``descriptors``.

        Raises:
            PeerLostError: the other end is closed, or has received nothing for 30 s.
        """
        data = pickle.dumps((message, len(descriptors)), pickle.HIGHEST_PROTOCOL)
        try:
            self._connection.send_bytes(data)
            for descriptor in descriptors:
                with self._socket() as sock:
                    reduction.sendfds(sock, [descriptor])
        except OSError as error:
            raise PeerLostError(f"the other process closed its channel: {error}") from error

    def receive(self, timeout_s: float | None = None) -> tuple[Any, list[int]] | None:
        """Return the next message and its descriptors, which the caller closes; None after
        ``timeout_s``. Blocks; without end for None.

        Raises:
            PeerLostError: the other end is closed.
            ProtocolError: the data received is not a message.
        """
        if not self._poll.poll(None if timeout_s is None else 1e3 * timeout_s):
            return None
        try:
            data = self._connection.recv_bytes()
            try:
                message, count = pickle.loads(data)
            except Exception as error:
                raise ProtocolError(f"a message cannot be read: {error}") from error
            return message, [self._receive_descriptor() for _ in range(count)]
        except (EOFError, OSError) as error:
            if isinstance(error, ProtocolError):
                raise
            raise PeerLostError(f"the other end of a channel is closed: {error}") from error

    def shut_down(self) -> None:
        """End the stream: receivers at both ends raise. The descriptor stays open."""
        with contextlib.suppress(OSError), self._socket() as sock:
            sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._connection.close()

    def _receive_descriptor(self) -> int:
        with self._socket() as sock:
            try:
                (descriptor,) = reduction.recvfds(sock, 1)
            except (EOFError, RuntimeError, ValueError) as error:
                raise ProtocolError(
                    "the descriptor of a message did not arrive: this process has as many open as "
                    "its limit allows (ulimit -n)"
                ) from error
        os.set_inheritable(descriptor, False)
        return int(descriptor)

    @contextlib.contextmanager
    def _socket(self) -> Iterator[socket.socket]:
        """Lend the connection as a socket: to duplicate it would take a descriptor."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=self.fileno())
        try:
            yield sock
        finally:
            sock.detach()


class HelperProcess:
    """A process that runs a module of this package, with a channel to it.

    The command line ends with the inherited descriptors: that of the module's end of the channel,
    and those given.
    """

    def __init__(
        self, command: Sequence[str], descriptors: Sequence[int] = (), *, new_session: bool = False
    ) -> None:
        """Start the process.

        Args:
            command: as :meth:`command` returns it, with further arguments.
            new_session: keep the terminal's Ctrl-C from the process.

        Raises:
            OSError: no memory, descriptors or processes are left.
        """
        self.channel, theirs = Channel.pair()
        inherited = [theirs.fileno(), *descriptors]
        search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        try:
            self._process = subprocess.Popen(
                [*command, *map(str, inherited)],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": search_path},
                start_new_session=new_session,
            )
        except BaseException:
            self.channel.close()
            raise
        finally:
            theirs.close()

    @staticmethod
    def command(module: str) -> list[str]:
        """Return the command that runs ``module``."""
        return module_command(module)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while the process is not known to have
        exited.
        """
        return self._process.returncode

    def wait(self, timeout_s: float | None) -> None:
        """Wait for the process to exit, for at most ``timeout_s``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def kill(self) -> None:
        """Kill the process and reap it; the channel stays open. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self.channel.shut_down()

    def abandon(self) -> None:
        """Forget the process, in a forked child: it is the parent's."""
        self.channel.close()
        self._process.returncode = 0  # nothing to wait for here

    def exit_reason(self) -> str:
        """Describe how the process ended; its channel closes a moment before it does."""
        self.wait(1.0)
        code = self.exit_code
        if code is None:
            return "closed its channel"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def code_command(code: str) -> list[str]:
    """Return a command that runs ``code``, as ``python -c`` does; arguments may follow."""
    return [sys.executable, "-c", _WITHOUT_CURRENT_DIRECTORY + code]


def module_command(module: str) -> list[str]:
    """Return a command that runs a module, as ``python -m`` does; arguments may follow."""
    return code_command(
        f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )

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
from array import array
from collections.abc import Sequence
from typing import Any

from torchrelay._platform import CLOSE_RECEIVED, anonymous_file, socket_pair
from torchrelay.errors import PeerLostError, ProtocolError

__all__ = [
    "Channel",
    "HelperProcess",
    "code_command",
    "describe_exit",
    "environment",
    "module_command",
]

# A peer that does not receive what was sent before is given up.
_STALL_TIMEOUT_S = 30
_TIMEVAL = struct.Struct("@ll")
_LENGTH = struct.Struct("!I")  # of a message, before it in a stream
# A larger message is in a file, whose descriptor is sent: a packet must fit the socket's buffer.
_PACKET_BYTES = 32 << 10
_IN_FILE = b"in a file"
# As integers: operations of enumerations take as long as a system call.
_WAIT = CLOSE_RECEIVED
_DO_NOT_WAIT = _WAIT | int(socket.MSG_DONTWAIT)
_CTRUNC = int(socket.MSG_CTRUNC)
_CONTROL_BYTES = socket.CMSG_LEN(253 * 4)  # as many descriptors as the kernel sends in a packet
# `python -m` and `python -c` put the current directory before the standard library, so that a
# secrets.py in it would be imported instead. `-P` prevents that from Python 3.11 on.
_WITHOUT_CURRENT_DIRECTORY = "import sys; sys.path[:] = filter(None, sys.path)\n"


class Channel:
    """One end of a Unix socket that carries messages and file descriptors, each message as a packet
    (`SOCK_SEQPACKET`); over a stream, each after its length.

    One thread at a time may send, and one may receive.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Take ownership of ``connection``."""
        connection.settimeout(None)
        limit = _TIMEVAL.pack(_STALL_TIMEOUT_S, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._is_stream = connection.type == socket.SOCK_STREAM
        if self._is_stream:  # of which the rest of a message must follow
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket = connection
        self._poll = select.poll()  # select() refuses descriptors from 1024 on
        self._poll.register(connection, select.POLLIN)

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Return one end as a channel, and the other as a socket for another process."""
        ours, theirs = socket_pair()
        return cls(ours), theirs

    def fileno(self) -> int:
        """Return the descriptor of the socket; -1 once it is closed."""
        return self._socket.fileno()

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Send one message; the receiver gets duplicates of ``descriptors``.

        Raises:
            PeerLostError: the other end is closed, or has received nothing for 30 s.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if len(data) <= _PACKET_BYTES:
            self._send(data, descriptors)
            return
        with os.fdopen(anonymous_file("torchrelay-message"), "wb") as file:
            file.write(data)
            file.flush()
            self._send(_IN_FILE, [file.fileno(), *descriptors])

    def receive(self, timeout_s: float | None = None) -> tuple[Any, list[int]] | None:
        """Return the next message and its descriptors, which the caller closes; None after
        ``timeout_s``. Blocks; without end for None.

        Raises:
            PeerLostError: the other end is closed.
            ProtocolError: the data received is not a message.
        """
        waits = _WAIT if timeout_s is None else _DO_NOT_WAIT
        try:
            if timeout_s or (waits is _WAIT and self._is_stream):
                self._poll.poll(timeout_s and 1e3 * timeout_s)
            # socket.recv_fds of Python before 3.12 ignores flags.
            size = _LENGTH.size if self._is_stream else _PACKET_BYTES
            data, controls, flags, _ = self._socket.recvmsg(size, _CONTROL_BYTES, waits)
        except BlockingIOError:
            return None
        except OSError as error:
            raise PeerLostError(f"the other end of a channel is closed: {error}") from error
        descriptors = [one for *_, raw in controls for one in array("i", raw)]
        if not CLOSE_RECEIVED:
            for one in descriptors:
                os.set_inheritable(one, False)
        if not data:
            raise PeerLostError("the other end of a channel is closed")
        if self._is_stream:
            data = self._rest(data)
        if flags & _CTRUNC:
            raise ProtocolError(
                "the descriptor of a message did not arrive: this process has as many open as its "
                "limit allows (ulimit -n)"
            )
        try:
            if data == _IN_FILE:
                with os.fdopen(descriptors.pop(0), "rb") as file:
                    file.seek(0)
                    data = file.read()
            return pickle.loads(data), descriptors
        except Exception as error:
            raise ProtocolError(f"a message cannot be read: {error}") from error

    def _rest(self, data: bytes) -> bytes:
        """Return the message of a stream whose length begins with ``data``."""

        def following(size: int, found: bytes = b"") -> bytes:
            while len(found) < size:
                try:
                    part = self._socket.recv(size - len(found))
                except OSError as error:
                    raise PeerLostError(f"the rest of a message did not arrive: {error}") from error
                if not part:
                    raise PeerLostError("the other end of a channel closed it within a message")
                found += part
            return found

        (size,) = _LENGTH.unpack(following(_LENGTH.size, data))
        if size > _PACKET_BYTES:
            raise ProtocolError(f"{size} bytes cannot be a message")
        return following(size)

    def shut_down(self) -> None:
        """End the stream: receivers at both ends raise. The descriptor stays open."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._socket.close()

    def _send(self, data: bytes, descriptors: Sequence[int]) -> None:
        if self._is_stream:
            data = _LENGTH.pack(len(data)) + data
        try:
            if descriptors:
                sent = socket.send_fds(self._socket, [data], descriptors)
            else:
                sent = self._socket.send(data)
            if sent < len(data):  # of a stream
                self._socket.sendall(data[sent:])
        except OSError as error:
            raise PeerLostError(f"the other process closed its channel: {error}") from error


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
            command: as :func:`module_command` returns it, with further arguments.
            new_session: keep the terminal's Ctrl-C from the process.

        Raises:
            OSError: no memory, descriptors or processes are left.
        """
        self.channel, theirs = Channel.pair()
        inherited = [theirs.fileno(), *descriptors]
        try:
            self._process = subprocess.Popen(
                [*command, *map(str, inherited)],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                env=environment(),
                start_new_session=new_session,
            )
        except BaseException:
            self.channel.close()
            raise
        finally:
            theirs.close()

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
        return describe_exit(self.exit_code)


def describe_exit(code: int | None) -> str:
    """Describe an exit code; None is that of a process that is not known to have exited."""
    if code is None:
        return "closed its channel"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def environment() -> dict[str, str]:
    """Return the environment of a process that imports what this one does."""
    # imports leave out what is not a string, such as a pathlib.Path
    entries = (path or os.getcwd() for path in sys.path if isinstance(path, str))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entries)}


def code_command(code: str) -> list[str]:
    """Return a command that runs ``code``, as ``python -c`` does; arguments may follow."""
    return [sys.executable, "-c", _WITHOUT_CURRENT_DIRECTORY + code]


def module_command(module: str) -> list[str]:
    """Return a command that runs a module, as ``python -m`` does; arguments may follow."""
    return code_command(
        f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )

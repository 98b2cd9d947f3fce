"""File descriptors passed between processes of one user over a Unix socket."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchrelay._helper import Channel
from torchrelay.errors import (
    ArgumentError,
    OperationTimeoutError,
    PeerLostError,
    ProtocolError,
)

__all__ = ["receive_descriptor", "send_descriptor"]

_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_POLL_S = 0.01


def send_descriptor(
    address: str | Path, header: dict[str, Any], descriptor: int, *, timeout_s: float
) -> None:
    """Wait for one process of this user at `address` and send it `descriptor` with a `header`.

    The socket file is created with mode 0600 and removed before this returns. Processes of other
    users are refused and do not count. A stale socket file is replaced.

    Raises:
        ArgumentError: `address` is too long, in use, or names something that is not a socket.
        OperationTimeoutError: no process received within `timeout_s` seconds.
        PeerLostError: the receiver went away before it acknowledged.
    """
    path, deadline = Path(address), time.monotonic() + timeout_s
    with _listening(path) as listener:
        channel = None
        while channel is None:
            listener.settimeout(_seconds_until(deadline))
            try:
                channel = _channel_of_this_user(listener.accept()[0])
            except TimeoutError:
                raise OperationTimeoutError(
                    f"no process received the shared cache at {path} within {timeout_s:g} s; call "
                    "recv() there"
                ) from None
        with contextlib.closing(channel):
            channel.send(header, [descriptor])
            if channel.receive(_seconds_until(deadline)) is None:
                raise PeerLostError(f"the receiver at {path} did not map the cache in time")


def receive_descriptor(address: str | Path, *, timeout_s: float) -> tuple[dict[str, Any], int]:
    """Connect to a sender at `address`, waiting for it to listen, and return its header and the
    descriptor, which the caller closes.

    Raises:
        OperationTimeoutError: nothing arrived within `timeout_s` seconds.
        ProtocolError: what listens there is not a sender, or is another user's process.
    """
    path, deadline = Path(address), time.monotonic() + timeout_s
    while (connection := _connected(path, _seconds_until(deadline))) is None:
        if time.monotonic() > deadline:
            raise OperationTimeoutError(
                f"no shared cache was sent at {path} within {timeout_s:g} s; call send() in "
                "the process that allocated it"
            )
        time.sleep(_POLL_S)
    channel = _channel_of_this_user(connection)
    if channel is None:
        raise ProtocolError(f"the process that listens at {path} belongs to another user")
    with contextlib.closing(channel):
        try:
            received = channel.receive(_seconds_until(deadline))
        except PeerLostError as error:
            raise ProtocolError(f"what listens at {path} is no sender: {error}") from error
        if received is None:
            raise OperationTimeoutError(
                f"the sender at {path} accepted but sent nothing within {timeout_s:g} s"
            )
        header, descriptors = received
        if not isinstance(header, dict) or len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ProtocolError(f"what listens at {path} sent no shared cache")
        with contextlib.suppress(PeerLostError):  # the descriptor is here in any case
            channel.send(None)
    return header, descriptors[0]


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            _remove_stale(path)
            # The mode of a socket file follows the umask; no process can connect before listen().
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(8)
        except OSError as error:
            raise ArgumentError(
                f"cannot listen at {path}: {error}; choose another socket path"
            ) from error
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _remove_stale(path: Path) -> None:
    """Remove a socket file without a listener; leave everything else alone."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_socket():
        raise ArgumentError(f"{path} exists and is not a socket; choose another socket path")
    connection = _connected(path, timeout_s=1.0)
    if connection is not None:
        connection.close()
        raise ArgumentError(f"another process listens at {path}; choose another socket path")
    path.unlink(missing_ok=True)


def _connected(path: Path, timeout_s: float) -> socket.socket | None:
    """Return a connection to what listens at `path`; None if nothing does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    return connection


def _channel_of_this_user(connection: socket.socket) -> Channel | None:
    """Return a channel if the other end of `connection` is a process of this user; else close
    it.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    if _PEER_CREDENTIALS.unpack(raw)[1] == os.geteuid():
        return Channel(connection)
    connection.close()
    return None


def _seconds_until(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())

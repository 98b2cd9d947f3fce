"""File descriptors passed between processes of one user over a Unix socket."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchrelay.errors import (
    ArgumentError,
    OperationTimeoutError,
    PeerLostError,
    ProtocolError,
    UnavailableError,
)

__all__ = ["receive_descriptor", "send_descriptor"]

_VERSION = 2
_HEADER_BYTES = 4096  # JSON, padded with spaces
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_POLL_S = 0.01
_ACKNOWLEDGED = b"\x06"


def send_descriptor(
    address: str | Path, header: dict[str, Any], descriptor: int, *, timeout_s: float
) -> None:
    """Wait for one process of this user at `address` and send it `descriptor` with a JSON `header`.

    The socket file is created with mode 0600 and removed before this returns. Processes of other
    users are refused and do not count. A stale socket file is replaced.

    Raises:
        ArgumentError: `address` is too long, in use, or names something that is not a socket.
        OperationTimeoutError: no process received within `timeout_s` seconds.
        PeerLostError: the receiver went away before it acknowledged.
    """
    path, deadline = Path(address), time.monotonic() + timeout_s
    message = json.dumps({"version": _VERSION, **header}).encode().ljust(_HEADER_BYTES)
    with _listening(path) as listener:
        while True:
            listener.settimeout(_seconds_until(deadline))
            try:
                connection = listener.accept()[0]
            except TimeoutError:
                raise OperationTimeoutError(
                    f"no process received the shared cache at {path} within {timeout_s:g} s; call "
                    "recv() there"
                ) from None
            with connection:
                if _peer_uid(connection) == os.geteuid():
                    connection.settimeout(_seconds_until(deadline))
                    _deliver(connection, message, descriptor, path)
                    return


def receive_descriptor(address: str | Path, *, timeout_s: float) -> tuple[dict[str, Any], int]:
    """Connect to a sender at `address`, waiting for it to listen, and return its header and the
    descriptor, which the caller closes.

    Raises:
        OperationTimeoutError: nothing arrived within `timeout_s` seconds.
        ProtocolError: the sender speaks another version, or is another user's process.
    """
    path, deadline = Path(address), time.monotonic() + timeout_s
    while True:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(_seconds_until(deadline))
                connection.connect(str(path))
                return _receive(connection, path)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise OperationTimeoutError(
                    f"no shared cache was sent at {path} within {timeout_s:g} s; call send() in "
                    "the process that allocated it"
                ) from None
            time.sleep(_POLL_S)
        except TimeoutError:
            raise OperationTimeoutError(
                f"the sender at {path} accepted but sent nothing within {timeout_s:g} s"
            ) from None


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            _remove_stale(path)
            # The mode of a socket file follows the umask; no process can connect before listen().
            listener.bind(str(path))
            path.chmod(0o600)
            inode = path.stat().st_ino
            listener.listen(8)
        except OSError as error:
            raise ArgumentError(
                f"cannot listen at {path}: {error}; choose another socket path"
            ) from error
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if path.stat().st_ino == inode:
                    path.unlink()


def _remove_stale(path: Path) -> None:
    """Remove a socket file without a listener; leave everything else alone."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ArgumentError(f"{path} exists and is not a socket; choose another socket path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise ArgumentError(f"another process listens at {path}; choose another socket path")


def _deliver(connection: socket.socket, message: bytes, descriptor: int, path: Path) -> None:
    try:
        socket.send_fds(connection, [message], [descriptor])
        acknowledged = connection.recv(1)
    except OSError as error:
        raise PeerLostError(f"the receiver at {path} closed its connection: {error}") from error
    if acknowledged != _ACKNOWLEDGED:
        raise PeerLostError(
            f"the receiver at {path} closed its connection before it mapped the cache"
        )


def _receive(connection: socket.socket, path: Path) -> tuple[dict[str, Any], int]:
    if _peer_uid(connection) != os.geteuid():
        raise ProtocolError(f"the process that listens at {path} belongs to another user")
    data, descriptors, _, _ = socket.recv_fds(connection, _HEADER_BYTES, 1, socket.MSG_WAITALL)
    try:
        try:
            header = json.loads(data)
        except ValueError:
            header = None
        if (
            len(descriptors) != 1
            or not isinstance(header, dict)
            or (header.get("version") != _VERSION)
        ):
            raise ProtocolError(
                f"what listens at {path} is no sender of version {_VERSION}; is it TorchRelay's?"
            )
        connection.sendall(_ACKNOWLEDGED)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return header, descriptors[0]


def _peer_uid(connection: socket.socket) -> int:
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    except OSError as error:
        raise UnavailableError(f"the kernel does not report who is connected: {error}") from error
    uid: int = _PEER_CREDENTIALS.unpack(raw)[1]
    return uid


def _seconds_until(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())

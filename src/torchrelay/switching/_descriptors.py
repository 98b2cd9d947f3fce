"""File descriptors passed between processes of one user over a Unix socket."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import time
from pathlib import Path
from typing import Any

from torchrelay.errors import (
    ArgumentError,
    OperationTimeoutError,
    PeerLostError,
    ProtocolError,
    UnavailableError,
)

__all__ = ["receive_descriptors", "send_descriptors"]

_VERSION = 1
_MAX_HEADER_BYTES = 4096
_MAX_DESCRIPTORS = 4
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_POLL_S = 0.01


def send_descriptors(
    address: str | Path, header: dict[str, Any], descriptors: list[int], *, timeout_s: float
) -> None:
    """Wait for one process of this user at `address` and send it `descriptors` with a JSON
    `header`.

    The socket file is created with mode 0600 and removed before this returns. Processes of other
    users are refused and do not count. A stale socket file is replaced.

    Raises:
        ArgumentError: `address` is too long, in use, or names something that is not a socket.
        OperationTimeoutError: no process received within `timeout_s` seconds.
        PeerLostError: the receiver went away before it acknowledged.
    """
    path = Path(address)
    start = time.monotonic()
    message = json.dumps({"version": _VERSION, **header}).encode()
    with _listen(path) as listener:
        inode = path.stat().st_ino
        try:
            while True:
                remaining_s = start + timeout_s - time.monotonic()
                with _accept(listener, remaining_s, path, timeout_s) as connection:
                    if _peer_uid(connection) != os.geteuid():
                        continue
                    connection.settimeout(max(0.001, start + timeout_s - time.monotonic()))
                    _deliver(connection, message, descriptors, path)
                    return
        finally:
            with contextlib.suppress(OSError):
                if path.stat().st_ino == inode:
                    path.unlink()


def receive_descriptors(
    address: str | Path, *, timeout_s: float
) -> tuple[dict[str, Any], list[int]]:
    """Connect to a sender at `address`, waiting for it to listen, and return its header and
    descriptors.

    The caller closes the descriptors.

    Raises:
        OperationTimeoutError: nothing arrived within `timeout_s` seconds.
        ProtocolError: the sender speaks another version, or is another user's process.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _receive_once(Path(address), deadline)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise OperationTimeoutError(
                    f"no shared cache was sent at {address} within {timeout_s:g} s; call send() in "
                    "the process that allocated it"
                ) from None
            time.sleep(_POLL_S)
        except TimeoutError:
            raise OperationTimeoutError(
                f"the sender at {address} accepted but sent nothing within {timeout_s:g} s"
            ) from None


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        # The mode of a socket file follows the umask; no process can connect before listen().
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(8)
    except OSError as error:
        listener.close()
        raise ArgumentError(
            f"cannot listen at {path}: {error}; choose another socket path"
        ) from error
    except BaseException:
        listener.close()
        raise
    return listener


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


def _accept(
    listener: socket.socket, remaining_s: float, path: Path, timeout_s: float
) -> socket.socket:
    listener.settimeout(max(0.001, remaining_s))
    try:
        return listener.accept()[0]
    except TimeoutError:
        raise OperationTimeoutError(
            f"no process received the shared cache at {path} within {timeout_s:g} s; call recv() "
            "there"
        ) from None


def _deliver(connection: socket.socket, message: bytes, descriptors: list[int], path: Path) -> None:
    try:
        socket.send_fds(connection, [struct.pack("!I", len(message)) + message], descriptors)
        acknowledged = connection.recv(1)
    except OSError as error:
        raise PeerLostError(f"the receiver at {path} closed its connection: {error}") from error
    if acknowledged != b"\x06":
        raise PeerLostError(
            f"the receiver at {path} closed its connection before it mapped the cache"
        )


def _receive_once(path: Path, deadline: float) -> tuple[dict[str, Any], list[int]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        connection.connect(str(path))
        if _peer_uid(connection) != os.geteuid():
            raise ProtocolError(f"the process that listens at {path} belongs to another user")
        data, descriptors, _, _ = socket.recv_fds(connection, _MAX_HEADER_BYTES, _MAX_DESCRIPTORS)
        try:
            header = _parse(connection, data, path)
            connection.sendall(b"\x06")
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return header, descriptors


def _parse(connection: socket.socket, data: bytes, path: Path) -> dict[str, Any]:
    expected = 4 + (struct.unpack("!I", data[:4])[0] if len(data) >= 4 else 0)
    while 4 <= len(data) < expected <= _MAX_HEADER_BYTES:
        more = connection.recv(expected - len(data))
        if not more:
            break
        data += more
    try:
        header = json.loads(data[4:]) if len(data) == expected else None
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("version") != _VERSION:
        raise ProtocolError(
            f"what listens at {path} is no sender of version {_VERSION}; is it TorchRelay's?"
        )
    return header


def _peer_uid(connection: socket.socket) -> int:
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    except OSError as error:
        raise UnavailableError(f"the kernel does not report who is connected: {error}") from error
    uid: int = _PEER_CREDENTIALS.unpack(raw)[1]
    return uid

"""The key of a job, which encrypts what leaves a host, and the network between nodes of tables
and between ranks of ``mpi``.

The native core opens connections; messages never pass through Python.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
from pathlib import Path

from torchrelay import _native
from torchrelay._platform import need_core
from torchrelay.config import TransportSettings
from torchrelay.errors import ConfigError

__all__ = ["TransportSettings", "create_key", "network", "read_key"]

KEY_VARIABLES = "TORCHRELAY_TRANSPORT_KEY_FILE or TORCHRELAY_TRANSPORT_KEY"
TOKEN_BYTES = 16
_KEY_BYTES = 32
_NAME_BYTES = 6


def create_key(path: str | Path) -> None:
    """Write a new key, 64 hexadecimal digits, to a file that only its owner can read.

    Raises:
        FileExistsError: the file exists; keys are never overwritten.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(_KEY_BYTES) + "\n")


def read_key(settings: TransportSettings) -> bytes | None:
    """Return the key that ``settings`` have, 32 bytes; None if they have none.

    Raises:
        ConfigError: it is no key, its file cannot be read, or others may read or change it.
    """
    text, origin = settings.key, "TORCHRELAY_TRANSPORT_KEY"
    if not (text or settings.key_file):
        return None
    if text and settings.key_file:
        raise ConfigError(f"set {KEY_VARIABLES}, not both")
    if settings.key_file:
        text, origin = _read_private(settings.key_file), f"the key file {settings.key_file}"
    if not re.fullmatch(rf"[0-9a-fA-F]{{{2 * _KEY_BYTES}}}", text.strip()):
        raise ConfigError(
            f"{origin} does not contain a key, which is {2 * _KEY_BYTES} hexadecimal digits; make "
            "one with `torchrelay key create PATH`"
        )
    return bytes.fromhex(text)


def _read_private(path: str) -> str:
    """Return the text of a file that only its owner may read, or, if that is root, also its group,
    as the files of a Kubernetes Secret are.
    """
    try:
        with open(path, encoding="ascii") as file:
            about, text = os.fstat(file.fileno()), file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {path} cannot be read: {error}") from error
    refused = stat.S_IRWXO | stat.S_IWGRP | (stat.S_IRGRP if about.st_uid else 0)
    if stat.S_IMODE(about.st_mode) & refused:
        raise ConfigError(
            f"other users may access the key file {path}; use `chmod 600`, or `defaultMode: 0440` "
            "for the volume of a Kubernetes Secret"
        )
    return text


def key_name(key: bytes | None) -> str:
    """Return a name that processes compare to see whether they have the same key, which cannot be
    computed from it.
    """
    if key is None:
        return "none"
    return hashlib.blake2b(key, digest_size=_NAME_BYTES, person=b"torchrelay key").hexdigest()


def encryption(key: bytes | None) -> _native.Tls | None:
    """Return what encrypts connections with ``key``; None without a key.

    Raises:
        UnavailableError: there is no libssl 3.
    """
    if key is None:
        return None
    need_core("encryption between hosts")
    return _native.Tls(libssl_path(), key)


def libssl_path() -> str:
    """Return the libssl 3 that this process has loaded, such as Python's own, else the system's."""
    with contextlib.suppress(ImportError):
        import _ssl  # noqa: F401, PLC0415 - it loads the library, and only keys need it
    for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
        path = line.partition("/")[2]
        if re.fullmatch(r"libssl[^/]*\.so\.3[.\d]*", os.path.basename(path)):
            return f"/{path}"
    return "libssl.so.3"


def network(
    settings: TransportSettings,
    *,
    token: bytes,
    interface: str = "127.0.0.1",
    peer_timeout_s: float | None = None,
) -> _native.TcpNetwork:
    """Create this process's network for nodes of the parameter manager or ranks of ``mpi``.

    With a key, its TCP connections are encrypted; local ones, through Unix sockets, are not.

    Args:
        token: the same 16 bytes on all nodes.
        interface: the address at which other hosts reach this one; default: none can.
        peer_timeout_s: instead of that of ``settings``; 0: a peer may read nothing for any time.

    Raises:
        ConfigError: the key is invalid.
        UnavailableError: there is a key, but no libssl 3.
    """
    return _native.TcpNetwork(
        token=token,
        tls=encryption(read_key(settings)),
        interface=interface,
        max_message_bytes=settings.max_message_bytes,
        local_sockets=settings.local_sockets,
        peer_timeout_s=settings.peer_timeout_s if peer_timeout_s is None else peer_timeout_s,
    )

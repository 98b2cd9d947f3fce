"""Networks between the nodes of a job: plain sockets, or ZeroMQ with encryption.

The native core opens endpoints on these networks; messages never pass through Python.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay import _native, config
from torchrelay._waiting import read_key
from torchrelay.config import TransportSettings
from torchrelay.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = [
    "TOKEN_BYTES",
    "TransportSettings",
    "create_key_file",
    "network",
    "plain_network",
    "read_key_file",
    "session_token",
    "zmq_library_path",
    "zmq_network",
]

TOKEN_BYTES = 16


def zmq_library_path() -> str:
    """Return the path of the libzmq in the pyzmq wheel.

    Raises:
        UnavailableError: pyzmq was built against the system's libzmq.
    """
    import zmq  # noqa: PLC0415 - costs 30 ms, and only networks need it

    package = Path(zmq.__file__).parent
    for folder in (package.parent / "pyzmq.libs", package / ".libs", package):
        for path in sorted(folder.glob("libzmq*.so*")):
            return str(path)
    raise UnavailableError(
        f"there is no libzmq beside {package}; install pyzmq as a wheel, not from source"
    )


def create_key_file(path: str | Path) -> None:
    """Write a new CURVE key pair that only its owner can read. All nodes use the same file.

    Raises:
        FileExistsError: the file exists; keys are never overwritten.
    """
    import zmq  # noqa: PLC0415

    public, secret = zmq.curve_keypair()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(public + b"\n" + secret + b"\n")


def read_key_file(path: str | Path) -> tuple[str, str]:
    """Return the public and the secret key in ``path``.

    Raises:
        ConfigError: it cannot be read, others may read it, or it contains no key pair.
    """
    try:
        others_may_read = Path(path).stat().st_mode & 0o077
        keys = Path(path).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {path} cannot be read: {error}") from error
    if others_may_read:
        raise ConfigError(f"other users may access the key file {path}; use chmod 600")
    if [len(key) for key in keys] != [40, 40]:
        raise ConfigError(
            f"{path} is no key file; make one with torchrelay.transport.create_key_file"
        )
    return keys[0], keys[1]


def session_token(store: Store, node: int, name: str = "", timeout_s: float = 60.0) -> bytes:
    """Return the secret that authenticates the nodes of this job.

    Node 0 draws it; the others wait for it in ``store``.

    Raises:
        OperationTimeoutError: node 0 did not write it within ``timeout_s``.
    """
    key = f"torchrelay/transport/{name}/token"
    if node == 0:
        store.set(key, secrets.token_hex(TOKEN_BYTES))
    message = (
        f"node {node}: node 0 did not write the job's token to the store within {{elapsed_s}} s; "
        "is it running?"
    )
    return bytes.fromhex(read_key(store, key, 0, message, timeout_s))


def network(
    settings: TransportSettings, *, token: bytes, interface: str = "127.0.0.1"
) -> _native.ZmqNetwork | _native.TcpNetwork:
    """Create the network that ``settings`` choose; see :func:`zmq_network` and
    :func:`plain_network`.
    """
    make = zmq_network if settings.uses_zeromq else plain_network
    return make(settings, token=token, interface=interface)


def zmq_network(
    settings: TransportSettings | None = None, *, token: bytes, interface: str = "127.0.0.1"
) -> _native.ZmqNetwork:
    """Create a ZeroMQ network for this process.

    Args:
        token: the same 16 bytes on all nodes; see :func:`session_token`.
        interface: the address at which other hosts reach this one; default: none can.

    Raises:
        ConfigError: the key file is invalid.
        UnavailableError: libzmq is missing.
    """
    settings = settings or config.load(TransportSettings)
    public, secret = read_key_file(settings.key_file) if settings.key_file else ("", "")
    return _native.ZmqNetwork(
        zmq_library_path(),
        token=token,
        interface=interface,
        max_message_bytes=settings.max_message_bytes,
        local_sockets=settings.local_sockets,
        heartbeat_s=settings.heartbeat_s,
        peer_timeout_s=settings.peer_timeout_s,
        linger_s=settings.linger_s,
        spin_s=settings.spin_s,
        io_threads=settings.io_threads,
        curve_public_key=public,
        curve_secret_key=secret,
    )


def plain_network(
    settings: TransportSettings | None = None, *, token: bytes, interface: str = "127.0.0.1"
) -> _native.TcpNetwork:
    """Create a network of plain sockets: faster than :func:`zmq_network`, and not encrypted.

    Arguments as for :func:`zmq_network`.

    Raises:
        ConfigError: a key file is set, but plain sockets do not encrypt.
    """
    settings = settings or config.load(TransportSettings)
    if settings.key_file:
        raise ConfigError(
            "TORCHRELAY_TRANSPORT_KEY_FILE is set, but plain sockets do not encrypt: use "
            "zmq_network, or unset it"
        )
    return _native.TcpNetwork(
        token=token,
        interface=interface,
        max_message_bytes=settings.max_message_bytes,
        local_sockets=settings.local_sockets,
        peer_timeout_s=settings.peer_timeout_s,
        linger_s=settings.linger_s,
        spin_s=settings.spin_s,
    )

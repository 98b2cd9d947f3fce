"""The addresses of this host."""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import Any

__all__ = ["DISCARD_PORT", "address_of_device", "address_towards"]

# Connecting a datagram socket to it sends nothing, but finds the route.
DISCARD_PORT = 9
_SIOCGIFADDR = 0x8915
_MAX_NAME = 15  # bytes of a device's name


def address_towards(address: tuple[Any, ...], family: int = socket.AF_INET) -> str:
    """Return this host's address on the route to the socket address ``address``. Sends nothing.

    Raises:
        OSError: there is no route.
    """
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def address_of_device(name: str) -> str:
    """Return the IPv4 address of a network device.

    Raises:
        OSError: there is no such device, or it has no IPv4 address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:_MAX_NAME])
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])

"""The ports of an XDP switch, and the hosts behind them."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Mapping, Sequence

from torchrelay._addresses import DISCARD_PORT, mac_of_device
from torchrelay.errors import ConfigError, UnavailableError

__all__ = ["indices_of", "link_to"]

_MAX_PORTS = 64
_SIOCGARP, _ATF_COM = 0x8954, 2


def indices_of(interfaces: Sequence[str]) -> dict[int, str]:
    """Return the names of network interfaces by index.

    Raises:
        ConfigError: there is no such interface, or they are too many.
    """
    if not 1 <= len(interfaces) <= _MAX_PORTS:
        raise ConfigError(f"XDP: {len(interfaces)} interfaces; it takes 1 to {_MAX_PORTS}")
    found = {}
    for name in interfaces:
        try:
            found[socket.if_nametoindex(name)] = name
        except OSError:
            raise ConfigError(f"XDP: there is no network interface {name!r}") from None
    return found


def link_to(
    address: str, interfaces: Mapping[int, str], sock: socket.socket
) -> tuple[int, bytes, bytes]:
    """Return which of the ports, whose names are given by index, leads to a host; its MAC address,
    and the port's.

    Args:
        sock: any UDP socket in the network namespace of the ports.

    Raises:
        UnavailableError: it is not known yet where the host is; try again.
    """
    for ifindex, interface in interfaces.items():
        mac = _arp_entry(address, interface, sock)
        if mac is not None:
            return ifindex, mac, mac_of_device(interface, sock)
    with contextlib.suppress(OSError):  # makes the kernel resolve the address
        sock.sendto(b"", (address, DISCARD_PORT))
    raise UnavailableError(
        f"XDP: {address} has not answered ARP yet at any of this switch's ports "
        f"({', '.join(interfaces.values())}); is it on the network of one?"
    )


def _arp_entry(address: str, interface: str, sock: socket.socket) -> bytes | None:
    family = struct.pack("=H2x4s8x", socket.AF_INET, socket.inet_aton(address))
    request = struct.pack("=16s16xi16x16s", family, 0, interface.encode())
    try:
        entry = fcntl.ioctl(sock, _SIOCGARP, request)
    except OSError:
        return None
    flags: int = struct.unpack_from("=i", entry, 32)[0]
    return entry[18:24] if flags & _ATF_COM else None

"""The addresses of this host, and the one at which other hosts reach it."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrelay._platform import boot_id
from torchrelay.errors import UnavailableError

__all__ = [
    "DISCARD_PORT",
    "address_for_anyone",
    "address_for_peers",
    "address_of_device",
    "address_towards",
    "is_loopback",
    "is_unspecified",
    "listen_at",
    "mac_of_device",
    "network_identity",
]

# Connecting a datagram socket to it sends nothing, but finds the route.
DISCARD_PORT = 9
# Addresses reserved for documentation: the route to them is the default route.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")
_SIOCGIFADDR, _SIOCGIFHWADDR = 0x8915, 0x8927
_MAX_NAME = 15  # bytes of a device's name
_SCOPES = {"00", "10"}  # of IPv6 addresses: global, this host
_BACKLOG = 1024


def address_towards(address: tuple[Any, ...], family: int = socket.AF_INET) -> str:
    """Return this host's address on the route to the socket address ``address``. Sends nothing.

    Raises:
        OSError: there is no route.
    """
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def address_of_device(name: str) -> str:
    """Return the address of a network device: IPv4, if it has one, else IPv6.

    Raises:
        OSError: there is no such device, or it has no address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:_MAX_NAME])
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
        except OSError:
            address = _ipv6_of_device(name)
            if address is None:
                raise
            return address


def mac_of_device(name: str, sock: socket.socket) -> bytes:
    """Return the MAC address of a network device in the network namespace of ``sock``.

    Raises:
        OSError: there is no such device.
    """
    request = struct.pack("256s", name.encode()[:_MAX_NAME])
    return fcntl.ioctl(sock, _SIOCGIFHWADDR, request)[18:24]


def _ipv6_of_device(name: str) -> str | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # the kernel has no IPv6
        return None
    for line in lines:
        digits, _, _, scope, _, device = line.split()
        if device == name and scope in _SCOPES:
            return str(ipaddress.IPv6Address(int(digits, 16)))
    return None


def network_identity() -> str:
    """Return a string that is equal for processes that reach each other's loopback addresses."""
    return f"{boot_id()}/{os.stat('/proc/self/ns/net').st_ino}"


def address_for_anyone(interface: str, server: str | None = None) -> str:
    """Return the address at which processes that are not known yet reach this one: that of
    ``interface`` or ``GLOO_SOCKET_IFNAME``, if one is given; else that on the route to ``server``,
    or of the default route; else loopback.

    Raises:
        UnavailableError: the given device has no address.
    """
    interface = interface or os.environ.get("GLOO_SOCKET_IFNAME", "")
    try:
        if interface:
            return _given(interface)
        return (server and _towards_host(server)) or _towards_any([]) or "127.0.0.1"
    except OSError as error:
        raise UnavailableError(
            f"{interface or server}: {error}; set TORCHRELAY_TRANSPORT_INTERFACE to an address or "
            "device of this host that the others reach"
        ) from error


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_unspecified(address: str) -> bool:
    """Return whether ``address`` stands for all addresses of a host, as 0.0.0.0 does."""
    return ipaddress.ip_address(address.partition("%")[0]).is_unspecified


def listen_at(address: str, port: int = 0) -> socket.socket:
    """Return a TCP socket that listens at ``port`` of ``address``; 0: at a free one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=_BACKLOG)


def address_for_peers(
    gather: Callable[[str, Any], list[Any]], me: str, server: str | None, interface: str
) -> str:
    """Return the address at which the other processes of a job reach this one. Collective.

    Loopback, if all processes are in one network namespace. Else that of ``interface`` or
    ``GLOO_SOCKET_IFNAME``, if one is given; else that on the route to ``server``, or, where that is
    this host, on the route to another one.

    Args:
        gather: returns what each process passes for a step.
        me: this process, for messages.
        server: the host of the store, MASTER_ADDR.
        interface: addresses or devices of this host, separated by commas; empty: none is given.

    Raises:
        UnavailableError: a process has no such address; on every process.
    """
    network = network_identity()
    mine: dict[str, str | None] = {"network": network, "address": None, "error": None}
    given = "TORCHRELAY_TRANSPORT_INTERFACE" if interface else "GLOO_SOCKET_IFNAME"
    interface = interface or os.environ.get(given, "")
    try:
        mine["address"] = _given(interface) if interface else _towards_host(server)
    except OSError as error:
        cause = f"{given}={interface!r}" if interface else f"MASTER_ADDR={server!r}"
        mine["error"] = f"{me}: {cause}: {error}"
    hosts = gather("networks", mine)
    _raise_first([each["error"] for each in hosts])
    if len({each["network"] for each in hosts}) == 1:
        return "127.0.0.1"
    address = mine["address"] or _towards_any(
        [each["address"] for each in hosts if each["network"] != network and each["address"]]
    )
    problem = None
    if address is None:
        problem = f"{me}: this host has no route to another host"
    elif is_loopback(address):
        problem = f"{me}: {given}={interface!r} is a loopback device, but there are other hosts"
    _raise_first(gather("addresses", problem))
    assert address is not None
    return address


def _raise_first(problems: list[str | None]) -> None:
    for problem in problems:
        if problem is not None:
            raise UnavailableError(
                f"{problem}. Set TORCHRELAY_TRANSPORT_INTERFACE to an address or device of each "
                "host that the others reach"
            )


def _given(interface: str) -> str:
    """Return the first address of the list ``interface`` that is not loopback, else the first."""
    addresses = []
    for name in interface.split(","):
        try:
            addresses.append(str(ipaddress.ip_address(name.strip())))
        except ValueError:
            addresses.append(address_of_device(name.strip()))
    return next((one for one in addresses if not is_loopback(one)), addresses[0])


def _towards_host(host: str | None) -> str | None:
    """Return this host's address on a route to ``host``; None if ``host`` is this host.

    Raises:
        OSError: ``host`` cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(
            host or socket.gethostname(), DISCARD_PORT, type=socket.SOCK_DGRAM
        )
    except OSError:
        if host is None:
            return None
        raise
    for family, _, _, _, address in found:
        with contextlib.suppress(OSError):
            mine = address_towards(address, family)
            if not is_loopback(mine):
                return mine
    return None


def _towards_any(peers: list[str]) -> str | None:
    """Return this host's address on the route to one of ``peers``, else to anywhere."""
    return next(filter(None, map(_towards_host, (*peers, *_ANYWHERE))), None)

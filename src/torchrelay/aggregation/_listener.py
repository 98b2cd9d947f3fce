"""The address at which ranks of other hosts reach this process."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

from torchrelay._addresses import address_of_device, address_towards
from torchrelay.errors import UnavailableError

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["listen"]


def listen(interface: str, store: Store) -> socket.socket:
    """Return a listening TCP socket.

    Args:
        interface: an address or a device of this host. If empty, ``GLOO_SOCKET_IFNAME`` is used,
            else the address from which this host reaches the store's server.

    Raises:
        UnavailableError: this host has no such address or device.
    """
    given = interface or os.environ.get("GLOO_SOCKET_IFNAME", "")
    try:
        address = _address_of(given) if given else _address_towards(store)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=1024)
    except OSError as error:
        raise UnavailableError(
            f"sml: cannot listen on {given or 'the interface towards the store'} for ranks of "
            f"other hosts: {error}; set TORCHRELAY_AGGREGATION_INTERFACE to an address or device "
            "of this host that the others reach"
        ) from error


def _address_of(interface: str) -> str:
    """Return ``interface`` if it is an address, else the IPv4 address of that device."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, interface)
            return interface
    return address_of_device(interface)


def _address_towards(store: Store) -> str:
    """Return this host's address on the route to the store's server; without a server, the address
    of its host name.
    """
    base = getattr(store, "_underlying_non_prefix_store", store)
    host, port = getattr(base, "host", ""), getattr(base, "port", 0)
    if not host:
        host, port = socket.gethostname(), 1
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    for family, _, _, _, address in found:
        with contextlib.suppress(OSError):
            return address_towards(address, family)
    raise OSError(f"no route to {host}")

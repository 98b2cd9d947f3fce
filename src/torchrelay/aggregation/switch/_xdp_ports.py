"""The ports of an XDP switch: the program on each of them, and the hosts behind them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Mapping, Sequence

from torchrelay._addresses import DISCARD_PORT, mac_of_device
from torchrelay.aggregation.switch._libbpf import BpfObject
from torchrelay.errors import ConfigError, UnavailableError

__all__ = ["attach", "indices_of", "link_to"]

_MAX_PORTS = 64
_FLAGS = {"generic": 2, "native": 4}  # XDP_FLAGS_SKB_MODE, XDP_FLAGS_DRV_MODE
_SIOCGARP, _ATF_COM = 0x8954, 2


class _PortEntry(ctypes.Structure):  # struct bpf_devmap_val
    _fields_ = (("ifindex", ctypes.c_uint32), ("program", ctypes.c_uint32))


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


def attach(bpf: BpfObject, interfaces: Mapping[int, str], mode: str) -> None:
    """Run the program at the ports, whose names are given by index.

    Args:
        mode: as of :class:`XdpDataPlane`.

    Raises:
        ConfigError: there is no such mode.
        UnavailableError: the program cannot be attached.
    """
    if mode not in _FLAGS:
        raise ConfigError(f"XDP: mode {mode!r}; there are {', '.join(_FLAGS)}")
    ports = bpf.map("ports", ctypes.c_uint32, _PortEntry)
    for place, (ifindex, name) in enumerate(interfaces.items()):
        ports[ctypes.c_uint32(place)] = _PortEntry(ifindex, bpf.program("torchrelay_port"))
        error = bpf.attach(bpf.program("torchrelay_switch"), ifindex, _FLAGS[mode])
        if error:
            why = "another XDP program is there" if error == errno.EBUSY else f"no mode {mode}"
            raise UnavailableError(f"XDP: interface {name}: {os.strerror(error)}; {why}")


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

"""The ports of an XDP switch: the program on each of them, and the hosts behind them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torchrelay._addresses import DISCARD_PORT, mac_of_device
from torchrelay.aggregation.switch._libbpf import XDP_DRIVER, XDP_GENERIC, BpfObject
from torchrelay.aggregation.switch._xdp_maps import PortEntry, u32
from torchrelay.errors import ArgumentError, ConfigError, UnavailableError

__all__ = ["HostLink", "XdpPorts", "indices_of"]

_MAX_PORTS = 64
_FLAGS = {"native": XDP_DRIVER, "generic": XDP_GENERIC}
_MODES = {"native": ("native",), "generic": ("generic",), "auto": ("native", "generic")}
_PROBES, _PROBE_S, _MIN_FRAME_BYTES = 4, 0.1, 60
_SIOCGARP, _ATF_COM = 0x8954, 2
_logger = logging.getLogger("torchrelay.aggregation.switch")


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


class HostLink(NamedTuple):
    """How a host is reached."""

    ifindex: int
    interface: str
    mac: bytes
    port_mac: bytes


class XdpPorts:
    """Network interfaces with the program attached, in one :attr:`mode`.

    Args:
        interfaces: names by index.
        mode: as of :class:`XdpDataPlane`.
        sock: any socket in the network namespace of the interfaces.
        num_probes: returns how many probes have been answered.

    Raises:
        ConfigError: there is no such mode.
        UnavailableError: the program cannot be attached.
    """

    def __init__(
        self,
        bpf: BpfObject,
        interfaces: dict[int, str],
        mode: str,
        sock: socket.socket,
        num_probes: Callable[[], int],
    ) -> None:
        if mode not in _MODES:
            raise ConfigError(f"XDP: mode {mode!r}; there are {', '.join(_MODES)}")
        self._bpf, self._interfaces = bpf, interfaces
        self._socket, self._num_probes = sock, num_probes
        self._may_change_mode = mode == "auto"
        self._proven: set[int] = set()  # ports through which the program's frames arrive
        ports = bpf.map("ports", u32, PortEntry)
        for place, ifindex in enumerate(interfaces):
            ports[u32(place)] = PortEntry(ifindex, bpf.program("torchrelay_port"))
        self.mode = self._attach(*_MODES[mode])

    def link_to(self, address: str) -> HostLink:
        """Return the link to a host behind one of the ports.

        Raises:
            ArgumentError: what the program sends in native mode does not reach the host.
            UnavailableError: it is not known yet where the host is; try again.
        """
        for ifindex, interface in self._interfaces.items():
            mac = self._arp_entry(address, interface)
            if mac is not None:
                link = HostLink(ifindex, interface, mac, mac_of_device(interface, self._socket))
                if self.mode == "native" and ifindex not in self._proven:
                    self._prove(link, address)
                return link
        with contextlib.suppress(OSError):  # makes the kernel resolve the address
            self._socket.sendto(b"", (address, DISCARD_PORT))
        raise UnavailableError(
            f"XDP: {address} has not answered ARP yet at any of this switch's ports "
            f"({', '.join(self._interfaces.values())}); is it on the network of one?"
        )

    def _attach(self, *modes: str) -> str:
        """Attach the program to all ports in the first mode that they support; return that."""
        program = self._bpf.program("torchrelay_switch")
        for mode in modes:
            errors = {
                name: error
                for ifindex, name in self._interfaces.items()
                if (error := self._bpf.attach(program, ifindex, _FLAGS[mode]))
            }
            if not errors:
                return mode
            self._bpf.detach()
            if errno.EBUSY in errors.values():
                break
        name, error = errors.popitem()
        advice = "another XDP program is there" if error == errno.EBUSY else f"no mode {modes[-1]}"
        raise UnavailableError(f"XDP: interface {name}: {os.strerror(error)}; {advice}")

    def _arp_entry(self, address: str, interface: str) -> bytes | None:
        family = struct.pack("=H2x4s8x", socket.AF_INET, socket.inet_aton(address))
        request = struct.pack("=16s16xi16x16s", family, 0, interface.encode())
        try:
            entry = fcntl.ioctl(self._socket, _SIOCGARP, request)
        except OSError:
            return None
        flags: int = struct.unpack_from("=i", entry, 32)[0]
        return entry[18:24] if flags & _ATF_COM else None

    def _prove(self, link: HostLink, address: str) -> None:
        """Leave native mode if frames that the program sends through a port do not arrive.

        A driver may take them and drop them all, as veth does unless the other end has GRO or a
        program too.
        """
        arrives = self._probe(link, address)
        if arrives or (arrives is None and not self._may_change_mode):
            self._proven.add(link.ifindex)
            return
        result = (
            "cannot be probed on this kernel" if arrives is None else f"does not reach {address}"
        )
        trouble = f"XDP: what the program sends in native mode through {link.interface} {result}"
        if not self._may_change_mode:
            raise ArgumentError(f"{trouble}; start the switch with --mode generic")
        _logger.warning("%s; the switch continues in generic mode", trouble)
        self._bpf.detach()
        self.mode = self._attach("generic")

    def _probe(self, link: HostLink, address: str) -> bool | None:
        """Return whether a host answers an ARP request that the program sends; None if the kernel
        cannot send it.

        As in RFC 5227, the sender's IP address is 0, which distinguishes the answer from others.
        """
        arp = struct.pack(">HHBBH", 1, 0x0800, 6, 4, 1) + link.port_mac + bytes(10)
        frame = b"\xff" * 6 + link.port_mac + b"\x08\x06" + arp + socket.inet_aton(address)
        place = list(self._interfaces).index(link.ifindex)
        frame = (frame + struct.pack("=I", place)).ljust(_MIN_FRAME_BYTES, b"\0")
        program, before = self._bpf.program("torchrelay_probe"), self._num_probes()
        for _ in range(_PROBES):
            if not self._bpf.run(program, frame):
                return None
            deadline_s = time.monotonic() + _PROBE_S
            while time.monotonic() < deadline_s:
                if self._num_probes() != before:
                    return True
                time.sleep(_PROBE_S / 20)
        return False

"""Namespaces for tests: hosts, each with one link to a switch, and private folders.

Nothing has a name that could stay behind: a namespace is held open by a child process that ends
with this one, and with the last process in a namespace the kernel takes away its links.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Hosts", "enter", "enter_mounts", "hide", "missing", "racks", "star", "switched"]

_CLONE_NEWNS = 0x00020000
_CLONE_NEWNET = 0x40000000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
_SUBNET = "10.77.0"
_libc = ctypes.CDLL(None, use_errno=True)


def missing(*more_tools: str) -> str:
    """Why namespaces cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    tools = [
        tool for tool in ("ip", "nsenter", "unshare", *more_tools) if shutil.which(tool) is None
    ]
    if tools:
        return f"network namespaces need {' and '.join(tools)} (iproute2, util-linux, nftables)"
    probe = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "probe", "type", "veth"],
        check=False,
        capture_output=True,
    )
    return (
        f"no veth pairs in a new namespace: {probe.stderr.decode().strip()}"
        if probe.returncode
        else ""
    )


@dataclass(frozen=True)
class Hosts:
    """``pids[i]`` holds host ``i``; its address is ``addresses[i]``. ``switch`` holds the other
    ends of the links.
    """

    pids: list[int]
    switch: int
    delayed: bool  # the kernel delays the links
    subnet: str = _SUBNET

    @property
    def addresses(self) -> list[str]:
        return [f"{self.subnet}.{host + 1}" for host in range(len(self.pids))]

    def unplug(self, host: int) -> None:
        """From now on no packet of ``host`` arrives anywhere."""
        _inside(self.switch, ["ip", "link", "set", f"port{host}", "down"])

    def plug(self, host: int) -> None:
        """Undo :meth:`unplug`."""
        _inside(self.switch, ["ip", "link", "set", f"port{host}", "up"])

    def limit(self, mbit: int) -> None:
        """Limit every link to ``mbit`` Mbit/s each way."""
        for host, pid in enumerate(self.pids):
            _limit(pid, "eth0", mbit)
            _limit(self.switch, f"port{host}", mbit)

    def cut(self, one: int, other: int) -> None:
        """Drop all packets between two hosts of :func:`star`; others still reach both."""
        rules = [
            f"ip saddr 10.78.{source}.2 ip daddr 10.78.{to}.2 drop"
            for source, to in ((one, other), (other, one))
        ]
        chain = f"chain cut {{ type filter hook forward priority 0; {'; '.join(rules)}; }}"
        _inside(self.switch, ["nft", "-f", "-"], f"table inet cut {{\n{chain}\n}}\n")

    def mend(self) -> None:
        """Undo :meth:`cut`."""
        _inside(self.switch, ["nft", "delete", "table", "inet", "cut"])

    def segment(self) -> None:
        """Let links pass packets one by one, as a cable does, not several as one (GSO)."""
        for host, pid in enumerate(self.pids):
            _inside(pid, ["ip", "link", "set", "eth0", "gso_max_segs", "1"])
            _inside(self.switch, ["ip", "link", "set", f"port{host}", "gso_max_segs", "1"])

    def address_switch(self) -> str:
        """Give the switch of :func:`switched` an address that all hosts reach; return it."""
        _inside(self.switch, ["ip", "addr", "add", f"{self.subnet}.254/24", "dev", "switch"])
        return f"{self.subnet}.254"

    def lose(self, one_of: int, port: int) -> None:
        """Drop one of so many UDP packets to ``port`` of the switch, and as many from it, with
        nftables.

        What the kernel passes on in one piece (GSO) is one packet here.
        """
        rule = f"numgen inc mod {one_of} == 0 drop"
        lines = [
            "table inet lossy {",
            f"chain to {{ type filter hook input priority 0; udp dport {port} {rule}; }}",
            f"chain from {{ type filter hook output priority 0; udp sport {port} {rule}; }}",
            "}",
        ]
        _inside(self.switch, ["nft", "-f", "-"], "\n".join(lines))

    def route(self) -> None:
        """Let the hosts of :func:`star` reach each other through the switch."""
        _inside(self.switch, ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
        for host, pid in enumerate(self.pids):
            _inside(pid, ["ip", "route", "add", "default", "via", f"10.78.{host}.1"])


def hide(folders: Iterable[str]) -> bool:
    """Put an empty folder over each of ``folders``, for this process, its future threads and
    children.

    Returns False, with nothing changed, where the privilege is missing.
    """
    if _libc.unshare(_CLONE_NEWNS) != 0:
        return False
    _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount --make-rprivate /")
    for folder in folders:
        Path(folder).mkdir(exist_ok=True)
        _check(
            _libc.mount(b"tests", folder.encode(), b"tmpfs", 0, b"mode=1777"), f"mount on {folder}"
        )
    return True


def enter(pid: int) -> None:
    """Moves this process, all its future threads and children into the network namespace of
    ``pid``.
    """
    with open(f"/proc/{pid}/ns/net") as namespace:
        _check(_libc.setns(namespace.fileno(), _CLONE_NEWNET), f"setns of process {pid}")


def enter_mounts(namespace: int) -> None:
    """Move this process into the mount namespace that the file descriptor ``namespace`` stands
    for.
    """
    _check(_libc.setns(namespace, _CLONE_NEWNS), "setns of a mount namespace")


def _check(result: int, call: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")


def _inside(pid: int, command: list[str], text: str = "") -> None:
    subprocess.run(
        ["nsenter", f"--net=/proc/{pid}/ns/net", *command],
        check=True,
        input=text.encode(),
        capture_output=True,
    )


def _limit(pid: int, device: str, mbit: int) -> None:
    rate = f"root tbf rate {mbit}mbit burst 256kb latency 50ms".split()
    _inside(pid, ["tc", "qdisc", "add", "dev", device, *rate])


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """A process in a new network namespace; it ends when its input does, so at the latest with this
    process.
    """
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        holder.stdout.readline()  # it is inside
        try:
            yield holder.pid
        finally:
            holder.stdin.close()


@contextlib.contextmanager
def switched(hosts: int, delay_ms: float = 0, subnet: str = _SUBNET) -> Iterator[Hosts]:
    """``hosts`` hosts on one switch, links delayed by ``delay_ms`` where the kernel can (netem)."""
    with contextlib.ExitStack() as stack:
        pids = [stack.enter_context(_namespace()) for _ in range(hosts)]
        switch = stack.enter_context(_namespace())
        lines = ["link add switch type bridge", "link set switch up"]
        for host, pid in enumerate(pids):
            lines += [
                f"link add port{host} type veth peer name eth0 netns {pid}",
                f"link set port{host} master switch up",
            ]
        _inside(switch, ["ip", "-batch", "-"], "\n".join(lines))
        for host, pid in enumerate(pids):
            lines = [
                "link set lo up",
                f"addr add {subnet}.{host + 1}/24 dev eth0",
                "link set eth0 up",
            ]
            _inside(pid, ["ip", "-batch", "-"], "\n".join(lines))
        delayed = delay_ms > 0
        for host in range(hosts if delayed else 0):
            command = [
                "tc",
                "qdisc",
                "add",
                "dev",
                f"port{host}",
                "root",
                "netem",
                "delay",
                f"{delay_ms}ms",
            ]
            try:
                _inside(switch, command)
            except subprocess.CalledProcessError:  # the kernel was built without netem
                delayed = False
        yield Hosts(pids, switch, delayed, subnet)


@contextlib.contextmanager
def star(hosts: int) -> Iterator[Hosts]:
    """``hosts`` hosts, each on a network of its own with one port of ``switch``, which has an
    address on each.

    Host ``i`` is 10.78.``i``.2 on ``eth0``, and its port ``port<i>`` is 10.78.``i``.1.
    """
    with contextlib.ExitStack() as stack:
        pids = [stack.enter_context(_namespace()) for _ in range(hosts)]
        switch = stack.enter_context(_namespace())
        lines = ["link set lo up"]
        for host, pid in enumerate(pids):
            lines += [
                f"link add port{host} type veth peer name eth0 netns {pid}",
                f"addr add 10.78.{host}.1/24 dev port{host}",
                f"link set port{host} up",
            ]
        _inside(switch, ["ip", "-batch", "-"], "\n".join(lines))
        for host, pid in enumerate(pids):
            lines = ["link set lo up", f"addr add 10.78.{host}.2/24 dev eth0", "link set eth0 up"]
            _inside(pid, ["ip", "-batch", "-"], "\n".join(lines))
        yield Hosts(pids, switch, False)


@contextlib.contextmanager
def racks(num_racks: int, hosts: int, mbit: int = 0) -> Iterator[tuple[list[Hosts], int]]:
    """Racks of ``hosts`` hosts, and the process that holds the namespace of the switch above them;
    all links have ``mbit`` Mbit/s each way.

    The switch of rack ``i`` is 10.80.``i``.254 to its hosts and 10.79.``i``.2 to the one above,
    which it reaches as 10.79.``i``.1. All hosts reach each other.
    """
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(_namespace())
        all_racks = []
        for rack in range(num_racks):
            one = stack.enter_context(switched(hosts, subnet=f"10.80.{rack}"))
            via = ["default", "via", one.address_switch()]
            for pid in one.pids:
                _inside(pid, ["ip", "route", "add", *via])
            lines = [
                f"link add rack{rack} type veth peer name above netns {one.switch}",
                f"addr add 10.79.{rack}.1/24 dev rack{rack}",
                f"link set rack{rack} up",
            ]
            _inside(root, ["ip", "-batch", "-"], "\n".join(lines))
            lines = [
                f"addr add 10.79.{rack}.2/24 dev above",
                "link set above up",
                f"route add default via 10.79.{rack}.1",
            ]
            _inside(one.switch, ["ip", "-batch", "-"], "\n".join(lines))
            _inside(root, ["ip", "route", "add", f"10.80.{rack}.0/24", "via", f"10.79.{rack}.2"])
            if mbit:
                one.limit(mbit)
                _limit(one.switch, "above", mbit)
                _limit(root, f"rack{rack}", mbit)
            all_racks.append(one)
        for pid in (root, *(rack.switch for rack in all_racks)):
            _inside(pid, ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
        yield all_racks, root

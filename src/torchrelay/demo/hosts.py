"""Several hosts on one machine: network namespaces, each with one link to an aggregation switch.

The namespaces have no names. Each is held by a process, and the kernel removes it, with its links,
when the last process in it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchrelay._python import code_command
from torchrelay.errors import UnavailableError

__all__ = ["run_on_hosts"]

_SUBNET = "10.77.0"
_SWITCH = f"{_SUBNET}.254"
_PORT = 29500
_GRACE_S = 30.0
_TOOLS = ("ip", "nsenter", "unshare")
_SERVE = "from torchrelay.cli import main; main()"


def run_on_hosts(
    hosts: int, torchrun: Sequence[str], program: Sequence[str], environ: Mapping[str, str]
) -> int:
    """Run ``torchrun ... program`` on each of ``hosts`` simulated hosts, whose gradients an
    aggregation switch sums; print the switch's statistics, and return an exit code.

    Raises:
        UnavailableError: there are no network namespaces here.
    """
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0 or absent:
        needed = f"the commands {', '.join(absent)} (iproute2, util-linux)" if absent else "root"
        raise UnavailableError(f"simulated hosts are network namespaces, which need {needed}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: sys.exit(128 + received))  # ends what was started
    with contextlib.ExitStack() as stack:
        ports, pids = _network(stack, hosts)
        serve = [*code_command(_SERVE), "switch", "--address", _SWITCH, "--json"]
        switch = stack.enter_context(_running(ports, serve, environ, subprocess.PIPE))
        assert switch.stdout is not None
        if not switch.stdout.readline():
            raise UnavailableError("the switch did not start; see its message above")
        jobs = []
        for host, pid in enumerate(pids):
            where = [f"--nnodes={hosts}", f"--node-rank={host}"]
            where += [f"--master-addr={_SUBNET}.1", f"--master-port={_PORT}"]
            mine = {
                "TORCHRELAY_AGGREGATION_SWITCH": _SWITCH,
                "TORCHRELAY_HOST_ID": f"host{host}",  # on real machines it is found
                "GLOO_SOCKET_IFNAME": "eth0",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns of addresses without a name
                **environ,
            }
            job = _running(pid, [*torchrun, *where, *program], mine)
            jobs.append(stack.enter_context(job))
        codes = [job.wait() for job in jobs]
        switch.send_signal(signal.SIGINT)
        totals = json.loads(switch.stdout.read().splitlines()[-1])
        print(
            f"switch: {totals['received']:,} packets in, {totals['completed']:,} sums, "
            f"{totals['sent']:,} packets out"
        )
        return next((abs(code) for code in codes if code), 0)


def _network(stack: contextlib.ExitStack, hosts: int) -> tuple[int, list[int]]:
    """Return the processes that hold the switch's namespace and those of the hosts."""
    ports = stack.enter_context(_namespace())
    _ip(ports, "link set lo up", "link add ports type bridge")
    _ip(ports, f"addr add {_SWITCH}/24 dev ports", "link set ports up")
    pids = []
    for host in range(hosts):
        pid = stack.enter_context(_namespace())
        _ip(ports, f"link add port{host} type veth peer name eth0 netns {pid}")
        _ip(ports, f"link set port{host} master ports up")
        _ip(pid, "link set lo up", f"addr add {_SUBNET}.{host + 1}/24 dev eth0")
        _ip(pid, "link set eth0 up")
        pids.append(pid)
    return ports, pids


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """Start a process in a new network namespace; it ends with the context, or with this
    process.
    """
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches this process only
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        if not holder.stdout.readline():
            raise UnavailableError("no network namespace can be made here: see the message above")
        try:
            yield holder.pid
        finally:
            holder.stdin.close()


def _ip(pid: int, *lines: str) -> None:
    command = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-batch", "-"]
    subprocess.run(command, input="\n".join(lines), text=True, check=True)


@contextlib.contextmanager
def _running(
    pid: int, command: Sequence[str], environ: Mapping[str, str], stdout: Any = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a namespace; it ends with the context."""
    with subprocess.Popen(
        ["nsenter", f"--net=/proc/{pid}/ns/net", *command],
        env=environ,
        stdout=stdout,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()

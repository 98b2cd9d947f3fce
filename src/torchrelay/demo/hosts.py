"""Several hosts on one machine: network namespaces, each with one link to an aggregation switch.

This process moves into the namespace of the switch; that of each host starts with its torchrun.
None has a name: the kernel removes a namespace, with its links, when the last process in it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from torchrelay.aggregation.switch import SwitchServer, UdpDataPlane
from torchrelay.errors import UnavailableError

__all__ = ["run_on_hosts"]

_SUBNET = "10.77.0"
_SWITCH = f"{_SUBNET}.254"
_PORT = 29500
_TOOLS = ("ip", "nsenter", "unshare")
_CLONE_NEWNET = 0x40000000

_BRIDGE = f"""
ip link set lo up
ip link add ports type bridge
ip addr add {_SWITCH}/24 dev ports
ip link set ports up
"""

# Arguments: the process of the switch, this host's address, and what to run.
_PLUG_IN = """
switch=$1 address=$2; shift 2
ip link set lo up
ip link add eth0 type veth peer name "port$$" netns "$switch"
nsenter --target "$switch" --net ip link set "port$$" master ports up
ip addr add "$address/24" dev eth0
ip link set eth0 up
exec "$@"
"""


def run_on_hosts(
    hosts: int, torchrun: Sequence[str], program: Sequence[str], environ: Mapping[str, str]
) -> int:
    """Run ``torchrun ... program`` on each of ``hosts`` simulated hosts, whose gradients an
    aggregation switch sums; print the switch's statistics, and return an exit code.

    The calling thread, and what it starts from now on, has no other network.

    Raises:
        UnavailableError: there are no network namespaces here, or no bridges in them.
    """
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0 or absent:
        needed = f"the commands {', '.join(absent)} (iproute2, util-linux)" if absent else "root"
        raise UnavailableError(f"simulated hosts are network namespaces, which need {needed}")
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise UnavailableError(f"no network namespace can be made here: {reason}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: sys.exit(128 + received))  # ends what was started
    made = subprocess.run(["sh", "-ec", _BRIDGE], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise UnavailableError(
            "no bridge can be made in a network namespace here; does the kernel have bridges "
            f"(modprobe bridge)? {made.stderr.strip()}"
        )
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(SwitchServer(UdpDataPlane(_SWITCH)))
        jobs = []
        for host in range(hosts):
            address = f"{_SUBNET}.{host + 1}"
            where = [f"--nnodes={hosts}", f"--node-rank={host}"]
            where += [f"--master-addr={_SUBNET}.1", f"--master-port={_PORT}"]
            mine = {
                "TORCHRELAY_AGGREGATION_SWITCH": _SWITCH,
                "TORCHRELAY_HOST_ID": f"host{host}",  # on real machines it is found
                "GLOO_SOCKET_IFNAME": "eth0",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns of addresses without a name
                **environ,
            }
            plug_in = ["sh", "-ec", _PLUG_IN, "sh", str(os.getpid()), address]
            job = subprocess.Popen(
                ["unshare", "--net", *plug_in, *torchrun, *where, *program],
                env=mine,
                start_new_session=True,  # Ctrl-C reaches this process only
            )
            stack.enter_context(job)  # waits for it: torchrun kills what does not end
            stack.callback(job.terminate)
            jobs.append(job)
        codes = [job.wait() for job in jobs]
        counts = switch.stats().counts
        print(
            f"switch: {counts['received']:,} packets in, {counts['completed']:,} sums, "
            f"{counts['sent']:,} packets out",
            flush=True,
        )
    return next((abs(code) for code in codes if code), 0)

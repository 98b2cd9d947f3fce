"""Data-parallel training over several hosts whose gradients an aggregation switch sums, on one
machine.

    sudo python examples/aggregation_switch.py --hosts 3 --ranks-per-host 2

Each host is a network namespace with one link to a namespace in which ``torchrelay switch`` runs.
The same model is trained over ``sml`` and over Gloo. Needs root and the commands ip, nsenter and
unshare; leaves nothing behind.
On real machines: ``torchrelay switch`` on one, and this file's ``train`` under torchrun on the
others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchrelay import aggregation
from torchrelay.world import World

SUBNET = "10.77.0"
SWITCH = f"{SUBNET}.254"
STEPS = 100


def train() -> None:
    """What each rank does; the environment says where the switch is."""
    world = World.from_environment()
    dist.init_process_group("sml", store=world.connect(), rank=world.rank, world_size=world.size)
    through_switch = losses(None, world.rank)
    over_gloo = losses(dist.new_group(backend="gloo"), world.rank)
    if world.rank == 0:
        print("step   loss over sml   loss over gloo")
        for step in (0, STEPS // 2, STEPS - 1):
            print(f"{step:4}   {through_switch[step]:13.6f}   {over_gloo[step]:14.6f}")
        for link in aggregation.stats()["hosts"].links:
            megabytes = link.sent_bytes / 1e6
            print(
                f"rank 0, {link.transport}: {megabytes:.1f} MB, {link.busy_s:.2f} s ({link.reason})"
            )
    torch.testing.assert_close(through_switch, over_gloo, rtol=1e-3, atol=1e-5)
    dist.destroy_process_group()


def losses(group: dist.ProcessGroup | None, rank: int) -> list[float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(32, 512), torch.nn.Tanh(), torch.nn.Linear(512, 32)),
        process_group=group,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs = torch.randn(256, 32, generator=torch.Generator().manual_seed(rank))
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sin())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(loss.item())
    return found


def launch(hosts: int, ranks_per_host: int) -> int:
    """Make the network, run the switch and the ranks, and return the first exit code that is not
    0.
    """
    with contextlib.ExitStack() as stack:
        ports, host_pids = network(stack, hosts)
        command = str(Path(sys.executable).with_name("torchrelay"))
        switch = stack.enter_context(
            running(ports, [command, "switch", "--address", SWITCH, "--json"], {}, subprocess.PIPE)
        )
        assert switch.stdout is not None
        print("switch:", json.loads(switch.stdout.readline())["switch"])
        jobs = []
        for host, pid in enumerate(host_pids):
            torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts}"]
            torchrun += [f"--node-rank={host}", f"--nproc-per-node={ranks_per_host}"]
            torchrun += [f"--master-addr={SUBNET}.1", "--master-port=29500", __file__]
            environment = {
                "TORCHRELAY_AGGREGATION_SWITCH": SWITCH,
                "TORCHRELAY_HOST_ID": f"host{host}",  # on real machines it is found
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns of addresses without a name
            }
            jobs.append(stack.enter_context(running(pid, torchrun, environment)))
        failed = max((job.wait() for job in jobs), key=abs)
        switch.send_signal(signal.SIGINT)
        totals = json.loads(switch.stdout.read().splitlines()[-1])
        print(
            f"switch: {totals['received']} packets in, {totals['completed']} sums, "
            f"{totals['sent']} packets out"
        )
        return failed


def network(stack: contextlib.ExitStack, hosts: int) -> tuple[int, list[int]]:
    """Processes that hold the switch's namespace, and one for each host. They end with
    ``stack``.
    """
    ports = stack.enter_context(namespace())
    inside(
        ports,
        "link set lo up",
        "link add ports type bridge",
        f"addr add {SWITCH}/24 dev ports",
        "link set ports up",
    )
    pids = []
    for host in range(hosts):
        pid = stack.enter_context(namespace())
        inside(ports, f"link add port{host} type veth peer name eth0 netns {pid}")
        inside(ports, f"link set port{host} master ports up")
        inside(
            pid, "link set lo up", f"addr add {SUBNET}.{host + 1}/24 dev eth0", "link set eth0 up"
        )
        pids.append(pid)
    return ports, pids


@contextlib.contextmanager
def namespace() -> Iterator[int]:
    """A process in a new network namespace without a name, which the kernel removes with its last
    process.
    """
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is ours alone
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdout.readline()  # it is inside
        try:
            yield holder.pid
        finally:
            holder.stdin.close()


def inside(pid: int, *lines: str) -> None:
    command = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-batch", "-"]
    subprocess.run(command, input="\n".join(lines), text=True, check=True)


@contextlib.contextmanager
def running(
    pid: int, command: list[str], environment: dict[str, str], stdout: Any = None
) -> Iterator[subprocess.Popen[str]]:
    """A command in a namespace; it is ended with the context."""
    with subprocess.Popen(
        ["nsenter", f"--net=/proc/{pid}/ns/net", *command],
        env={**os.environ, **environment},
        stdout=stdout,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()  # torchrun ends its ranks
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    arguments = parser.parse_args()
    missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        sys.exit(
            "network namespaces need root, and iproute2 and util-linux; missing: "
            f"{missing or 'root'}"
        )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: sys.exit(128 + received))  # undoes everything
    sys.exit(launch(arguments.hosts, arguments.ranks_per_host))


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        main()

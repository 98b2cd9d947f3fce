"""Strangers on the port of a rank: connections that say nothing, or little."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

import torchrelay.aggregation  # noqa: F401 - registers the backend

if TYPE_CHECKING:
    from torchrelay.world import World

MOST_FILES = 512  # of a rank
CONNECTIONS = 1100

STRANGER = f"""
import contextlib, resource, socket, sys, time

resource.setrlimit(resource.RLIMIT_NOFILE, [resource.getrlimit(resource.RLIMIT_NOFILE)[1]] * 2)
port, slow = int(sys.argv[1]), sys.argv[2] == "slow"
held = [socket.create_connection(("127.0.0.1", port), 20) for _ in range({CONNECTIONS})]
print("connected", flush=True)
while True:
    for connection in held if slow else ():
        with contextlib.suppress(OSError):
            connection.send(b"T")
    time.sleep(0.2)
"""


def listening_ports() -> list[int]:
    """The TCP ports of this process, but for that of the store."""
    mine = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            mine.add(os.readlink(path))
        except FileNotFoundError:
            continue
    ports = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        address, state, inode = fields[1], fields[3], fields[9]
        if state == "0A" and f"socket:[{inode}]" in mine:
            ports.append(int(address.split(":")[1], 16))
    return [port for port in ports if port != int(os.environ["MASTER_PORT"])]


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < CONNECTIONS + 50,
    reason="a process may not open so many files here",
)
@pytest.mark.parametrize("kind", ["idle", "slow"])
@pytest.mark.processes(4)
def test_strangers_do_not_keep_ranks_from_each_other(world: World, kind: str) -> None:
    os.environ["TORCHRELAY_HOST_ID"] = "aabb"[world.rank]
    store = world.connect(60)
    dist.init_process_group("sml", store=store, rank=world.rank, world_size=4)
    if world.rank == 3:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, most))
        (port,) = listening_ports()
        with subprocess.Popen(
            [sys.executable, "-c", STRANGER, str(port), kind], stdout=subprocess.PIPE, text=True
        ) as stranger:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "connected\n"
            store.set("strangers", "")
            received = torch.zeros(1000)
            dist.recv(received, 0)  # which has not been connected with this rank
            assert received.eq(1).all()
            threads = int(Path("/proc/self/status").read_text().split("Threads:")[1].split()[0])
            assert threads < 100
            dist.barrier()
            stranger.kill()
    else:
        store.wait(["strangers"])
        if world.rank == 0:
            dist.send(torch.ones(1000), 3)
        dist.barrier()

"""Hosts find the addresses at which they reach each other: two of them, in network namespaces."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

import torchrelay.aggregation  # noqa: F401 - registers the backend
from namespaces import Hosts, enter, missing, switched
from torchrelay._addresses import address_for_peers
from torchrelay.errors import UnavailableError
from torchrelay.parameters import Embedding, Table, optim
from torchrelay.world import World

if TYPE_CHECKING:
    from ranks import RunProcesses

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

_CLONE_NEWUTS = 0x04000000


def _move(world: World, hosts: Hosts, masters: list[str]) -> None:
    """Put this rank on its host, whose name nobody can resolve, and make the default group."""
    enter(hosts.pids[world.rank])
    assert ctypes.CDLL(None).unshare(_CLONE_NEWUTS) == 0
    socket.sethostname("nobody-knows-me")
    os.environ["TORCHRELAY_HOST_ID"] = str(world.rank)
    os.environ["MASTER_ADDR"] = masters[world.rank]
    world = dataclasses.replace(world, master_addr=masters[world.rank])
    dist.init_process_group("sml", store=world.connect(), rank=world.rank, world_size=world.size)


def _train(world: World, hosts: Hosts, masters: list[str]) -> list[float]:
    _move(world, hosts, masters)
    ones = torch.ones(1000)
    dist.all_reduce(ones)
    assert ones.eq(2).all()
    table = Table.create(8, 2, optimizer=optim.sgd(1.0), reduction="sum")
    optimizer = table.optimizer()
    embedding = Embedding(8, 2, table=table)
    with torch.no_grad():
        before = embedding(torch.arange(8))
    embedding(torch.tensor([world.rank, 2])).sum().backward()
    optimizer.step()
    with torch.no_grad():
        change = embedding(torch.arange(8)) - before
    listening = re.findall(r"://(\S+?):\d+", " ".join(table._server.addresses))
    assert listening, table._server.addresses
    assert not any(address.startswith(("127.", "[::1]")) for address in listening), listening
    table.close()
    return change[:, 0].tolist()


@pytest.mark.parametrize(
    "case", ["localhost", "127.0.1.1", "device_list", "ipv6", "ipv6_device_list"]
)
def test_hosts_reach_each_other(case: str, run_processes: RunProcesses) -> None:
    if "ipv6" in case and not Path("/proc/net/if_inet6").exists():
        pytest.skip("the kernel has no IPv6")
    environ = {} if "list" not in case else {"GLOO_SOCKET_IFNAME": "lo,eth0"}
    with switched(2) as hosts:
        masters = [hosts.addresses[0]] * 2
        if "ipv6" in case:
            masters = ["fd77::1"] * 2
            for host, pid in enumerate(hosts.pids):
                _inside(pid, "addr", "flush", "dev", "eth0")
                _inside(pid, "addr", "add", f"fd77::{host + 1}/64", "dev", "eth0", "nodad")
        elif case != "device_list":
            masters[0] = case
        results = run_processes(_train, 2, environ=environ, hosts=hosts, masters=masters)
    for result in results:
        assert result.ok, result.error
        assert result.value == [-1.0, -1.0, -2.0, 0, 0, 0, 0, 0]


def _inside(pid: int, *arguments: str) -> None:
    subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", "ip", *arguments], check=True)


def _refuse(world: World, hosts: Hosts, interface: str) -> str:
    if world.rank == 1:
        os.environ["TORCHRELAY_TRANSPORT_INTERFACE"] = interface
    with pytest.raises(UnavailableError) as caught:
        _move(world, hosts, [hosts.addresses[0]] * 2)
    return str(caught.value)


@pytest.mark.parametrize("interface", ["lo", "eth9"])
def test_a_wrong_interface_is_named_by_every_rank(
    interface: str, run_processes: RunProcesses
) -> None:
    with switched(2) as hosts:
        results = run_processes(_refuse, 2, hosts=hosts, interface=interface)
    for result in results:
        assert result.ok, result.error
        assert f"rank 1: TORCHRELAY_TRANSPORT_INTERFACE='{interface}'" in result.value


def test_one_host_needs_no_address() -> None:
    address = address_for_peers(lambda step, mine: [mine, mine], "rank 0", "no.such.host.", "lo")
    assert address == "127.0.0.1"

"""Nodes as hosts of their own: network namespaces on a switch, with TCP between them and links that
can be cut.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from namespaces import Hosts, enter, missing, switched
from nodes import Server, Worker
from torchrelay import _native
from torchrelay.errors import PeerLostError
from torchrelay.parameters._topology import topology_of
from torchrelay.world import Ranks, World

if TYPE_CHECKING:
    from ranks import RunProcesses

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

KEYS, STEPS, BATCH, DELAY_MS = 300, 120, 32, 2.0
QUICK_TO_NOTICE = {
    "TORCHRELAY_TRANSPORT_HEARTBEAT_S": "0.1",
    "TORCHRELAY_TRANSPORT_PEER_TIMEOUT_S": "5",
}


@pytest.fixture(params=[2, 3, 4])
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    with switched(request.param, DELAY_MS) as made:
        yield made


def _join(world: World, hosts: Hosts) -> tuple[Server, Worker]:
    """This rank, on its own host, as a node. Where the kernel cannot delay links, the transport
    does.
    """
    enter(hosts.pids[world.rank])
    server_host = hosts.addresses[0]
    store = dataclasses.replace(world, master_addr=server_host).connect(60)
    ranks = Ranks(store, world.rank, world.size)
    topology = topology_of(ranks, server_host, node_of_rank=lambda rank: rank)
    network = topology.network
    assert network is not None
    if not hosts.delayed:
        topology.network = lambda: _native.DelayedNetwork(
            network(), DELAY_MS / 1e3, seed=world.rank
        )
    server = Server(KEYS, length=2, topology=topology)
    assert all(
        f"://{hosts.addresses[node]}:" in server.addresses[node] for node in range(world.size)
    )
    return server, Worker(0, server)


def _train(world: World, hosts: Hosts) -> dict[str, float]:
    server, worker = _join(world, hosts)
    generator = torch.Generator().manual_seed(world.rank)
    batches = [torch.randint(0, KEYS, (BATCH,), generator=generator) for _ in range(STEPS)]
    for clock, batch in enumerate(batches):
        if clock + 5 < STEPS:
            worker.intent(batches[clock + 5], clock + 5)
        values = torch.empty(BATCH, 2)
        worker.pull(batch, values)
        worker.push(batch, torch.ones(BATCH, 2), clock % 2 == 0)
        worker.advance_clock()
    worker.wait_all()
    worker.wait_sync()
    worker.barrier()
    out = torch.empty(KEYS, 2)
    worker.pull(torch.arange(KEYS), out)
    expected = torch.zeros(KEYS)
    for rank in range(world.size):
        generator = torch.Generator().manual_seed(rank)
        for _ in range(STEPS):
            expected += torch.bincount(
                torch.randint(0, KEYS, (BATCH,), generator=generator), minlength=KEYS
            )
    assert torch.equal(out, expected[:, None].expand(KEYS, 2))
    worker.close()
    statistics = server.statistics()
    server.close()
    return statistics


def test_updates_of_nodes_on_several_hosts_are_all_counted_once(
    hosts: Hosts, run_processes: RunProcesses
) -> None:
    for result in run_processes(_train, len(hosts.pids), hosts=hosts):
        assert result.ok, result.error
        assert result.value["protocol_errors"] == 0
        assert result.value["relocations"] + result.value["replicas_made"] > 0


def _lose_last(world: World, hosts: Hosts, unplug: bool) -> tuple[tuple[int, ...], str]:
    _, worker = _join(world, hosts)
    keys, out = np.arange(KEYS), np.empty((KEYS, 2), dtype=np.float32)
    worker.push(keys, np.ones((KEYS, 2), dtype=np.float32))
    worker.barrier()
    last = world.size - 1
    if world.rank == last and not unplug:
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == last:
        hosts.unplug(last)
    try:
        while True:
            worker.pull(keys, out)
    except PeerLostError as error:
        return error.ranks, str(error)


@pytest.mark.parametrize("unplug", [False, True], ids=["killed", "unplugged"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_node_out_of_reach_is_named_by_all_others(
    size: int, unplug: bool, run_processes: RunProcesses
) -> None:
    with switched(size) as hosts:
        results = run_processes(
            _lose_last, size, environ=QUICK_TO_NOTICE, hosts=hosts, unplug=unplug
        )
    for result in results[:-1]:
        assert result.ok, result.error
        ranks, message = result.value
        assert ranks == (size - 1,)
        assert f"node {size - 1} is lost" in message

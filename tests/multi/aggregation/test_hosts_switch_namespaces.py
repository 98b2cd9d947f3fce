"""Hosts as network namespaces around a switch: losses by nftables, rates by tbf, a switch in the
kernel.
"""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.distributed as dist

import namespaces
import torchrelay.aggregation  # noqa: F401 - registers the backend
from switch_ports import missing_for_xdp, within
from torchrelay.aggregation import Options
from torchrelay.aggregation.switch import SwitchServer, UdpDataPlane, Uplink, XdpDataPlane
from torchrelay.world import World
from waiting import eventually

if TYPE_CHECKING:
    from ranks import RunProcesses

pytestmark = pytest.mark.skipif(
    bool(namespaces.missing("nft", "tc")), reason=namespaces.missing("nft", "tc") or "possible"
)


def _join(world: World, hosts: namespaces.Hosts, host: int, path: str, options: Options) -> None:
    """Move to ``host`` and make the group."""
    namespaces.enter(hosts.pids[host])
    os.environ.update(TORCHRELAY_HOST_ID=f"host{host}", TORCHRELAY_TRANSPORT_INTERFACE="eth0")
    dist.init_process_group(
        "sml",
        store=dist.FileStore(path, world.size),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=60),
        pg_options=options,
    )


def _sum(
    world: World,
    hosts: namespaces.Hosts,
    ranks_per_host: int,
    switches: list[str],
    path: str,
    count: int,
) -> int:
    """Check sums of int32 and float32; return how many bytes this rank sent through the switch."""
    host = world.rank // ranks_per_host
    # The kernel may send a whole window in one piece: a large one has few pieces to lose.
    options = Options(switch=switches[host], num_worker_threads=1, max_outstanding_packets=8)
    _join(world, hosts, host, path, options)
    integers = torch.arange(count, dtype=torch.int32) * (world.rank + 1)
    dist.all_reduce(integers)
    factor = world.size * (world.size + 1) // 2
    assert torch.equal(integers, torch.arange(count, dtype=torch.int32) * factor)
    floats = torch.full((count,), 1.0 + world.rank)
    dist.all_reduce(floats, dist.ReduceOp.AVG)
    largest_exponent = (ranks_per_host * world.size).bit_length()
    error = len(switches) ** 2 * 2.0**largest_exponent / 2**32 / world.size
    assert ((floats - factor / world.size).abs() <= error + floats * 2.0**-23).all()
    dist.barrier()
    links = {link.transport: link for link in cast(Any, dist.group.WORLD).stats().links}
    dist.destroy_process_group()
    return links["switch"].sent_bytes


@pytest.mark.parametrize(("hosts", "ranks"), [(2, 3), (4, 2), (8, 1)])
def test_sums_over_slow_links_with_losses(
    hosts: int, ranks: int, tmp_path: Path, run_processes: RunProcesses
) -> None:
    count = 60_000
    with namespaces.switched(hosts) as network:
        address = network.address_switch()
        network.limit(200)
        plane = within(network.switch, lambda: UdpDataPlane(address, 0))
        with SwitchServer(plane) as server:
            network.lose(12, plane.port)
            results = run_processes(
                _sum,
                hosts * ranks,
                hosts=network,
                ranks_per_host=ranks,
                switches=[server.address] * hosts,
                path=str(tmp_path / "store"),
                count=count,
            )
            counts = server.stats().counts
    for rank, result in enumerate(results):
        assert result.ok, result.error
        assert result.value == (8 * count if rank % ranks == 0 else 0)
    assert counts["duplicates"] + counts["answered_again"] > 0  # something was lost


def _sum_until(world: World, hosts: namespaces.Hosts, switch: str, path: str, end: str) -> int:
    """Check sums until a file exists; return how many there were."""
    _join(world, hosts, world.rank, path, Options(switch=switch))
    sums, going = 0, torch.ones(1, dtype=torch.int64)
    while going.item():
        tensor = torch.full((100_000,), float(sums % 7))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full_like(tensor, float(sums % 7) * world.size))
        sums += 1
        Path(f"{end}-{world.rank}").touch()
        going.fill_(not Path(end).exists())
        dist.broadcast(going, 0)
    dist.destroy_process_group()
    return sums


def test_a_link_that_comes_back_costs_nothing_but_time(
    tmp_path: Path, run_processes: RunProcesses
) -> None:
    end = tmp_path / "end"

    def cut(network: namespaces.Hosts) -> None:
        eventually((tmp_path / "end-1").exists)
        for seconds in (0.1, 0.7):
            network.unplug(1)
            time.sleep(seconds)
            network.plug(1)
            time.sleep(0.3)
        end.touch()

    with namespaces.switched(2) as network:
        address = network.address_switch()
        plane = within(network.switch, lambda: UdpDataPlane(address, 0))
        with SwitchServer(plane) as server, ThreadPoolExecutor(1) as pool:
            cutting = pool.submit(cut, network)
            results = run_processes(
                _sum_until,
                2,
                hosts=network,
                switch=server.address,
                path=str(tmp_path / "store"),
                end=str(end),
            )
            cutting.result()
    for result in results:
        assert result.ok, result.error
        assert result.value == results[0].value


def test_a_tree_of_two_racks_with_losses_on_both_hops(
    tmp_path: Path, run_processes: RunProcesses
) -> None:
    count = 30_000
    with namespaces.racks(2, 4) as (racks, root), contextlib.ExitStack() as stack:
        plane = within(root, lambda: UdpDataPlane("0.0.0.0", 0))
        above = stack.enter_context(SwitchServer(plane))
        namespaces.Hosts([], root, False).lose(20, plane.port)
        leaves = []
        for index, rack in enumerate(racks):

            def serve(index: int = index) -> SwitchServer:
                uplink = Uplink(f"10.79.{index}.1:{plane.port}", index, 2)
                return SwitchServer(UdpDataPlane("0.0.0.0", 0), uplink=uplink)

            leaves.append(stack.enter_context(within(rack.switch, serve)))
            rack.lose(20, leaves[-1].plane.port)
        hosts = namespaces.Hosts([pid for rack in racks for pid in rack.pids], root, False)
        results = run_processes(
            _sum,
            8,
            hosts=hosts,
            ranks_per_host=1,
            switches=[
                f"10.80.{index}.254:{leaf.plane.port}"
                for index, leaf in enumerate(leaves)
                for _ in range(4)
            ],
            path=str(tmp_path / "store"),
            count=count,
        )
        counts = [one.stats().counts for one in (above, *leaves)]
    for result in results:
        assert result.ok, result.error
        assert result.value == 8 * count
    assert all(each["duplicates"] + each["answered_again"] > 0 for each in counts)


@pytest.mark.skipif(bool(missing_for_xdp()), reason=missing_for_xdp() or "possible")
def test_a_switch_in_the_kernel_with_an_address_for_each_host(
    tmp_path: Path, run_processes: RunProcesses
) -> None:
    count = 20_000
    with namespaces.star(2) as network:
        network.route()
        ports = ["port0", "port1"]
        plane = within(network.switch, lambda: XdpDataPlane(ports, 0, mode="generic"))
        with SwitchServer(plane):
            results = run_processes(
                _sum,
                4,
                hosts=network,
                ranks_per_host=2,
                switches=[f"10.78.{host}.1:{plane.port}" for host in range(2)],
                path=str(tmp_path / "store"),
                count=count,
            )
    for rank, result in enumerate(results):
        assert result.ok, result.error
        assert result.value == (8 * count if rank % 2 == 0 else 0)

"""Ranks, leaders and hosts that are lost, and links that are unplugged, in groups over several
hosts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.distributed as dist

import namespaces
import torchrelay.aggregation  # noqa: F401 - registers the backend
from torchrelay.errors import OperationTimeoutError, PeerLostError
from torchrelay.world import World

if TYPE_CHECKING:
    from ranks import RunProcesses

_spec = importlib.util.spec_from_file_location(
    "hosts_faults", Path(__file__).with_name("test_failures.py")
)
assert _spec is not None and _spec.loader is not None
FAULTS: Any = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = FAULTS
_spec.loader.exec_module(FAULTS)

HOSTS = "aabb"


def start(world: World, hosts: str, timeout_s: float = 60.0) -> Any:
    os.environ["TORCHRELAY_HOST_ID"] = hosts[world.rank]
    store = world.connect(60)
    dist.init_process_group(
        "sml",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_s),
    )
    return store


def _lose(world: World, victims: list[int]) -> tuple[tuple[int, ...], str, tuple[int, ...]]:
    """Reduce until ranks are killed: the last of the victims kills them, itself last."""
    store = start(world, HOSTS)
    store.set(f"pid/{world.rank}", str(os.getpid()))
    pids = [int(store.get(f"pid/{rank}")) for rank in range(world.size)]
    tensor = torch.ones(1_000_000)
    dist.all_reduce(tensor)
    if world.rank == victims[-1]:

        def kill() -> None:
            for rank in victims:
                os.kill(pids[rank], signal.SIGKILL)

        threading.Timer(0.3, kill).start()
    with pytest.raises(PeerLostError) as caught:  # noqa: PT012 - nobody knows which one fails
        while True:
            dist.all_reduce(tensor)
    with pytest.raises(PeerLostError, match="failed before") as again:
        dist.barrier()
    return caught.value.ranks, str(caught.value), again.value.ranks


@pytest.mark.parametrize("victims", [[1], [2], [2, 3]], ids=["rank", "leader", "host"])
def test_every_rank_names_those_that_were_killed(
    victims: list[int], run_processes: RunProcesses
) -> None:
    results = run_processes(_lose, 4, victims=victims)
    for rank in range(4):
        if rank in victims:
            assert results[rank].exitcode == -signal.SIGKILL
            continue
        assert results[rank].ok, results[rank].error
        ranks, message, again = results[rank].value
        assert ranks == again == tuple(victims) and f"rank {rank}, all_reduce" in message, message


def _be_cut_off(world: World, hosts: namespaces.Hosts, path: str) -> tuple[str, tuple[int, ...]]:
    namespaces.enter(hosts.pids[world.rank // 2])
    os.environ.update(TORCHRELAY_HOST_ID=HOSTS[world.rank], TORCHRELAY_TRANSPORT_INTERFACE="eth0")
    store = dist.FileStore(path, world.size)
    dist.init_process_group("sml", store=store, rank=world.rank, world_size=world.size)
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    assert tensor.eq(4).all()
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=6))  # of what follows, not of the start
    if world.rank == 0:
        hosts.unplug(1)
        store.set("unplugged", "")
    store.wait(["unplugged"])
    with pytest.raises(OperationTimeoutError) as caught:
        dist.all_reduce(tensor)
    with contextlib.suppress(Exception):  # what it needs is on the other host
        dist.destroy_process_group()
    return str(caught.value), caught.value.ranks


@pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or "possible")
def test_an_unplugged_host_is_named_by_all_others(
    tmp_path: Path, run_processes: RunProcesses
) -> None:
    with namespaces.switched(2) as hosts:
        results = run_processes(_be_cut_off, 4, hosts=hosts, path=str(tmp_path / "store"))
    for rank in range(4):
        assert results[rank].ok, results[rank].error
        message, ranks = results[rank].value
        assert ranks == ((2, 3) if rank < 2 else (0, 1)), message


def _lose_a_link(world: World, hosts: namespaces.Hosts, path: str) -> tuple[str, tuple[int, ...]]:
    """Rank 0, which waits the shortest, finds that it cannot reach rank 1, and leaves."""
    namespaces.enter(hosts.pids[world.rank])
    os.environ.update(TORCHRELAY_HOST_ID=str(world.rank), TORCHRELAY_TRANSPORT_INTERFACE="eth0")
    store = dist.FileStore(path, world.size)
    timeout = timedelta(seconds=60)
    dist.init_process_group(
        "sml", store=store, rank=world.rank, world_size=world.size, timeout=timeout
    )
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    store.set(f"ready/{world.rank}", "")
    store.wait([f"ready/{rank}" for rank in range(world.size)])
    if world.rank == 0:
        hosts.cut(0, 1)
        cast(Any, dist.group.WORLD).set_timeout(timedelta(seconds=6))
        store.set("cut", "")
    store.wait(["cut"])
    with pytest.raises(OperationTimeoutError) as caught:
        dist.all_reduce(tensor)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return str(caught.value), caught.value.ranks


@pytest.mark.skipif(bool(namespaces.missing("nft")), reason=namespaces.missing("nft") or "possible")
def test_every_rank_reports_the_first_cause(tmp_path: Path, run_processes: RunProcesses) -> None:
    with namespaces.star(3) as hosts:
        hosts.route()
        results = run_processes(_lose_a_link, 3, hosts=hosts, path=str(tmp_path / "store"))
    for result in results:
        assert result.ok, result.error
        message, ranks = result.value
        assert ranks == (1,) and "rank 0, all_reduce: rank 1 did not answer" in message, message


AGAIN: list[tuple[str, Callable[[World], None]]] = [
    ("abb", FAULTS.test_a_late_rank_is_named),
    ("ab", FAULTS.test_nothing_arrives),
    ("ab", FAULTS.test_nothing_arrives_and_nobody_waits),
    ("ab", FAULTS.test_a_message_of_another_size_fails_the_receive),
    ("ab", FAULTS.test_ctrl_c_ends_a_wait),
    ("ab", FAULTS.test_ctrl_c_ends_a_call_behind_another),
    ("ab", FAULTS.test_a_signal_handler_may_destroy_the_group),
    ("ab", FAULTS.test_a_signal_handler_makes_no_call_within_another),
]


@pytest.mark.parametrize("index", range(len(AGAIN)), ids=lambda i: AGAIN[i][1].__name__[5:])
def test_as_on_one_host(index: int, run_processes: RunProcesses) -> None:
    for result in run_processes(_again, len(AGAIN[index][0]), index=index):
        assert result.ok, result.error


def _again(world: World, index: int) -> None:
    hosts, test = AGAIN[index]
    os.environ["TORCHRELAY_HOST_ID"] = hosts[world.rank]
    test(world)

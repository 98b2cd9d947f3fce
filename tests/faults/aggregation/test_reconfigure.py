"""Members that die, freeze or do not come: the others are told who, and go on without them."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from torchrelay._group import Op
from torchrelay._members import Configuration, Member
from torchrelay.aggregation import get_reconfigure_handle, reconfigure
from torchrelay.errors import OperationTimeoutError, PeerLostError
from torchrelay.world import World

if TYPE_CHECKING:
    from ranks import RunProcesses

TIMEOUT_S = 60.0


def meet(world: World, handle: str) -> list[str]:
    """Exchange handles; nothing else goes through the store, which rank 0 serves."""
    store = world.connect(TIMEOUT_S)
    store.set(f"handle/{world.rank}", handle)
    handles = [store.get(f"handle/{rank}").decode() for rank in range(world.size)]
    store.set(f"has/{world.rank}", "")
    store.wait([f"has/{rank}" for rank in range(world.size)])
    return handles


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sum_until_lost(member: Member) -> tuple[int, ...]:
    """Sum until a member is lost; return those that are."""
    assert member.group is not None
    total = torch.empty(300_000)
    while True:
        try:
            member.group.all_reduce(total, torch.ones(300_000), Op.SUM, TIMEOUT_S)
        except PeerLostError as error:
            return error.ranks


def _die_one_after_the_other(world: World, hosts: str) -> list[Configuration]:
    """In each round the first rank dies in a sum."""
    os.environ["TORCHRELAY_HOST_ID"] = hosts[world.rank]
    with Member() as member:
        handles = meet(world, member.handle)
        formed = [member.reconfigure(0, handles, TIMEOUT_S)]
        for uuid in range(1, world.size):
            if formed[-1].rank == 0:
                threading.Timer(0.05, die).start()
            assert sum_until_lost(member) == (0,)
            formed.append(member.reconfigure(uuid, formed[-1].handles[1:], TIMEOUT_S))
        return formed


@pytest.mark.parametrize("hosts", ["aaaa", "abab"])
def test_all_but_one_die_one_after_the_other(hosts: str, run_processes: RunProcesses) -> None:
    results = run_processes(_die_one_after_the_other, 4, hosts=hosts)
    assert [result.exitcode for result in results[:3]] == [-signal.SIGKILL] * 3
    assert results[3].ok, results[3].error
    formed: list[Configuration] = results[3].value
    assert [one.size for one in formed] == [4, 3, 2, 1]
    for one in formed[1:]:  # a collective that one has completed all others have begun
        assert max(one.completed) - min(one.completed) <= 1
        assert one.completed_on_all == min(one.completed)


def _die_while_it_forms(world: World, hosts: str) -> tuple[int, ...]:
    """Rank 1 dies while it waits for rank 3, which comes late."""
    os.environ["TORCHRELAY_HOST_ID"] = hosts[world.rank]
    with Member() as member:
        handles = meet(world, member.handle)
        member.reconfigure(0, handles, TIMEOUT_S)
        if world.rank == 1:
            threading.Timer(0.2, die).start()
        if world.rank == 3:
            time.sleep(0.6)
        with pytest.raises(PeerLostError) as caught:
            member.reconfigure(1, handles, TIMEOUT_S)
        formed = member.reconfigure(2, [handles[rank] for rank in (3, 2, 0)], TIMEOUT_S)
        assert formed.size == 3
        return caught.value.ranks


@pytest.mark.parametrize("hosts", ["aaaa", "abab"])
def test_one_that_dies_while_a_group_forms(hosts: str, run_processes: RunProcesses) -> None:
    results = run_processes(_die_while_it_forms, 4, hosts=hosts)
    assert results[1].exitcode == -signal.SIGKILL
    for rank in (0, 2, 3):
        assert results[rank].ok, results[rank].error
        assert results[rank].value == (1,)


def _freeze(world: World) -> None:
    with Member() as member:
        handles = meet(world, member.handle)
        member.reconfigure(0, handles, TIMEOUT_S)
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(OperationTimeoutError) as caught:
            member.reconfigure(1, handles, 2.0)
        assert caught.value.ranks == (1,)
        formed = member.reconfigure(2, [handles[2], handles[0]], TIMEOUT_S)
        if formed.rank == 0:
            frozen = json.loads(handles[1])["pid"]
            os.kill(frozen, signal.SIGKILL)


def test_one_that_is_frozen(run_processes: RunProcesses) -> None:
    results = run_processes(_freeze, 3)
    assert results[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert results[rank].ok, results[rank].error


def _group_of_c10d(world: World) -> str:
    dist.init_process_group(
        "sml", store=world.connect(TIMEOUT_S), rank=world.rank, world_size=world.size
    )
    handles = meet(world, get_reconfigure_handle())
    if world.rank == 0:  # who serves the store
        threading.Timer(0.05, die).start()
    tensor = torch.ones(100_000)
    with pytest.raises(PeerLostError) as caught:  # noqa: PT012 - nobody knows which one fails
        while True:
            dist.all_reduce(tensor)
    assert caught.value.ranks == (0,)
    group: Any = dist.group.WORLD
    assert group.get_error().name == "COMM_ERROR"
    formed = reconfigure(None, 1, handles[1:])
    assert group.get_error().name == "SUCCESS"
    tensor.fill_(formed.rank + 1.0)
    dist.all_reduce(tensor)
    assert tensor.eq(3).all()
    return "went on"


def test_c10d_goes_on_without_the_server_of_its_store(run_processes: RunProcesses) -> None:
    results = run_processes(_group_of_c10d, 3)
    assert [result.value for result in results] == [None, "went on", "went on"], results


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _mappings() -> int:
    return sum("torchrelay-group" in line for line in Path("/proc/self/maps").open())


def _reconfigure_often(world: World, hosts: str) -> None:
    os.environ["TORCHRELAY_HOST_ID"] = hosts[world.rank]
    with Member() as member:
        handles = meet(world, member.handle)
        before: Any = None
        for uuid in range(24):
            members = handles if uuid % 3 else handles[world.rank :][:1]
            member.reconfigure(100 * uuid + (len(members) == 1) * world.rank, members, TIMEOUT_S)
            if uuid % 12 == 9:  # alone
                gc.collect()
                now = _descriptors(), threading.active_count(), _mappings()
                assert now == (before or now)
                before = now


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_nothing_is_left(hosts: str, run_processes: RunProcesses) -> None:
    for result in run_processes(_reconfigure_often, 2, hosts=hosts):
        assert result.ok, result.error

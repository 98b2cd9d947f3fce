from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
import torch

from torchrelay.buffers import Segment
from torchrelay.errors import OperationTimeoutError
from torchrelay.world import Meeting, World, host_identity

if TYPE_CHECKING:
    from ranks import RunProcesses


@pytest.mark.processes(3)
def test_ranks_of_one_host_find_each_other(world: World) -> None:
    store = world.connect(30)
    found = Meeting(store, world.rank, world.size, 30).processes
    assert [(each.rank, each.host) for each in found] == [(r, host_identity()) for r in range(3)]


@pytest.mark.processes(2)
def test_a_segment_is_shared_by_address(world: World) -> None:
    store = world.connect(30)
    if world.rank == 0:
        segment = Segment.create(4096)
        store.set("address", segment.address)
        store.wait(["done"])
        assert segment.tensor((8,), torch.float32).eq(2).all()
    else:
        Segment.attach(store.get("address").decode()).tensor((8,), torch.float32).fill_(2)
        store.set("done", "")


def _meet_late(world: World) -> bytes:
    """Meet with rank 1, which is late; return what rank 0 printed meanwhile."""
    store = world.connect(30)
    file = os.memfd_create("stderr")
    before = os.dup(2)
    os.dup2(file, 2)
    try:
        if world.rank == 1:
            time.sleep(2.5)
        meeting = Meeting(store, world.rank, world.size, 30)
        if world.rank == 1:
            time.sleep(1.5)
        meeting.announce("late")
        meeting.wait("late", 30)
    finally:
        os.dup2(before, 2)
    return os.pread(file, 10_000, 0)


def test_waiting_for_a_late_rank_prints_nothing(run_processes: RunProcesses) -> None:
    results = run_processes(_meet_late, 2)
    assert [result.value for result in results] == [b"", b""]


def _report_unless_killed(world: World) -> tuple[int, ...]:
    store = world.connect(30)
    store.set(f"here/{world.rank}", "")
    store.wait([f"here/{rank}" for rank in range(world.size)])  # they may start far apart
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        Meeting(store, world.rank, world.size, 5.0)
    except OperationTimeoutError as error:
        return error.ranks
    return ()


def test_a_missing_rank_is_named(run_processes: RunProcesses) -> None:
    results = run_processes(_report_unless_killed, 3)
    assert results[1].exitcode == -signal.SIGKILL
    assert results[0].value == results[2].value == (1,)

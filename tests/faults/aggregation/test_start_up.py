"""What goes wrong before a group is made: the cause is named, and long before the timeout of 30
minutes.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchrelay import _native
from torchrelay.errors import UnavailableError
from torchrelay.world import World

if TYPE_CHECKING:
    from ranks import RunProcesses


def start(world: World, rank: int | None = None, size: int | None = None) -> None:
    dist.init_process_group(
        "sml",
        store=world.connect(60),
        rank=world.rank if rank is None else rank,
        world_size=size or world.size,
    )


def heard(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_while_joining(world: World) -> str:
    if world.rank == 1:
        # After it has reported, before it takes its place in the segment.
        _native.Group = die  # type: ignore[assignment,misc]
    return heard(lambda: start(world))


def test_a_rank_that_dies_while_joining_is_named(run_processes: RunProcesses) -> None:
    results = run_processes(_die_while_joining, 3, timeout_s=90)
    assert results[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert results[rank].ok, results[rank].error
        assert results[rank].value.startswith("PeerLostError"), results[rank].value
        assert "rank 1 (process" in results[rank].value


def _die_before_a_new_group(world: World) -> str:
    start(world)
    dist.barrier()
    if world.rank == 2:
        die()
    return heard(lambda: dist.new_group(backend="sml"))


def test_a_rank_that_died_before_a_new_group_is_named(run_processes: RunProcesses) -> None:
    results = run_processes(_die_before_a_new_group, 3, timeout_s=90)
    for rank in (0, 1):
        assert results[rank].value.startswith("PeerLostError"), results[rank]
        assert re.search(r"rank 2 \(process \d+\) (has )?died", results[rank].value)


def _lose_the_store(world: World) -> str:
    start(world)
    dist.barrier()
    if world.rank == 0:
        die()
    while heard(dist.barrier) == "nothing":
        pass
    return heard(lambda: dist.new_group([1, 2], backend="sml"))


def test_a_dead_store_is_a_typed_error(run_processes: RunProcesses) -> None:
    results = run_processes(_lose_the_store, 3, timeout_s=90)
    for rank in (1, 2):
        assert results[rank].value.startswith("PeerLostError"), results[rank]
        assert "rank 0" in results[rank].value and "store" in results[rank].value


def _be_two_jobs(world: World) -> str:
    """Process 2 claims to be rank 1 of 2, as the second job on a MASTER_PORT would."""
    if world.rank < 2:
        start(world, size=2)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        world.connect(60).set(f"summed/{world.rank}", "")
        world.connect(60).wait(["refused"])
        return str(tensor.tolist())
    store = world.connect(60)
    store.wait(["summed/0", "summed/1"])
    said = heard(lambda: start(world, rank=1, size=2))
    store.set("refused", "")
    return said


def test_a_second_process_of_one_rank_is_refused(run_processes: RunProcesses) -> None:
    results = run_processes(_be_two_jobs, 3, timeout_s=90)
    assert [result.value for result in results[:2]] == ["[2.0, 2.0]"] * 2, results
    assert results[2].value.startswith("MismatchError: rank 1 is already claimed"), results[2]
    assert "two jobs use one MASTER_ADDR and MASTER_PORT" in results[2].value


def _be_of_different_jobs(world: World) -> str:
    os.environ["TORCHELASTIC_RUN_ID"] = f"job-{world.rank}"
    return heard(lambda: start(world))


def test_ranks_of_different_jobs_are_refused(run_processes: RunProcesses) -> None:
    for result in run_processes(_be_of_different_jobs, 2, timeout_s=90):
        assert result.value.startswith("MismatchError"), result
        assert (
            "rank 0 to TORCHELASTIC_RUN_ID=job-0, rank 1 to TORCHELASTIC_RUN_ID=job-1"
            in result.value
        )


def _meet_again(world: World) -> None:
    """The same processes over the same store: what the first group left there is not read."""
    store = world.connect(60)
    for _ in range(3):
        dist.init_process_group("sml", store=store, rank=world.rank, world_size=world.size)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.eq(2).all()
        dist.destroy_process_group()


def test_a_group_can_be_made_again_over_one_store(run_processes: RunProcesses) -> None:
    for result in run_processes(_meet_again, 2, timeout_s=90):
        assert result.ok, result.error


def _fork(world: World) -> None:
    start(world)
    dist.all_reduce(torch.ones(10), async_op=True).wait()
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (
            lambda: dist.all_reduce(torch.ones(2)),
            lambda: dist.all_reduce(torch.ones(2), async_op=True).wait(),
            dist.barrier,
            lambda: dist.isend(torch.ones(2), 1 - world.rank),
            lambda: dist.irecv(torch.ones(2), 1 - world.rank),
        ):
            try:
                call()
            except UnavailableError as error:
                refused += "was forked" in str(error)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    assert tensor.eq(2).all()


def test_a_forked_child_is_refused_and_its_parent_goes_on(
    run_processes: RunProcesses,
) -> None:
    for result in run_processes(_fork, 2, timeout_s=90):
        assert result.ok, result.error

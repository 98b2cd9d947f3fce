from __future__ import annotations

import subprocess
import threading
from dataclasses import replace

import pytest
import torch.distributed as dist

from torchrelay import world as world_module
from torchrelay.errors import ConfigError, OperationTimeoutError, PeerLostError
from torchrelay.world import Meeting, Process, World

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_one_process_is_a_world() -> None:
    world = World.from_environment({})
    assert world == World(0, 1)
    store = world.connect()
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert [process.rank for process in Meeting(store, 0, 1, 1.0).processes] == [0]


def test_torchrun() -> None:
    assert World.from_environment(TORCHRUN) == World(3, 4, "torchrun", "node0", 29500)


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            },
            "Open MPI",
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}, "MPICH"),
        (
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"},
            "Slurm",
        ),
        (
            {
                "SLURM_PROCID": "1",
                "SLURM_NTASKS": "8",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_LOCALID": "0",
                "SLURM_STEP_ID": "3",
            },
            "Slurm",
        ),
    ],
)
def test_other_launchers(environ: dict[str, str], launcher: str) -> None:
    world = World.from_environment(environ)
    assert (world.rank, world.size, world.launcher) == (1, 2, launcher)
    with pytest.raises(ConfigError, match="MASTER_PORT is not set"):
        world.connect()


@pytest.mark.parametrize(
    "more",
    [
        {},  # the script of sbatch
        {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # the shell of salloc
    ],
)
def test_a_shell_in_an_allocation_is_a_world_of_its_own(more: dict[str, str]) -> None:
    environ = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", **more}
    assert World.from_environment(environ).size == 1


def test_torchrun_inside_slurm_is_torchrun() -> None:
    environ = {**TORCHRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    assert World.from_environment(environ).launcher == "torchrun"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "x"}, "RANK='x' is not a whole number"),
        ({"RANK": "4"}, "from 0 to size - 1"),
        ({"MASTER_PORT": "p"}, "MASTER_PORT"),
    ],
)
def test_bad_variables_are_named(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        World.from_environment({**TORCHRUN, **change})


def test_a_store_that_is_not_there_times_out() -> None:
    with pytest.raises(OperationTimeoutError, match="did not answer within"):
        World(1, 2, master_port=1).connect(timeout_s=0.5)


def test_processes_name_their_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "host_identity", lambda: threading.current_thread().name)
    store = dist.HashStore()
    other = threading.Thread(target=lambda: Meeting(store, 1, 2, 100), name="elsewhere")
    other.start()
    here = threading.current_thread().name
    assert [each.host for each in Meeting(store, 0, 2, 100).processes] == [here, "elsewhere"]
    other.join()


def test_ranks_as_threads() -> None:
    store = dist.HashStore()
    found: list[list[Process]] = []
    threads = [
        threading.Thread(target=lambda r=rank: found.append(Meeting(store, r, 3, 100).processes))
        for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.rank for process in found[0]] == [0, 1, 2] and found == [found[0]] * 3


def test_a_missing_rank_is_named() -> None:
    with pytest.raises(
        OperationTimeoutError, match=r"rank 1 did not join the group within \d+\.\d s"
    ) as caught:
        Meeting(dist.HashStore(), 0, 2, 0.2)
    assert caught.value.ranks == (1,)


def test_a_process_that_has_ended_is_told_from_a_later_one_of_its_id() -> None:
    me = Process.current(0)
    assert not me.has_died() and replace(me, start_ticks=me.start_ticks - 1).has_died()
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert replace(me, pid=ended.pid).has_died()
    assert not replace(me, host="elsewhere", pid=ended.pid).has_died()


def test_a_store_that_is_lost_is_named_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting(dist.HashStore(), 0, 1, 60)

    def lost(*_: object) -> None:
        raise dist.DistNetworkError("reset")

    monkeypatch.setattr(dist.PrefixStore, "set", lost)
    with pytest.raises(
        PeerLostError, match="rank 0: the store through which the ranks meet is gone"
    ):
        meeting.announce("step")

from __future__ import annotations

import math
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from torchrelay import _processes
from torchrelay.errors import ConfigError, OperationTimeoutError, PeerLostError
from torchrelay.world import Meeting, Process, Ranks, World

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


def test_a_rank_that_never_connects_is_a_timeout() -> None:
    with pytest.raises(OperationTimeoutError, match="rank 0: not all 2 ranks connected to the"):
        World(0, 2, master_port=0).connect(timeout_s=2)


def test_a_rank_may_wait_forever() -> None:
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = World(1, 2, master_port=served.port).connect(math.inf)
    served.set("key", "value")
    assert store.get("key") == b"value"


def test_processes_name_their_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_processes, "host_identity", lambda: threading.current_thread().name)
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


def test_a_process_that_replaces_another_takes_part_in_barriers() -> None:
    store = dist.HashStore()

    def meet(other: Ranks) -> None:
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(r.barrier, "step", 5.0) for r in (first, other)]:
                done.result()

    first, second = Ranks(store, 0, 2), Ranks(store, 1, 2)
    for _ in range(3):
        meet(second)
    num_keys = store.num_keys()
    died = Ranks(store, 1, 2)
    with pytest.raises(PeerLostError):
        died.barrier("step", 5.0, check=_die)
    for _ in range(3):
        meet(Ranks(store, 1, 2))
    assert store.num_keys() == num_keys


def _die() -> None:
    raise PeerLostError("it died in the barrier", ranks=[1])


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


def test_the_kernel_may_cut_a_name_inside_a_character() -> None:
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    try:
        name.write_text("a" * 14 + "é")  # the kernel keeps 15 bytes
        assert not Process.current(0).has_died()
    finally:
        name.write_bytes(before)


def test_a_store_that_is_lost_is_named_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting(dist.HashStore(), 0, 1, 60)

    def lost(*_: object) -> None:
        raise dist.DistNetworkError("reset")

    monkeypatch.setattr(dist.PrefixStore, "set", lost)
    with pytest.raises(
        PeerLostError, match="rank 0: the store through which the ranks meet is gone"
    ):
        meeting.announce("step")


class _LostStore(dist.Store):
    """A store that is lost at the ``survives``-th call from now."""

    def __init__(self, survives: int) -> None:
        super().__init__()
        self._left, self._numbers = survives, dict[str, int]()

    def _call(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise dist.DistNetworkError("reset")

    def add(self, key: str, amount: int) -> int:
        self._call()
        self._numbers[key] = self._numbers.get(key, 0) + amount
        return self._numbers[key]

    def set(self, key: str, value: str) -> None:
        self._call()

    def check(self, keys: list[str]) -> bool:
        self._call()
        return "trouble" not in keys

    def get(self, key: str) -> bytes:
        self._call()
        return b""


@pytest.mark.parametrize("survives", range(7))
def test_a_barrier_names_the_cause_wherever_the_store_is_lost(survives: int) -> None:
    """Who serves the store may be who dies: then what the ranks know of it comes first."""
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls > 2:  # it is known only a moment later
            raise PeerLostError("process 7, which serves node 0, has died", ranks=(0,))

    ranks = Ranks(_LostStore(survives), 1, 2)
    with pytest.raises(PeerLostError, match="which serves node 0, has died"):
        ranks.barrier("step", 60, check=check, news_s=60)

"""Checkpoints in memory, at a partner and on the disk: what is loaded is the newest that is whole,
whoever died, into any number of ranks. ``benchmarks/soak_checkpoint_memory.py`` kills at length.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memory_jobs import (
    AFTER_STAGE,
    BEFORE_STAGE,
    check,
    die,
    dying,
    job_state,
    open_job,
    server_pid,
)
from torchrelay.errors import ArgumentError, MismatchError
from torchrelay.world import World
from waiting import eventually

if TYPE_CHECKING:
    from ranks import RunProcesses


def _run(
    world: World,
    path: str,
    hosts: Sequence[int],
    steps: Sequence[int],
    kill: str = "",
    victim: int = 0,
    moment: int = -1,
    partner: bool = True,
) -> None:
    """Load, and write which step it was to a file; then save ``steps``. At a moment of the last
    one, the victim dies, or its memory server, or all of its host.
    """
    checkpointer = open_job(world, path, hosts, partner=partner)
    state = job_state(-1)
    loaded = checkpointer.load(state)
    if loaded is not None:
        check(state, loaded)
    Path(f"{path}-loaded-{world.rank}").write_text(str(loaded))
    if steps and not kill:
        with pytest.raises(ArgumentError, match="rank 0: step=-1: it must be"):
            checkpointer.save(job_state(0), step=(-1, 9)[world.rank > 0])
        with pytest.raises(MismatchError, match=r"the ranks save different steps: .*90"):
            checkpointer.save(job_state(0), step=90 + world.rank)
    for step in steps:
        is_last = step == steps[-1] and world.rank == victim and kill
        with dying(moment if is_last else -2, lambda: die(checkpointer, kill)):
            checkpointer.save(job_state(step), step=step)
            checkpointer.wait()


def _loaded(path: str, size: int) -> str:
    """What all ranks of the last job have loaded."""
    files = [Path(f"{path}-loaded-{rank}") for rank in range(size)]
    (found,) = {file.read_text() for file in files}
    for file in files:
        file.unlink()
    return found


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 2)])
def test_another_number_of_ranks_loads_from_memory(
    environ: dict[str, str], path: str, run_processes: RunProcesses, before: int, after: int
) -> None:
    """On two hosts each, so that parts of what a rank needs are on the other."""
    for size, steps, expected in ((before, [3, 4], "None"), (after, [5, 6], "4"), (after, [], "6")):
        hosts = [rank * 2 // size for rank in range(size)]
        ranks = run_processes(
            _run, size, environ=environ, path=path, hosts=hosts, steps=steps, partner=False
        )
        assert all(one.ok for one in ranks), ranks
        assert _loaded(path, size) == expected
    assert not os.path.exists(path)


@pytest.mark.parametrize("partner", [False, True])
def test_whoever_dies_at_any_moment(
    environ: dict[str, str], path: str, run_processes: RunProcesses, partner: bool
) -> None:
    """Of what was whole, nothing is lost but what only a dead host or server had."""
    deaths = [("trainer", 2), ("host", 4), ("server", 2), ("trainer", 5)]
    if partner:
        deaths += [("host", 2), ("host", 5), ("server", 5), ("server", 0), ("host", 0)]
    possible, first = {"None"}, 1
    for number, (kill, moment) in enumerate([*deaths, ("", -1)]):
        run_processes(
            _run,
            2,
            environ=environ,
            path=path,
            hosts=[0, 1],
            steps=[first, first + 1],
            kill=kill,
            victim=number % 2,
            moment=moment,
            partner=partner,
        )
        assert _loaded(path, 2) in possible, (number, possible)
        is_kept = partner or kill == "trainer"
        possible = {str(first), str(first + 1)} if is_kept else {"None"}
        first += 2


def _interrupted_copy(world: World, path: str, kill: str) -> None:
    """Step 2 is whole on both hosts, but rank 0 dies before its part is copied to host 1, whose
    server is stopped until then.
    """
    store = world.connect()
    checkpointer = open_job(world, path, [0, 1], partner=True)
    checkpointer.save(job_state(1), step=1)
    checkpointer.wait()
    dead = Path(f"{path}-dead")
    if world.rank == 1:

        def continued(server: int) -> None:
            eventually(lambda: dead.exists() and not os.path.exists(f"/proc/{dead.read_text()}"))
            os.kill(server, signal.SIGCONT)

        def paused() -> None:
            server = server_pid(checkpointer.path)
            os.kill(server, signal.SIGSTOP)
            threading.Thread(target=continued, args=(server,), daemon=True).start()
            store.set("paused", "")

        with dying(AFTER_STAGE, paused):
            checkpointer.save(job_state(2), step=2)
        checkpointer.wait()
        return
    with dying(BEFORE_STAGE, lambda: store.wait(["paused"])):
        checkpointer.save(job_state(2), step=2)
    assert checkpointer._client is not None
    client = checkpointer._client
    eventually(lambda: any(info[1:5:3] == (2, 0) for info in client.ask("list")))
    dead.write_text(str(os.getpid()))
    die(checkpointer, kill)


@pytest.mark.parametrize(("kill", "expected"), [("trainer", "2"), ("host", "1")])
def test_a_death_while_the_partner_gets_its_copy(
    environ: dict[str, str], path: str, run_processes: RunProcesses, kill: str, expected: str
) -> None:
    ranks = run_processes(_interrupted_copy, 2, environ=environ, path=path, kill=kill)
    assert ranks[0].exitcode == -signal.SIGKILL and "PeerLostError" in str(ranks[1].error), ranks
    run_processes(_run, 2, environ=environ, path=path, hosts=[0, 1], steps=[])
    assert _loaded(path, 2) == expected

"""SIGKILL of worker, daemon and client in every state: a typed error or an answer, and nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import switching_models as models
from torchrelay.errors import PeerLostError, SegmentError, UnavailableError
from torchrelay.switching import ModelStore, Switcher

MODELS = Path(models.__file__)
WAIT_S = 300.0
X = torch.ones(1, 64)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def store() -> Iterator[ModelStore]:
    with ModelStore() as made:
        made.add("chain", models.chain, kwargs={"depth": 30}, inputs={"x": X})
        made.add("slow", models.slow, inputs={"x": (torch.float32, (-1, 8)), "seconds": (torch.float32, ())})
        made.add("faulty", models.faulty, inputs={"x": (torch.float32, (1, 4)), "what": (torch.int64, ())})
        yield made


@pytest.fixture(scope="module")
def switcher(store: ModelStore) -> Iterator[Switcher]:
    # A slow link, so that there is time to kill during a copy: 500 KB at 2.5 MB/s are 0.2 s.
    with Switcher(store, arena_bytes=600 << 10, threads=1, link_gbps=0.0025, start_timeout_s=WAIT_S) as made:
        for name in store.names():
            made.load(name)
        yield made


def slow_inputs(seconds: float) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(1, 8), "seconds": torch.tensor(seconds)}


def pids(switcher: Switcher, state: str) -> list[int]:
    return [worker["pid"] for worker in switcher.status()["workers"] if worker["state"] == state]


def two_standby(switcher: Switcher) -> None:
    until(lambda: len(pids(switcher, "standby")) == 2)


def test_a_worker_killed_while_it_computes_is_replaced_and_the_request_runs_again(switcher: Switcher) -> None:
    two_standby(switcher)
    future = switcher.submit("slow", slow_inputs(1.0))
    until(lambda: bool(pids(switcher, "running")))
    (pid,) = pids(switcher, "running")
    os.kill(pid, signal.SIGKILL)
    assert future.result(WAIT_S).outputs["output"].shape == (1, 8)
    two_standby(switcher)
    assert pid not in pids(switcher, "standby") and not Path(f"/proc/{pid}").exists()


def test_a_worker_killed_during_a_copy_leaves_the_arena_right(switcher: Switcher) -> None:
    two_standby(switcher)
    expected = switcher.infer("chain", {"x": X})["output"]
    switcher.infer("slow", slow_inputs(0.0))
    switcher.unload("chain")  # out of the arena
    switcher.load("chain", timeout_s=WAIT_S)
    two_standby(switcher)
    future = switcher.submit("chain", {"x": X})
    until(lambda: bool(pids(switcher, "running")) or future.done())
    for pid in pids(switcher, "running"):
        os.kill(pid, signal.SIGKILL)
    assert torch.equal(future.result(WAIT_S).outputs["output"], expected)
    assert torch.equal(switcher.infer("chain", {"x": X})["output"], expected)
    assert not any(model["pinned"] for model in switcher.status()["models"])


def test_killed_standby_workers_are_replaced(switcher: Switcher) -> None:
    two_standby(switcher)
    before = pids(switcher, "standby")
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert switcher.infer("chain", {"x": X})["output"].shape == (1, 64)
    two_standby(switcher)
    assert not set(before) & set(pids(switcher, "standby"))


def test_a_request_that_kills_every_worker_ends_in_an_error(switcher: Switcher) -> None:
    for what, reason in ((2, "SIGKILL"), (3, "SIGSEGV; does the model write to its parameters")):
        two_standby(switcher)
        with pytest.raises(PeerLostError, match=f"{reason}.* while it ran model 'faulty'; tried 2 times"):
            switcher.infer("faulty", {"x": torch.ones(1, 4), "what": torch.tensor(what)})
    assert switcher.infer("faulty", {"x": torch.ones(1, 4), "what": torch.tensor(0)})["output"].shape == (
        1,
        4,
    )


def test_a_copy_that_fails_is_an_error_and_the_next_request_is_served(
    switcher: Switcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_standby(switcher)
    switcher.unload("chain")
    switcher.load("chain", timeout_s=WAIT_S)  # profiled again: regrouped, so not in the arena
    until(lambda: all(block["model"] != "chain" for block in switcher.status()["blocks"]))

    def broken(copies: object) -> Callable[[], None]:
        raise SegmentError("the link is down")

    with monkeypatch.context() as patch:
        patch.setattr(switcher._link, "start", broken)
        with pytest.raises(SegmentError, match="the link is down"):
            switcher.infer("chain", {"x": X})
    assert switcher.infer("chain", {"x": X})["output"].shape == (1, 64)
    assert switcher.status()["worker_deaths"] >= 0 and pids(switcher, "standby")


def test_a_request_that_computes_too_long_is_ended(store: ModelStore) -> None:
    with Switcher(
        store, arena_bytes=600 << 10, threads=1, run_timeout_s=2.0, start_timeout_s=WAIT_S
    ) as switcher:
        switcher.load("slow")
        with pytest.raises(TimeoutError, match="more than 2 s"):
            switcher.infer("slow", slow_inputs(600.0))
        switcher.close(grace_s=0.0)
        with pytest.raises(UnavailableError):
            switcher.status()


DAEMON = """
import sys, time, torch
from torchrelay.switching import ModelStore, Switcher
factory, state = sys.argv[1] + ":slow", sys.argv[2]
with ModelStore() as store:
    store.add("slow", factory, inputs={"x": (torch.float32, (-1, 8)), "seconds": (torch.float32, ())})
    with Switcher(store, arena_bytes=1 << 20, threads=1) as switcher:
        if state != "starting":
            switcher.load("slow")
        if state == "running":
            switcher.submit("slow", {"x": torch.ones(1, 8), "seconds": torch.tensor(600.0)})
            while not any(w["state"] == "running" for w in switcher.status()["workers"]):
                time.sleep(0.01)
        print(*[worker["pid"] for worker in switcher.status()["workers"]], flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("state", ["starting", "idle", "running"])
def test_a_killed_daemon_leaves_no_worker(state: str) -> None:
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(MODELS), state], stdout=subprocess.PIPE, text=True
    )
    assert daemon.stdout is not None
    workers = [int(pid) for pid in daemon.stdout.readline().split()]
    daemon.kill()
    daemon.communicate()
    assert len(workers) == 2
    until(lambda: not any(_alive(pid) for pid in workers))


def _alive(pid: int) -> bool:
    """Whether the process runs; one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

"""SIGKILL of worker, daemon and client in every state: a typed error or an answer, and nothing
left.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import preloaded
import switching_models as models
from torchrelay.errors import (
    ModelError,
    NotFoundError,
    OperationTimeoutError,
    PeerLostError,
    SegmentError,
    UnavailableError,
)
from torchrelay.switching import ModelStore, Switcher
from torchrelay.switching.worker import _fork_server
from waiting import eventually

# The first test of the file starts three processes that import torch: minutes where many others
# run.
pytestmark = pytest.mark.timeout(400)

MODELS = Path(models.__file__)
WAIT_S = 300.0
X = torch.ones(1, 64)


@pytest.fixture(scope="module")
def store() -> Iterator[ModelStore]:
    with ModelStore() as made:
        made.add("chain", models.chain, kwargs={"depth": 30}, inputs={"x": X})
        made.add(
            "slow",
            models.slow,
            inputs={"x": (torch.float32, (-1, 8)), "seconds": (torch.float32, ())},
        )
        made.add(
            "faulty",
            models.faulty,
            inputs={"x": (torch.float32, (1, 4)), "what": (torch.int64, ())},
        )
        yield made


@pytest.fixture(scope="module")
def switcher(store: ModelStore) -> Iterator[Switcher]:
    # A slow link, so that there is time to kill during a copy: 500 KB at 2.5 MB/s are 0.2 s.
    with Switcher(
        store, arena_bytes=600 << 10, threads=1, link_gbps=0.0025, start_timeout_s=WAIT_S
    ) as made:
        for name in store.names():
            made.load(name)
        yield made


def slow_inputs(seconds: float) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(1, 8), "seconds": torch.tensor(seconds)}


def pids(switcher: Switcher, state: str) -> list[int]:
    return [worker["pid"] for worker in switcher.status()["workers"] if worker["state"] == state]


def status_of(switcher: Switcher, name: str) -> dict[str, Any]:
    (found,) = [model for model in switcher.status()["models"] if model["name"] == name]
    return dict(found)


def two_standby(switcher: Switcher) -> None:
    eventually(lambda: len(pids(switcher, "standby")) == 2)


def evict(switcher: Switcher, name: str) -> None:
    """Take a model that nothing uses out of the arena."""
    daemon = switcher._daemon
    eventually(lambda: daemon.owner.call(lambda: daemon.residency.is_unused(name)))
    daemon.owner.call(lambda: daemon.residency.arena.evict(name))


def test_a_worker_killed_while_it_computes_is_replaced_and_the_request_runs_again(
    switcher: Switcher,
) -> None:
    two_standby(switcher)
    future = switcher.submit("slow", slow_inputs(4.0))
    eventually(lambda: bool(pids(switcher, "running")))
    (pid,) = pids(switcher, "running")
    os.kill(pid, signal.SIGKILL)
    assert future.result(WAIT_S).outputs["output"].shape == (1, 8)
    two_standby(switcher)
    assert pid not in pids(switcher, "standby") and not Path(f"/proc/{pid}").exists()


def test_a_worker_leaves_sigterm_to_the_daemon(switcher: Switcher) -> None:
    """systemd sends it to every process of a service."""
    two_standby(switcher)
    before = sorted(pids(switcher, "standby"))
    future = switcher.submit("slow", slow_inputs(1.0))
    for pid in before:
        os.kill(pid, signal.SIGTERM)
    future.result(WAIT_S)
    two_standby(switcher)
    assert sorted(pids(switcher, "standby")) == before


def test_what_a_model_starts_does_not_ignore_sigterm(switcher: Switcher, store: ModelStore) -> None:
    store.add("terminating", models.terminating, inputs={"x": X})
    switcher.load("terminating", timeout_s=WAIT_S)
    assert switcher.infer("terminating", {"x": X})["output"].shape == X.shape


def test_a_worker_killed_during_a_copy_leaves_the_arena_right(switcher: Switcher) -> None:
    two_standby(switcher)
    expected = switcher.infer("chain", {"x": X})["output"]
    switcher.infer("slow", slow_inputs(0.0))
    evict(switcher, "chain")
    two_standby(switcher)
    future = switcher.submit("chain", {"x": X})
    eventually(lambda: bool(pids(switcher, "running")) or future.done())
    for pid in pids(switcher, "running"):
        os.kill(pid, signal.SIGKILL)
    assert torch.equal(future.result(WAIT_S).outputs["output"], expected)
    assert torch.equal(switcher.infer("chain", {"x": X})["output"], expected)
    assert not any(model["pinned"] for model in switcher.status()["models"])


def server_of(switcher: Switcher) -> int:
    """The process that the workers are forked from."""
    (pid,) = {parent_of(worker["pid"]) for worker in switcher.status()["workers"]}
    return pid


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_killed_standby_workers_are_replaced(switcher: Switcher) -> None:
    two_standby(switcher)
    before, server = pids(switcher, "standby"), server_of(switcher)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert switcher.infer("chain", {"x": X})["output"].shape == (1, 64)
    two_standby(switcher)
    assert not set(before) & set(pids(switcher, "standby"))
    assert server_of(switcher) == server


def test_a_killed_server_of_workers_and_its_killed_successor_are_replaced(
    switcher: Switcher,
) -> None:
    two_standby(switcher)
    before, server = pids(switcher, "standby"), server_of(switcher)
    future = switcher.submit("slow", slow_inputs(4.0))
    eventually(lambda: bool(pids(switcher, "running")))
    os.kill(server, signal.SIGKILL)
    eventually(lambda: bool(pids(switcher, "starting")))
    (successor,) = pids(switcher, "starting")
    os.kill(successor, signal.SIGKILL)
    assert future.result(WAIT_S).outputs["output"].shape == (1, 8)
    assert switcher.infer("chain", {"x": X})["output"].shape == (1, 64)
    two_standby(switcher)
    assert not set(before) & set(pids(switcher, "standby"))
    assert server_of(switcher) not in (server, successor)


def test_workers_that_start_later_run_the_code_that_was_read(
    switcher: Switcher, store: ModelStore, tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    (tmp_path / "own_part.py").write_text("def scale(): return 2.0\n")
    file.write_text(
        "import torch, own_part\n"
        "class Own(torch.nn.Module):\n"
        "    def forward(self, x): return own_part.scale() * x\n"
    )
    store.add("own", f"{file}:Own", inputs={"x": X})
    switcher.load("own", timeout_s=WAIT_S)
    file.write_text("raise SystemExit\n")
    (tmp_path / "own_part.py").write_text("def scale(): return 3.0\n")
    two_standby(switcher)
    for pid in (*pids(switcher, "standby"), server_of(switcher)):
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid: pid not in pids(switcher, "standby"))  # type: ignore[misc]
        assert torch.equal(switcher.infer("own", {"x": X})["output"], 2.0 * X)
    switcher.unload("own")
    store.remove("own")


def test_a_request_that_kills_every_worker_ends_in_an_error(switcher: Switcher) -> None:
    for what, reason in ((2, "SIGKILL"), (3, "SIGSEGV; does the model write to its parameters")):
        two_standby(switcher)
        with pytest.raises(
            PeerLostError, match=f"{reason}.* while it ran model 'faulty'; tried 2 times"
        ):
            switcher.infer("faulty", {"x": torch.ones(1, 4), "what": torch.tensor(what)})
    fine = switcher.infer("faulty", {"x": torch.ones(1, 4), "what": torch.tensor(0)})
    assert fine["output"].shape == (1, 4)


def test_a_model_that_kills_whoever_builds_it_fails_to_load(
    switcher: Switcher, store: ModelStore
) -> None:
    inputs = {"x": (torch.float32, (-1, 8)), "seconds": (torch.float32, ())}
    store.add("lethal", models.lethal, kwargs={"builder": os.getpid()}, inputs=inputs)
    with pytest.raises(PeerLostError, match="SIGKILL while it built model 'lethal'"):
        switcher.load("lethal", timeout_s=WAIT_S)
    with pytest.raises(PeerLostError, match="while it built"):
        switcher.infer("lethal", slow_inputs(0.0))
    switcher.unload("lethal")
    store.remove("lethal")
    assert switcher.infer("chain", {"x": X})["output"].shape == (1, 64)


def kill_while_loading(switcher: Switcher) -> bool:
    """Kill the standby workers, then one of the next that is building models; return False if these
    were ready before one was seen building.
    """
    two_standby(switcher)
    before = pids(switcher, "standby")
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    while True:
        states = {worker["pid"]: worker["state"] for worker in switcher.status()["workers"]}
        for pid, state in states.items():
            if state == "loading":
                os.kill(pid, signal.SIGKILL)
                return True
        if list(states.values()) == ["standby"] * 2 and states.keys().isdisjoint(before):
            return False
        time.sleep(0.001)


def test_builds_that_are_killed_and_then_succeed_are_forgotten(
    switcher: Switcher, store: ModelStore
) -> None:
    kills = 0
    while kills < 3:  # from outside, with recovery between them
        kills += kill_while_loading(switcher)
        assert switcher.infer("chain", {"x": X})["output"].shape == (1, 64)
        assert all(switcher.is_ready(name) for name in store.names())


def test_a_model_whose_later_builds_kill_their_workers_fails_alone(
    store: ModelStore, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    inputs = {"x": (torch.float32, (-1, 8)), "seconds": (torch.float32, ())}
    store.add("brittle", models.brittle, kwargs={"broken": str(broken)}, inputs=inputs)
    with Switcher(
        store, arena_bytes=600 << 10, threads=1, workers=1, start_timeout_s=WAIT_S
    ) as made:
        for name in ("brittle", "slow"):
            made.load(name, timeout_s=WAIT_S)
        broken.touch()
        os.kill(made.status()["workers"][0]["pid"], signal.SIGKILL)
        with pytest.raises(PeerLostError, match="SIGKILL while it built model 'brittle'"):
            made.submit("brittle", slow_inputs(0.0)).result(WAIT_S)
        assert made.submit("slow", slow_inputs(0.0)).result(WAIT_S).version == 1
        assert not made.is_ready("brittle") and made.status()["worker_deaths"] >= 3
        broken.unlink()
        made.load("brittle", timeout_s=WAIT_S)
        assert made.infer("brittle", slow_inputs(0.0))["output"].shape == (1, 8)
    store.remove("brittle")


def test_workers_that_do_not_start_are_tried_again(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Switcher(
        store, arena_bytes=600 << 10, threads=1, workers=1, start_timeout_s=WAIT_S
    ) as made:
        made.load("slow", timeout_s=WAIT_S)
        with monkeypatch.context() as patch:
            program = [sys.executable, "-c", "import sys; sys.exit(7)"]
            patch.setattr(_fork_server, "PROGRAM", program)
            (before,) = pids(made, "standby")
            os.kill(server_of(made), signal.SIGKILL)
            eventually(lambda: before not in pids(made, "standby"))
            with pytest.raises(UnavailableError, match=r"3 workers did not start.*exit code 7"):
                made.infer("slow", slow_inputs(0.0))
            with pytest.raises(UnavailableError, match=r"workers did not start.*exit code 7"):
                made.load("chain")
            for name in ("slow", "chain"):
                assert not made.is_ready(name) and status_of(made, name)["state"] == "failed"
        eventually(lambda: bool(pids(made, "standby")))
        assert made.is_ready("slow") and not made.is_ready("chain")
        assert made.infer("slow", slow_inputs(0.0))["output"].shape == (1, 8)
        made.load("chain", timeout_s=WAIT_S)
        assert made.is_ready("chain")


def test_a_factory_that_hangs_ends_alone(store: ModelStore) -> None:
    with Switcher(
        store, arena_bytes=600 << 10, threads=1, workers=2, start_timeout_s=WAIT_S
    ) as made:
        made.load("slow", timeout_s=WAIT_S)
        two_standby(made)
        inputs = {"x": (torch.float32, (-1, 8)), "seconds": (torch.float32, ())}
        store.add("hanging", models.hanging, kwargs={"builder": os.getpid()}, inputs=inputs)
        try:
            with pytest.raises(OperationTimeoutError, match=r"not done after 0\.1 s"):
                made.load("hanging", timeout_s=0.1)
            eventually(lambda: bool(pids(made, "loading")))
            assert made.infer("slow", slow_inputs(0.0))["output"].shape == (1, 8)
            (stuck,) = pids(made, "loading")
            made.unload("hanging")
            eventually(lambda: stuck not in pids(made, "loading"))
            two_standby(made)
            catalog = made._daemon.catalog
            catalog.options = replace(catalog.options, start_timeout_s=0.5)
            with pytest.raises(
                OperationTimeoutError, match=r"took more than 0\.5 s while it built model 'hanging'"
            ):
                made.load("hanging", timeout_s=WAIT_S)
            assert made.infer("slow", slow_inputs(0.0))["output"].shape == (1, 8)
        finally:
            store.remove("hanging")


def test_with_one_worker_a_model_is_loaded_during_training_and_built_again_for_a_request(
    store: ModelStore, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    inputs = {"x": (torch.float32, (-1, 8)), "seconds": (torch.float32, ())}
    store.add("fragile", models.fragile, kwargs={"broken": str(broken)}, inputs=inputs)
    with Switcher(
        store, arena_bytes=600 << 10, threads=1, workers=1, start_timeout_s=WAIT_S
    ) as made:
        handle = made.train("task", models.Training, kwargs={"pace_s": 0.1}, steps=10**6)
        eventually(lambda: bool(pids(made, "training")))
        made.load("fragile", timeout_s=WAIT_S)
        assert not handle.done and handle.preemptions > 0
        handle.cancel()
        broken.touch()
        os.kill(made.status()["workers"][0]["pid"], signal.SIGKILL)
        with pytest.raises(ModelError, match=r"could not build it: .*cannot be built now"):
            made.infer("fragile", slow_inputs(0.0))
        made.load("slow", timeout_s=WAIT_S)  # the worker serves what it can build
        broken.unlink()
        assert made.infer("fragile", slow_inputs(0.0))["output"].shape == (1, 8)
    store.remove("fragile")


def test_a_large_output_is_served_when_no_descriptor_is_left(
    switcher: Switcher, store: ModelStore
) -> None:
    two_standby(switcher)
    x = torch.ones(1300, 64)
    store.add("rows", models.chain, kwargs={"depth": 1}, inputs={"x": (torch.float32, (-1, 64))})
    switcher.load("rows", timeout_s=WAIT_S)
    two_standby(switcher)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
    try:
        outputs = [switcher.infer("rows", {"x": x})["output"] for _ in range(3)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert switcher.failure is None
    switcher.unload("rows")
    store.remove("rows")


def test_training_survives_the_death_of_its_worker(switcher: Switcher) -> None:
    two_standby(switcher)
    alone = switcher.train("alone", models.Training, steps=30, seed=5).result(WAIT_S)
    kwargs = {"pace_s": 0.15}  # far from its end when it is killed
    handle = switcher.train(
        "killed", models.Training, kwargs=kwargs, steps=30, seed=5, save_every=5
    )
    eventually(lambda: bool(pids(switcher, "training")) and handle.step >= 5)
    os.kill(pids(switcher, "training")[0], signal.SIGKILL)
    state = handle.result(WAIT_S)
    assert all(torch.equal(value, state["model"][key]) for key, value in alone["model"].items())


def test_a_first_run_that_fails_to_copy_fails_the_load(
    switcher: Switcher, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_standby(switcher)
    store.add("unlucky", models.chain, kwargs={"depth": 3}, inputs={"x": X})
    with monkeypatch.context() as patch:
        patch.setattr(switcher._link, "start", broken)
        with pytest.raises(SegmentError, match="the link is down"):
            switcher.load("unlucky", timeout_s=WAIT_S)
    switcher.load("unlucky", timeout_s=WAIT_S)
    assert switcher.infer("unlucky", {"x": X})["output"].shape == (1, 64)
    switcher.unload("unlucky")


def broken(copies: object) -> Callable[[], None]:
    raise SegmentError("the link is down")


def test_unloading_a_model_that_a_standby_builds_kills_nothing(
    switcher: Switcher, store: ModelStore, tmp_path: Path
) -> None:
    held = tmp_path / "held"
    inputs = {"x": (torch.float32, (-1, 8)), "seconds": (torch.float32, ())}
    store.add("patient", models.patient, kwargs={"held": str(held)}, inputs=inputs)
    switcher.load("patient", timeout_s=WAIT_S)
    two_standby(switcher)
    held.touch()
    os.kill(pids(switcher, "standby")[0], signal.SIGKILL)
    eventually(lambda: bool(pids(switcher, "loading")))
    before = switcher.status()
    switcher.unload("patient")
    with pytest.raises(NotFoundError):
        switcher.infer("patient", slow_inputs(0.0))
    assert switcher.infer("slow", slow_inputs(0.0))["output"].shape == (1, 8)
    held.unlink()
    two_standby(switcher)
    after = switcher.status()
    assert after["worker_deaths"] == before["worker_deaths"]
    assert {one["pid"] for one in after["workers"]} == {one["pid"] for one in before["workers"]}
    switcher.load("patient", timeout_s=WAIT_S)
    assert switcher.infer("patient", slow_inputs(0.0))["output"].shape == (1, 8)
    switcher.unload("patient")
    store.remove("patient")


def test_a_model_replaced_while_it_is_profiled_gets_a_profile_of_its_own(
    switcher: Switcher, store: ModelStore
) -> None:
    two_standby(switcher)
    store.add("changing", models.chain, kwargs={"depth": 24}, inputs={"x": X})
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(switcher.load, "changing", timeout_s=WAIT_S)
        eventually(lambda: bool(pids(switcher, "running")))  # its profile waits for a slow copy
        store.add(
            "changing", models.chain, kwargs={"depth": 3}, inputs={"x": X}, seed=7, replace=True
        )
        switcher.load("changing", timeout_s=WAIT_S)
        with pytest.raises(NotFoundError, match="was replaced"):
            first.result()
    torch.manual_seed(7)
    with torch.inference_mode():
        expected = models.chain(depth=3).eval()(X)
    for _ in range(2):
        reply = switcher.submit("changing", {"x": X}).result(WAIT_S)
        assert reply.version == 2
        torch.testing.assert_close(reply.outputs["output"], expected)
    switcher.unload("changing")
    store.remove("changing")


def test_a_run_of_a_replaced_model_is_not_repeated_on_the_new_one(
    switcher: Switcher, store: ModelStore
) -> None:
    two_standby(switcher)
    inputs = {"x": (torch.float32, (-1, 8)), "seconds": (torch.float32, ())}
    store.add("changing", models.slow, inputs=inputs, replace=True)
    switcher.load("changing", timeout_s=WAIT_S)
    two_standby(switcher)
    future = switcher.submit("changing", slow_inputs(4.0))
    eventually(lambda: bool(pids(switcher, "running")))
    (pid,) = pids(switcher, "running")
    os.kill(pid, signal.SIGSTOP)
    version = store.add("changing", models.slow, inputs=inputs, seed=7, replace=True).version
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(switcher.load, "changing", timeout_s=WAIT_S)
        eventually(lambda: status_of(switcher, "changing")["version"] == version)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(PeerLostError, match="while it ran model 'changing'"):
            future.result(WAIT_S)
        load.result(WAIT_S)
    assert switcher.infer("changing", slow_inputs(0.0))["output"].shape == (1, 8)
    switcher.unload("changing")
    store.remove("changing")


def test_a_worker_that_dies_after_its_copy_failed_ends_one_request(
    switcher: Switcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_standby(switcher)
    evict(switcher, "chain")
    stopped: list[int] = []

    def stop_and_fail(copies: object) -> Callable[[], None]:
        stopped.extend(pids(switcher, "running"))
        os.kill(stopped[0], signal.SIGSTOP)
        return broken(copies)

    with monkeypatch.context() as patch:
        patch.setattr(switcher._link, "start", stop_and_fail)
        with pytest.raises(SegmentError, match="the link is down"):
            switcher.submit("chain", {"x": X}).result(WAIT_S)
    os.kill(stopped[0], signal.SIGKILL)
    two_standby(switcher)
    assert switcher.infer("chain", {"x": X})["output"].shape == (1, 64)
    assert switcher.failure is None


def test_a_copy_that_fails_is_an_error_and_the_next_request_is_served(
    switcher: Switcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_standby(switcher)
    evict(switcher, "chain")

    with monkeypatch.context() as patch:
        patch.setattr(switcher._link, "start", broken)
        with pytest.raises(SegmentError, match="the link is down"):
            switcher.infer("chain", {"x": X})
    assert switcher.infer("chain", {"x": X})["output"].shape == (1, 64)
    assert pids(switcher, "standby")


def test_an_error_in_the_daemon_ends_every_wait(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: failures.append(args.exc_value))
    with Switcher(store, arena_bytes=600 << 10, threads=1, workers=1) as switcher:

        def fail() -> float:
            raise ValueError("a mistake in the daemon")

        monkeypatch.setattr(switcher._daemon.owner, "decide", fail)
        # Calls before the end get the reason, later ones that the switcher is closed.
        message = r"failed: ValueError: a mistake in the daemon|the switcher is closed"
        with pytest.raises(UnavailableError, match=message):
            switcher.load("slow", timeout_s=WAIT_S)
        with pytest.raises(UnavailableError, match=message):
            switcher.infer("slow", slow_inputs(0.0))
        eventually(lambda: bool(failures))
        assert "a mistake in the daemon" in str(switcher.failure)
        assert not switcher.is_ready("slow")
    assert [str(error) for error in failures] == ["a mistake in the daemon"]


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
import sys, threading, time, torch
from torchrelay.switching import ModelStore, Switcher
models, state = sys.argv[1], sys.argv[2]

def in_state(name):
    return any(worker["state"] == name for worker in switcher.status()["workers"])

def until(condition):
    while not condition():
        time.sleep(0.01)

with ModelStore() as store:
    inputs = {"x": (torch.float32, (-1, 8)), "seconds": (torch.float32, ())}
    store.add("slow", models + ":slow", inputs=inputs)
    inputs = {"x": (torch.float32, (1, 64))}
    store.add("chain", models + ":chain", kwargs={"depth": 30}, inputs=inputs)
    with Switcher(
        store, arena_bytes=1 << 20, threads=1, workers=1, start_timeout_s=300
    ) as switcher:
        if state == "copying":
            switcher._link._bytes_per_s = 1e3  # half a megabyte takes minutes
            threading.Thread(target=switcher.load, args=["chain"], daemon=True).start()
            until(lambda: in_state("running"))
        if state == "training":
            switcher.train("task", models + ":Training", kwargs={"pace_s": 600.0}, steps=2)
            until(lambda: in_state("training"))
        if state == "running":
            switcher.load("slow")
            switcher.submit("slow", {"x": torch.ones(1, 8), "seconds": torch.tensor(600.0)})
            until(lambda: in_state("running"))
        print(*[worker["pid"] for worker in switcher.status()["workers"]], flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("state", ["starting", "running", "copying", "training"])
def test_a_killed_daemon_leaves_no_worker(state: str) -> None:
    daemon = subprocess.Popen(
        [preloaded.python(), "-c", DAEMON, str(MODELS), state], stdout=subprocess.PIPE, text=True
    )
    assert daemon.stdout is not None
    workers = [int(pid) for pid in daemon.stdout.readline().split()]
    daemon.kill()
    daemon.communicate()
    assert len(workers) == 1
    eventually(lambda: not any(_alive(pid) for pid in workers))


def _alive(pid: int) -> bool:
    """Whether the process runs; one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

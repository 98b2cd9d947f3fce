"""Asynchronous saves: the state may change at once, memory is used again, and crashes lose no
checkpoint.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchrelay._helper import Channel
from torchrelay.checkpoint import Keep, async_save, latest, load, save, verify
from torchrelay.checkpoint.engine._background import saver
from torchrelay.checkpoint.storage._catalog import listing
from torchrelay.errors import (
    ArgumentError,
    ConfigError,
    OperationTimeoutError,
    PeerLostError,
    StorageError,
)
from torchrelay.world import World
from waiting import eventually

if TYPE_CHECKING:
    from ranks import RunProcesses


@pytest.fixture(autouse=True)
def no_writer_left() -> Iterator[None]:
    yield
    saver.close()


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(1000), "t": torch.zeros(4, 3)}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a thread begins to wait for the writer process."""
    waits, receive = threading.Event(), Channel.receive

    def received(self: Channel, timeout_s: float | None = None) -> Any:
        waits.set()
        return receive(self, timeout_s)

    monkeypatch.setattr(Channel, "receive", received)
    return waits


class _Acting(dict[str, Any]):
    """A state that does something while a save of it begins."""

    def __init__(self, values: dict[str, Any], action: Callable[[], object]) -> None:
        super().__init__(values)
        self._action = action

    def items(self) -> Any:
        self._action()
        return super().items()


def _loaded(path: str | Path, count: int = 1000) -> float:
    state = {"w": torch.zeros(count), "t": torch.zeros(4, 3)}
    load(state, path)
    assert torch.equal(state["w"], torch.full((count,), float(state["w"][0])))
    return float(state["w"][0])


def test_a_state_may_change_as_soon_as_the_call_returns(tmp_path: Path) -> None:
    """As an optimizer step does; each save uses the same memory and the same process."""
    state = {"w": torch.zeros(1000), "t": torch.arange(12.0).reshape(3, 4).t()}
    handles, writers = [], set()
    for step in range(4):
        handles.append(async_save(state, tmp_path / f"step-{step}", keep=2))
        state["w"].add_(1)
        assert saver.helper is not None
        writers.add((saver.helper.pid, saver.staging.fd))
    assert len(writers) == 1
    assert handles[3].result(60) == str(tmp_path / "step-3")
    assert all(handle.done() for handle in handles)
    assert [_loaded(tmp_path / f"step-{step}") for step in (2, 3)] == [2.0, 3.0]
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3"]
    assert sorted(os.listdir(tmp_path / "step-3")) == [
        "data-00000-00000.safetensors",
        "manifest.json",
    ]
    verify(tmp_path / "step-3")

    with pytest.raises(ArgumentError, match=r"needs .* bytes, and max_staging_bytes is 100"):
        async_save(state, tmp_path / "big", max_staging_bytes=100)
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3"]


def test_a_save_of_the_same_layout_uses_the_plan_of_the_last_one(tmp_path: Path) -> None:
    """Also with tensors at other addresses and with other values, but not with other ties."""
    tied = torch.zeros(5)
    states: list[dict[str, Any]] = [
        {"w": torch.full((7, 3), 1.0), "a": tied, "b": tied, "x": {"step": 1}},
        {"w": torch.full((7, 3), 2.0), "a": tied + 2, "b": tied + 3, "x": {"step": 2}},
        {"w": torch.full((7, 3), 3.0), "a": tied + 4, "b": tied + 5, "x": {"step": 3}},
        {"w": torch.full((3, 7), 4.0), "a": tied + 6, "b": tied + 7, "x": {"step": 4}},
        {"w": torch.full((3, 7), 5.0), "a": tied + 8, "b": tied + 9, "x": {"epoch": 5}},
    ]
    save({**states[0], "x": {"step": 0}}, tmp_path / "first")  # its plan is used, not its values
    plans = []
    for number, state in enumerate(states):
        async_save(state, tmp_path / f"x{number}").result(60)
        plans.append(saver._sent)
    assert [one is other for one, other in itertools.pairwise(plans)] == [False, True, False, False]
    for number, state in enumerate(states):
        assert verify(tmp_path / f"x{number}")
        found: dict[str, Any] = {key: torch.zeros_like(state[key]) for key in "wab"}
        found["x"] = dict.fromkeys(state["x"])
        load(found, tmp_path / f"x{number}")
        assert repr(found) == repr(state)


def _memory(pid: int, what: str) -> int:
    """A figure in bytes of /proc/PID/status."""
    line = next(
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith(what)
    )
    return int(line.split()[1]) << 10


def test_many_saves_need_the_memory_of_one(tmp_path: Path) -> None:
    """After the first save neither process takes more memory, not even for a moment, nor files."""
    state = {"w": torch.zeros(16 << 20), "t": torch.zeros(3000, 1000).t()}
    size_bytes = state["w"].nbytes

    def saved(step: int) -> None:
        state["w"].fill_(step)
        async_save(state, tmp_path / f"step-{step}", keep=1).result(60)

    def files(pid: int) -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    for step in range(2):
        saved(step)
    assert saver.helper is not None
    both = (os.getpid(), saver.helper.pid)
    for pid in both:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak starts again from what it is now
    before = {pid: (_memory(pid, "VmRSS"), files(pid)) for pid in both}
    assert before[saver.helper.pid][0] > size_bytes  # the staging memory is part of the figure
    for step in range(2, 12):
        saved(step)
    for pid in both:
        resident, opened = before[pid]
        assert _memory(pid, "VmHWM") < resident + size_bytes // 4
        assert files(pid) <= opened  # what earlier tests left may be closed meanwhile
    verify(tmp_path / "step-11")


def test_errors_surface_at_result_or_at_the_next_save(
    tmp_path: Path, state: dict[str, Any]
) -> None:
    async_save(state, tmp_path / "good").result(60)
    assert saver.helper is not None

    os.kill(saver.helper.pid, signal.SIGSTOP)  # so that it is killed before it has written
    handle = async_save(state, tmp_path / "lost")
    with pytest.raises(OperationTimeoutError, match="it goes on"):
        handle.result(0.05)
    with pytest.raises(StorageError, match="another save to this path is in progress"):
        save(state, tmp_path / "lost")
    os.kill(saver.helper.pid, signal.SIGKILL)
    with pytest.raises(PeerLostError, match="writer process has died") as caught:
        async_save(state, tmp_path / "next")
    assert caught.value.ranks == (0,)
    with pytest.raises(PeerLostError):
        handle.result()
    assert latest(tmp_path).endswith("good")

    async_save(state, tmp_path / "next").result(60)  # a new writer, and what was left is gone
    assert sorted(os.listdir(tmp_path)) == ["good", "next"]


def _stopped_writer() -> int:
    assert saver.helper is not None
    os.kill(saver.helper.pid, signal.SIGSTOP)
    return saver.helper.pid


@pytest.mark.parametrize("way", ["result", "done"])
def test_a_writer_that_is_left_finishes_a_save_that_is_not_reported_as_committed(
    tmp_path: Path, state: dict[str, Any], waits: threading.Event, way: str
) -> None:
    async_save(state, tmp_path / "step-0").result(60)
    pid = _stopped_writer()
    handle = async_save(state, tmp_path / "step-1")

    def wait() -> None:
        with suppress(PeerLostError):
            handle.result() if way == "result" else eventually(handle.done)
        os.kill(pid, signal.SIGCONT)

    waits.clear()
    waiting = threading.Thread(target=wait)
    waiting.start()
    waits.wait()
    saver.close()  # as at exit
    waiting.join()
    assert handle.done()
    for _ in range(2):
        with pytest.raises(PeerLostError, match="was left before it reported"):
            handle.result()
    assert _loaded(tmp_path / "step-1") == 0.0


def test_a_save_in_another_thread_waits_for_its_turn(tmp_path: Path, state: dict[str, Any]) -> None:
    """It does not stage its tensors where those of a save that is not written yet are."""
    async_save(state, tmp_path / "step-0").result(60)
    pid = _stopped_writer()
    handles: list[Any] = []
    other = threading.Thread(
        target=lambda: handles.append(async_save({"w": torch.ones(1000)}, tmp_path / "step-1"))
    )

    def meanwhile() -> None:
        other.start()
        other.join(0.3)  # it does not end

    async_save(_Acting({"w": torch.zeros(1000)}, meanwhile), tmp_path / "step-2")
    os.kill(pid, signal.SIGCONT)
    other.join()
    handles[0].result(60)
    for step, value in ((1, 1.0), (2, 0.0)):
        found = {"w": torch.full((1000,), -1.0)}
        load(found, tmp_path / f"step-{step}")
        assert torch.equal(found["w"], torch.full((1000,), value))


def test_a_save_inside_a_save_is_refused(tmp_path: Path, state: dict[str, Any]) -> None:
    """As by the handler of a signal."""

    def inside() -> None:
        with pytest.raises(ArgumentError, match="has not returned in this thread"):
            async_save(state, tmp_path / "inside")

    async_save(_Acting(state, inside), tmp_path / "step").result(60)
    assert _loaded(tmp_path / "step") == 0.0 and os.listdir(tmp_path) == ["step"]


def test_a_wait_inside_a_wait_is_refused(
    tmp_path: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the handler of a signal, which would wait for the thread that it interrupts."""
    handle = async_save(state, tmp_path / "step")
    receive = Channel.receive

    def interrupted(self: Channel, timeout_s: float | None = None) -> Any:
        monkeypatch.undo()
        assert not handle.done()
        for wait in (lambda: handle.result(1), lambda: async_save(state, tmp_path / "inside")):
            with pytest.raises(ArgumentError, match="this thread is waiting for the save already"):
                wait()
        return receive(self, timeout_s)

    monkeypatch.setattr(Channel, "receive", interrupted)
    assert handle.result(60) == str(tmp_path / "step")
    assert handle.done() and os.listdir(tmp_path) == ["step"]


def test_what_is_staged_stays_after_a_wait_that_was_interrupted(
    tmp_path: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async_save(state, tmp_path / "step-0").result(60)
    pid = _stopped_writer()
    async_save(state, tmp_path / "step-1")

    def interrupted(self: Channel, timeout_s: float | None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Channel, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            async_save(state, tmp_path / "step-2")
    threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()
    state["w"].fill_(1)
    async_save(state, tmp_path / "step-3").result(60)
    assert [_loaded(tmp_path / f"step-{step}") for step in (1, 3)] == [0.0, 1.0]


def test_a_save_that_cannot_be_started_does_not_block_the_next_one(
    tmp_path: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("TORCHRELAY_CHECKPOINT_COMMIT_TIMEOUT_S", "soon")
        with pytest.raises(ConfigError, match="COMMIT_TIMEOUT_S"):
            async_save(state, tmp_path / "step-0")

    def full(*args: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Channel, "send", full)
        with pytest.raises(StorageError, match=r"starting to save .*step-0: .*ulimit -n"):
            async_save(state, tmp_path / "step-0")
    names = {"best": 0}.keys()  # which cannot be pickled
    async_save(state, tmp_path / "step-0", keep=Keep(names=names)).result(60)
    assert os.listdir(tmp_path) == ["step-0"] and _loaded(tmp_path / "step-0") == 0.0


def test_a_thread_that_waits_does_not_hold_up_another(
    tmp_path: Path, state: dict[str, Any], waits: threading.Event
) -> None:
    async_save(state, tmp_path / "step-0").result(60)
    pid = _stopped_writer()
    handle = async_save(state, tmp_path / "step-1")
    waits.clear()
    waiting = threading.Thread(target=handle.result)
    waiting.start()
    waits.wait()
    assert not handle.done()
    with pytest.raises(OperationTimeoutError):
        handle.result(0.05)
    os.kill(pid, signal.SIGCONT)
    waiting.join()
    assert handle.done()


def test_the_writer_process_imports_no_torch() -> None:
    code = "import sys, torchrelay.checkpoint.engine._writer_process; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "False"


def _start(world: World) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=world.connect(), rank=world.rank, world_size=world.size)


@pytest.mark.processes(2)
def test_ranks_do_not_wait_for_a_save_in_another_thread_of_one(
    tmp_path: Path, world: World
) -> None:
    _start(world)
    state = {"w": torch.ones(1000), "t": torch.zeros(4, 3)}
    has_begun, may_end = threading.Event(), threading.Event()

    def begun() -> None:
        has_begun.set()
        may_end.wait()

    alone = threading.Thread(
        target=async_save,
        args=(_Acting(state, begun), tmp_path / "alone"),
        kwargs={"no_dist": True},
        daemon=True,
    )
    if world.rank == 1:
        alone.start()
        has_begun.wait()
    with pytest.raises(ArgumentError, match="let one thread start one save at a time"):
        async_save(state, tmp_path / "both")
    if world.rank == 1:
        may_end.set()
        alone.join()
    async_save(state, tmp_path / "both").result(60)
    saver.close()
    assert {_loaded(tmp_path / name) for name in ("alone", "both")} == {1.0}


@pytest.mark.processes(2)
def test_each_rank_says_why_its_save_failed(tmp_path: Path, world: World) -> None:
    import torch.distributed as dist

    _start(world)
    state = {f"w{world.rank}": torch.ones(1000)}
    async_save(state, tmp_path / "good").result(60)
    if world.rank == 1:
        pid = _stopped_writer()
    handle = async_save(state, tmp_path / "lost")
    if world.rank == 1:
        (tmp_path / ".lost.torchrelay-saving" / "data-00001-00000.safetensors").touch()
        os.kill(pid, signal.SIGCONT)
    with pytest.raises(StorageError, match=r"rank 1: creating .*data-00001-00000"):
        handle.result(60)

    # A coordinator that takes longer than another rank waits.
    if world.rank == 0:
        pid = _stopped_writer()
    else:
        os.environ["TORCHRELAY_CHECKPOINT_COMMIT_TIMEOUT_S"] = "0.2"
    handle = async_save(state, tmp_path / "late")
    if world.rank == 1:
        with pytest.raises(OperationTimeoutError, match=r"ranks \[0\] .* ls .*' lists it"):
            handle.result(60)
    dist.barrier()
    if world.rank == 0:
        os.kill(pid, signal.SIGCONT)
        handle.result(60)
    dist.barrier()
    assert "late" in [found.name for found in listing(tmp_path)]
    saver.close()


@pytest.mark.processes(2)
def test_an_error_comes_before_that_another_rank_is_missing(tmp_path: Path, world: World) -> None:
    """As on a disk that is too full for the notes of other ranks, too."""
    import torch.distributed as dist

    _start(world)
    state = {f"w{world.rank}": torch.ones(1000)}
    async_save(state, tmp_path / "good").result(60)
    pid = _stopped_writer()
    handle = async_save(state, tmp_path / "full")
    dist.barrier()
    if world.rank == 0:
        folder = tmp_path / ".full.torchrelay-saving"
        (folder / "data-00000-00000.safetensors").touch()
        (folder / "torchrelay-part-00001.json").write_text("{")
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(StorageError, match=r"rank 0: creating .*data-00000-00000"):
            handle.result(60)
    dist.barrier()
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(StorageError):
        handle.result(60)
    saver.close()


def _save_and_die(world: World, folder: str) -> None:
    import torch.distributed as dist

    _start(world)
    state = {"w": torch.full((200_000,), 7.0), "t": torch.zeros(4, 3)}
    async_save(state, f"{folder}/step")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_trainers_that_are_killed_have_saved_what_they_staged(
    tmp_path: Path, run_processes: RunProcesses
) -> None:
    results = run_processes(_save_and_die, 2, folder=str(tmp_path))
    assert [result.exitcode for result in results] == [-signal.SIGKILL] * 2
    deadline = time.monotonic() + 90
    while not (tmp_path / "step").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _loaded(tmp_path / "step", 200_000) == 7.0
    verify(tmp_path / "step")
    assert len(os.listdir(tmp_path / "step")) == 3  # two data files and the manifest
    while os.listdir(tmp_path) != ["step"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert os.listdir(tmp_path) == ["step"]


def _lose_a_writer(world: World, folder: str) -> str:
    import torch.distributed as dist

    _start(world)
    state = {"w": torch.full((1000,), 1.0), "t": torch.zeros(4, 3)}
    async_save(state, f"{folder}/good").result(60)
    assert saver.helper is not None
    if world.rank == 1:
        os.kill(saver.helper.pid, signal.SIGSTOP)
    state["w"].add_(1)
    os.environ["TORCHRELAY_CHECKPOINT_COMMIT_TIMEOUT_S"] = "2"  # of this save only
    handle = async_save(state, f"{folder}/lost")
    del os.environ["TORCHRELAY_CHECKPOINT_COMMIT_TIMEOUT_S"]
    if world.rank == 1:
        os.kill(saver.helper.pid, signal.SIGKILL)
    try:
        handle.result(60)
    except (PeerLostError, OperationTimeoutError) as error:
        failed = f"{type(error).__name__} {error.ranks} {error}"
    dist.barrier()
    state["w"].add_(1)
    async_save(state, f"{folder}/next").result(60)
    saver.close()
    return failed


def test_a_writer_that_is_lost_ends_the_save_on_every_rank(
    tmp_path: Path, run_processes: RunProcesses
) -> None:
    results = run_processes(_lose_a_writer, 2, folder=str(tmp_path))
    assert all(result.ok for result in results), [result.error for result in results]
    assert results[0].value.startswith("OperationTimeoutError") and "ranks [1]" in results[0].value
    assert results[1].value.startswith("PeerLostError (1,)")
    assert sorted(os.listdir(tmp_path)) == ["good", "next"]
    assert _loaded(tmp_path / "good") == 1.0 and _loaded(tmp_path / "next") == 3.0


def _save_without_a_shared_folder(world: World, folder: str, is_async: bool) -> list[str]:
    import torch.distributed as dist

    _start(world)
    errors = []
    # Each rank has a disk of its own, or another path: the second rank's folder is not the first's.
    Path(f"{folder}/{world.rank}").mkdir()
    for name in ("step", "stale"):
        if world.rank == 1 and name == "stale":  # what an interrupted save has left
            Path(f"{folder}/1/.stale.torchrelay-saving").mkdir()
            Path(f"{folder}/1/.stale.torchrelay-lock").write_bytes(b"0123456789abcdef")
        write = async_save if is_async else save
        with pytest.raises(StorageError, match="storage that they share") as caught:
            write({f"w{world.rank}": torch.ones(1000)}, f"{folder}/{world.rank}/{name}")
        errors.append(str(caught.value))
        dist.barrier()
    return errors


@pytest.mark.parametrize("is_async", [True, False])
def test_ranks_without_a_shared_folder_learn_the_cause_at_once(
    tmp_path: Path, run_processes: RunProcesses, is_async: bool
) -> None:
    environ = {"TORCHRELAY_CHECKPOINT_COMMIT_TIMEOUT_S": "600"}
    results = run_processes(
        _save_without_a_shared_folder, 2, environ=environ, folder=str(tmp_path), is_async=is_async
    )
    assert all(result.ok for result in results), [result.error for result in results]
    assert all("rank 1: " in error for error in results[0].value)
    assert all(f"saves to {tmp_path}/1/" in error for error in results[0].value)
    assert os.listdir(tmp_path / "0") == []

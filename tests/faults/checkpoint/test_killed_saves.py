"""Savers that are killed at any moment: the last committed checkpoint loads, a torn one is never
taken for whole.

The moments are those of the saver's own system calls, counted, so that a run visits each place
where a kill makes a difference, and the same ones every time. ``benchmarks/soak_checkpoint.py``
kills at random times, at length.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchrelay import _helper
from torchrelay.checkpoint import async_save, latest, load, save, verify
from torchrelay.checkpoint.engine import _background, _writer_process
from torchrelay.checkpoint.engine._background import Staging
from torchrelay.checkpoint.storage._catalog import Keep, retain
from torchrelay.errors import PeerLostError
from torchrelay.world import World

if TYPE_CHECKING:
    from ranks import RunProcesses

_KILLS = 50
# What a save does to the disk, in the modules that do it.
_CALLS = (
    "open",
    "pwrite",
    "fsync",
    "rename",
    "mkdir",
    "unlink",
    "close",
    "rmdir",
    "listdir",
)


def _state(step: int) -> dict[str, Any]:
    return {"step": step, "w": torch.full((300, 100), float(step)), "v": torch.full((7,), step)}


@contextmanager
def _death_at(moment: int) -> Iterator[None]:
    """The ``moment``-th call inside that touches the disk is the process's last."""
    left = moment

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    real = {name: getattr(os, name) for name in _CALLS}
    for name, function in real.items():
        setattr(os, name, counted(function))
    yield
    for name, function in real.items():
        setattr(os, name, function)


def _saver(world: World, path: str, step: int, moment: int) -> None:
    with _death_at(moment):
        save(_state(step), path, keep=None if path.endswith("last") else 2, threads=1)


def _check(folder: Path, at_least: int, at_most: int) -> int:
    """What ``latest`` names is whole and verifies; its step."""
    path = latest(folder)
    verify(path)
    state: dict[str, Any] = {
        "step": None,
        "w": torch.zeros(300, 100),
        "v": torch.zeros(7, dtype=torch.int64),
    }
    load(state, path)
    step = state["step"]
    assert at_least <= step <= at_most
    assert torch.equal(state["w"], _state(step)["w"]) and torch.equal(state["v"], _state(step)["v"])
    return int(step)


class _ForkedWriter:
    """In place of the writer's ``Popen``: the same program in a fork, whose ``moment``-th call is
    its last.
    """

    def __init__(self, moment: int, fd: int) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.closerange(3, fd)  # among them the trainer's end of the channel
            os.closerange(fd + 1, 1024)
            with _death_at(moment):
                _writer_process.main(fd)
            os._exit(0)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> int | None:
        if timeout_s is not None:
            return self.poll()
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _async_saver(world: World, path: str, step: int, moment: int) -> bool:
    """Whether the save was committed; the writer process is killed, not the trainer."""
    _helper.subprocess.Popen = lambda _, pass_fds, **__: _ForkedWriter(moment, pass_fds[0])  # type: ignore[attr-defined]
    try:
        async_save(_state(step), path, keep=2, threads=1).result(60)
    except PeerLostError:
        return False
    finally:
        _background.saver.close()
    return True


@pytest.mark.timeout(300)
def test_a_writer_process_killed_at_every_kind_of_moment(
    tmp_path: Path, run_processes: RunProcesses
) -> None:
    """What a save that is lost had committed or not, and the trainer is told."""
    save(_state(0), tmp_path / "step-0")
    before, committed = 0, 0
    for step, moment in enumerate([*range(2, 42, 4), 1000], start=1):
        (result,) = run_processes(
            _async_saver, 1, path=str(tmp_path / f"step-{step}"), step=step, moment=moment
        )
        assert result.ok, result.error
        before = _check(tmp_path, step if result.value else before, step)
        committed += result.value
    assert 1 <= committed < 11  # the last is not killed, and others were
    save(_state(99), tmp_path / "step-99", keep=2)
    assert _check(tmp_path, 99, 99) == 99
    assert (
        len(os.listdir(tmp_path)) == 2
        and not list(tmp_path.rglob(".*"))
        and not list(tmp_path.rglob("torchrelay-*"))
    )


def _retire(world: World, path: str, moment: int) -> None:
    with _death_at(moment):
        retain(path, Keep(1))


def test_retention_killed_at_each_of_its_moments(
    tmp_path: Path, run_processes: RunProcesses
) -> None:
    for moment in range(1, 200, 3):
        for step in range(4):
            save(_state(step), tmp_path / f"step-{step}", fsync=False)
        (result,) = run_processes(_retire, 1, path=str(tmp_path / "step-3"), moment=moment)
        assert result.ok or result.exitcode == -signal.SIGKILL, result.error
        assert _check(tmp_path, 3, 3) == 3
        for left in tmp_path.glob("step-*"):  # removed as a whole or not at all
            verify(left)
        if result.ok:
            break
    assert moment > 10 and os.listdir(tmp_path) == ["step-3"]  # what killed passes left is gone too


@pytest.mark.parametrize("path", ["step-{}", "last"])
@pytest.mark.timeout(300)
def test_killed_at_every_kind_of_moment(
    tmp_path: Path, path: str, run_processes: RunProcesses
) -> None:
    """Saves under new names with retention, and saves that replace one another."""
    random_moments = random.Random(0)
    save(_state(0), tmp_path / path.format(0))
    before, kills, most = 0, 0, 0
    for step in range(1, _KILLS // 2 + 1):
        moment = random_moments.randint(1, 90)
        (result,) = run_processes(
            _saver, 1, path=str(tmp_path / path.format(step)), step=step, moment=moment
        )
        assert result.ok or result.exitcode == -signal.SIGKILL, result.error
        kills += not result.ok
        before = _check(tmp_path, before, step)
        most = max(most, before)
    assert kills > _KILLS // 4 and most > 0  # both ends were seen
    save(_state(99), tmp_path / path.format(99), keep=2 if "{}" in path else None)
    assert _check(tmp_path, 99, 99) == 99
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert not list(tmp_path.rglob(".torchrelay-*"))
    assert len(os.listdir(tmp_path)) == (2 if "{}" in path else 1)


def test_a_writer_that_dies_after_the_copy_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Staging.copy

    def copy_and_kill(self: Any, *args: Any) -> Any:
        copied = copy(self, *args)
        helper = _background.saver.helper
        assert helper is not None
        helper.kill()
        return copied

    monkeypatch.setattr(Staging, "copy", copy_and_kill)
    handle = async_save(_state(0), tmp_path / "step-0")
    with pytest.raises(PeerLostError, match="rank 0: the writer process has died"):
        handle.result(60)
    monkeypatch.undo()
    async_save(_state(1), tmp_path / "step-1").result(60)
    verify(tmp_path / "step-1")
    assert latest(tmp_path) == str(tmp_path / "step-1")
    _background.saver.close()

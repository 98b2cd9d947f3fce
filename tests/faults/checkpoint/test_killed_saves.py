"""Savers that are killed at any moment: the last committed checkpoint loads, a torn one is never taken for whole.

The moments are those of the saver's own system calls, counted, so that a run visits each place where a kill makes
a difference, and the same ones every time. ``benchmarks/soak_checkpoint.py`` kills at random times, at length.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrelay.checkpoint import latest, load, save, verify
from torchrelay.world import World

_KILLS = 50
# What a save does to the disk, in the modules that do it.
_CALLS = ("open", "pwrite", "fsync", "rename", "link", "mkdir", "unlink", "close", "rmdir", "listdir")


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
        save(_state(step), path, keep=2, threads=1)


def _check(folder: Path, at_least: int, at_most: int) -> int:
    """What ``latest`` names is whole and verifies; its step."""
    path = latest(folder)
    verify(path)
    state: dict[str, Any] = {"step": None, "w": torch.zeros(300, 100), "v": torch.zeros(7, dtype=torch.int64)}
    load(state, path)
    step = state["step"]
    assert at_least <= step <= at_most
    assert torch.equal(state["w"], _state(step)["w"]) and torch.equal(state["v"], _state(step)["v"])
    return int(step)


@pytest.mark.parametrize("path", ["step-{}", "last"])
@pytest.mark.timeout(300)
def test_killed_at_every_kind_of_moment(tmp_path: Path, path: str, run_processes: Any) -> None:
    """Saves under new names with retention, and saves that replace one another."""
    random_moments = random.Random(0)
    save(_state(0), tmp_path / path.format(0))
    before, kills, most = 0, 0, 0
    for step in range(1, _KILLS // 2 + 1):
        moment = random_moments.randint(1, 45)
        (result,) = run_processes(_saver, 1, path=str(tmp_path / path.format(step)), step=step, moment=moment)
        assert result.ok or result.exitcode == -signal.SIGKILL, result.error
        kills += not result.ok
        before = _check(tmp_path, before, step)
        most = max(most, before)
    assert kills > _KILLS // 4 and most > 0  # both ends were seen
    save(_state(99), tmp_path / path.format(99), keep=2)
    assert _check(tmp_path, 99, 99) == 99
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert not list(tmp_path.rglob(".lock*"))
    assert len(os.listdir(tmp_path)) == (2 if "{}" in path else 1)

"""Is a committed checkpoint ever lost, or a torn one taken for whole, when savers are killed at random moments?

Savers save one checkpoint after another and are killed (SIGKILL) at a random time: synchronous saves under new names
with retention, saves that replace one another, saves after which many checkpoints are removed at once, asynchronous
saves of which the trainer is killed, and such of which the writer process is. After each kill the newest committed checkpoint must load, verify, and be at least as new as the
one that the saver last reported; after the next save nothing temporary may be left. Exits with an error if not.

``python benchmarks/soak_checkpoint.py`` kills 200 savers in about ten minutes; ``--kills`` makes it shorter.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint import async_save, latest, load, save, verify
from torchrelay.checkpoint._async import _state

MODES = ("new names", "replace", "retention of many", "async, trainer killed", "async, writer killed")
_ELEMENTS = 500_000


def _values(step: int) -> dict[str, Any]:
    return {"step": step, "w": torch.full((_ELEMENTS,), float(step)), "v": torch.full((11,), step)}


def _path(folder: str, mode: str, step: int) -> str:
    return f"{folder}/{'last' if mode == 'replace' else f'step-{step}'}"


def _save_until_killed(folder: str, mode: str, first: int) -> None:
    """The saver: prints the pid to kill, then each step once it is committed."""
    torch.set_num_threads(1)
    victim = os.getpid()
    if mode == "async, writer killed":
        victim = _state.ready().pid
    print(victim, flush=True)
    for step in range(first, first + 10_000):
        if mode.startswith("async"):
            async_save(_values(step), _path(folder, mode, step), keep=2).result()
        else:  # where many are removed at once, most kills fall into the removal
            keep = None if mode == "retention of many" and step % 8 else 2
            save(_values(step), _path(folder, mode, step), keep=keep)
        print(step, flush=True)


def _newest(folder: str) -> int:
    """The step of the newest checkpoint, which must be whole."""
    path = latest(folder)
    verify(path)
    state = {key: torch.zeros_like(value) for key, value in _values(0).items() if key != "step"}
    loaded: dict[str, Any] = {**state, "step": None}
    load(loaded, path)
    step = int(loaded["step"])
    if not all(torch.equal(loaded[key], _values(step)[key]) for key in state):
        raise SystemExit(f"{path}: step {step} does not hold its values")
    return step


def _kill_one(folder: str, mode: str, first: int, after_s: float) -> int:
    """Runs a saver and kills it; the last step that it reported as committed, ``first`` - 1 if none."""
    command = [sys.executable, __file__, "--saver", folder, mode, str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as saver:
        assert saver.stdout is not None
        victim = int(saver.stdout.readline())
        time.sleep(after_s)
        os.kill(victim, signal.SIGKILL)
        reported = [int(line) for line in saver.stdout.read().split()]
    return reported[-1] if reported else first - 1


def _soak_mode(mode: str, kills: int, draws: random.Random) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(_values(0), _path(folder, mode, 0))
        newest = 0
        for _ in range(kills):
            reported = _kill_one(folder, mode, newest + 1, draws.random() * 0.5)
            time.sleep(0.5 if mode == "async, trainer killed" else 0.0)  # its writer goes on
            found = _newest(folder)
            if found < max(newest, reported):
                raise SystemExit(f"{mode}: step {reported} was committed, and the newest is {found}")
            newest = found
        save(_values(newest + 1), _path(folder, mode, newest + 1), keep=2)
        if _newest(folder) != newest + 1:
            raise SystemExit(f"{mode}: the save after the kills is not the newest")
        left = [str(path) for path in Path(folder).rglob("*") if path.name.startswith((".", "part-"))]
        if left or len(os.listdir(folder)) > 2:
            raise SystemExit(f"{mode}: left behind: {left or os.listdir(folder)}")
        print(f"{mode}: {kills} kills, {newest} checkpoints, none lost, none torn, nothing left", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="in all, over five modes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--saver", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.saver:
        folder, mode, first = arguments.saver
        _save_until_killed(folder, mode, int(first))
    for number, mode in enumerate(MODES):
        _soak_mode(mode, max(1, arguments.kills // len(MODES)), random.Random(arguments.seed + number))


if __name__ == "__main__":
    main()

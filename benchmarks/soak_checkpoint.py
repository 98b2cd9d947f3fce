"""Is a committed checkpoint ever lost, or a torn one taken for whole, when savers are killed at
random moments?

Savers save one checkpoint after another and are killed (SIGKILL) at a random time: synchronous
saves under new names with retention, saves that replace one another, saves after which many
checkpoints are removed at once, asynchronous saves whose trainer is killed (the writer process goes
on and commits), and asynchronous saves whose writer is. After each kill the newest committed
checkpoint must load, verify, and be at least as new as the one that the saver last reported; after
the next save nothing temporary may be left. Exits with an error if not.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from report import write

from torchrelay.checkpoint import async_save, latest, load, save, verify
from torchrelay.checkpoint.engine._background import saver

MODES = (
    "new names",
    "replace",
    "retention of many",
    "async, trainer killed",
    "async, writer killed",
)
_ELEMENTS = 500_000


def _values(step: int) -> dict[str, Any]:
    return {"step": step, "w": torch.full((_ELEMENTS,), float(step)), "v": torch.full((11,), step)}


def _path(folder: str, mode: str, step: int) -> str:
    return f"{folder}/{'last' if mode == 'replace' else f'step-{step}'}"


def _save_until_killed(folder: str, mode: str, first: int) -> None:
    """The saver: prints the pid to kill, then each step once it is committed."""
    victim = os.getpid()
    if mode == "async, writer killed":
        victim = saver.start().pid
    _report(victim)
    for step in range(first, first + 10_000):
        if mode.startswith("async"):
            async_save(_values(step), _path(folder, mode, step), keep=2).result()
        else:  # where many are removed at once, most kills fall into the removal
            keep = None if mode == "replace" or (mode == "retention of many" and step % 8) else 2
            save(_values(step), _path(folder, mode, step), keep=keep)
        _report(step)
        if mode == "async, writer killed" and saver.start().pid != victim:
            return  # killed between two saves; the next save has started another


def _report(number: int) -> None:
    os.write(sys.stdout.fileno(), b"%d\n" % number)


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


def _kill_one(folder: str, mode: str, first: int, draws: random.Random) -> int:
    """Forks a saver and kills it; the last step that it reported as committed, ``first`` - 1 if
    none.
    """
    reader, writer = os.pipe()
    saver = os.fork()
    if saver == 0:
        os.dup2(writer, sys.stdout.fileno())  # also of a writer process
        os.close(reader)
        os.close(writer)
        try:
            _save_until_killed(folder, mode, first)
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader) as reports:
        victim = int(reports.readline())
        start, saves = time.perf_counter(), draws.randint(1, 3)
        last = [int(reports.readline()) for _ in range(saves)][-1]
        # Within a save, or the next.
        time.sleep(draws.random() * 1.2 * (time.perf_counter() - start) / saves)
        os.kill(victim, signal.SIGKILL)
        # Ends when a writer process that outlives its trainer does too.
        reported = [int(line) for line in reports.read().split()]
    os.waitpid(saver, 0)
    return max([last, *reported])


def _soak_mode(mode: str, kills: int, draws: random.Random) -> str:
    with tempfile.TemporaryDirectory() as folder:
        save(_values(0), _path(folder, mode, 0))
        newest = torn = 0
        for _ in range(kills):
            reported = _kill_one(folder, mode, newest + 1, draws)
            torn += any(name.startswith(".") for name in os.listdir(folder))
            found = _newest(folder)
            if found < max(newest, reported):
                raise SystemExit(
                    f"{mode}: step {reported} was committed, and the newest is {found}"
                )
            newest = found
        save(_values(newest + 1), _path(folder, mode, newest + 1), keep=2)
        if _newest(folder) != newest + 1:
            raise SystemExit(f"{mode}: the save after the kills is not the newest")
        left = [
            str(path)
            for path in Path(folder).rglob("*")
            if path.name.startswith((".", "torchrelay-"))
        ]
        if left or len(os.listdir(folder)) > 2:
            raise SystemExit(f"{mode}: left behind: {left or os.listdir(folder)}")
        return (
            f"{mode}: {kills} kills, {torn} of which left an unfinished save or removal, {newest} "
            "checkpoints; none lost, none torn, nothing left"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=f"{__doc__} 200 kills take about ten minutes, and their results are kept."
    )
    parser.add_argument("--kills", type=int, default=200, help="in all, over five modes")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # savers are forked
    lines = []
    for number, mode in enumerate(MODES):
        kills = max(1, arguments.kills // len(MODES))
        lines.append(f"- {_soak_mode(mode, kills, random.Random(arguments.seed + number))}")
        print(lines[-1], flush=True)
    if arguments.kills >= 200:
        write(
            "checkpoint_soak",
            "checkpoint: savers killed at random moments",
            __doc__ or "",
            "\n".join(lines),
        )


if __name__ == "__main__":
    main()

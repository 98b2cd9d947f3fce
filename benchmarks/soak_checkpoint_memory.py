"""Is a torn checkpoint ever loaded from memory, or a whole one lost, when trainers, memory servers
and hosts are killed at random moments?

Two trainers on two simulated hosts do nothing but save, every step, with
`Checkpointer(partner=True)`, so that most kills come while a part is staged, checked or copied. At
a random time one of them is killed (SIGKILL), or its memory server, or both, which is all of its
host, or all of both hosts; then the trainers that are left are ended, as a launcher does, and both
start again. What they load must be the exact state of a step: where a trainer was killed, at least
the last for which `save` had returned; where a server or host was, at least the one before; at most
the last that had begun. Only the death of both hosts may lose more: then it is one on the disk. Of
what is lost, a warning must say so. Exits with an error if not.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TextIO

import torch
from report import write

from torchrelay.world import World

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from memory_jobs import check, end_servers, job_state, open_job, server_pid
from preloaded import IMPORTED
from ranks import free_port

KILLS = {"trainer": 4, "server": 4, "host": 4, "both hosts": 1}  # how often, in parts
DISK_EVERY = 50
_ROWS = 50_000  # of 20 bytes
_MOST_SAVES = 8  # of a job, until the kill


def _train(world: World, path: str, report: int) -> None:
    """A trainer: loads, compares, and saves until it is killed. Reports what it has done."""

    def say(what: str, step: int) -> None:
        os.write(report, f"{what} {step}\n".encode())

    os.dup2(report, 2)  # warnings, too
    torch.set_num_threads(1)
    try:
        job = open_job(world, path, [0, 1], DISK_EVERY, partner=True, keep=1)
        state = job_state(-1, _ROWS)
        loaded = job.load(state)
        if loaded is not None:
            check(state, loaded)
        step = -1 if loaded is None else loaded
        say("loaded", step)
        while True:
            step += 1
            state = job_state(step, _ROWS)
            say("saving", step)
            job.save(state, step=step)
            say("saved", step)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


class _Run:
    """A job, from its start until it is killed; ``steps`` are the highest that it has reported."""

    def __init__(self, path: str) -> None:
        self.steps = {"loaded": -1, "saving": -1, "saved": -1}
        self.said: list[str] = []
        self._path, port = path, free_port()
        self._ends: list[TextIO] = []
        self._trainers: list[int] = []
        for rank in range(2):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                _train(World(rank, 2, "soak", "127.0.0.1", port), path, writer)
            os.close(writer)
            self._ends.append(os.fdopen(reader))
            self._trainers.append(pid)

    def _read(self, end: TextIO, name: str = "") -> None:
        """Read to the end, or until a rank reports ``name``."""
        for line in end:
            what, _, step = line.strip().partition(" ")
            if what in self.steps:
                self.steps[what] = max(self.steps[what], int(step))
                if what == name:
                    return
            else:
                self.said.append(line.rstrip())
        if name:
            raise SystemExit("\n".join(["a job has ended by itself:", *self.said]))

    def kill(self, kind: str, draws: random.Random) -> None:
        """Kill ``kind`` at a random moment, and then what is left of the job."""
        for end in self._ends:
            self._read(end, "loaded")
        servers = []
        for host in range(2):
            os.environ["TORCHRELAY_HOST_ID"] = str(host)
            servers.append(server_pid(self._path))
        # After the loss of a host, the next checkpoint that is whole has its copies again.
        for _ in range(draws.randint(2 * (kind != "trainer"), _MOST_SAVES)):
            self._read(self._ends[0], "saved")
        time.sleep(draws.random() * 0.05)
        for victim in range(2) if kind == "both hosts" else [draws.randrange(2)]:
            if kind != "server":
                _kill(self._trainers[victim])
            if kind != "trainer":
                _kill(servers[victim])
        time.sleep(draws.random() * 0.05)
        for pid, end in zip(self._trainers, self._ends, strict=True):
            _kill(pid)
            os.waitpid(pid, 0)
            with end:
                self._read(end)

    def at_least(self, kind: str) -> int:
        """Return the oldest step that may be loaded after ``kind`` has been killed."""
        newest = max(self.steps["loaded"], self.steps["saved"] - (kind != "trainer"))
        if kind == "both hosts":  # what the disk has by then
            return min(newest, (newest - 1) // DISK_EVERY * DISK_EVERY - DISK_EVERY)
        return newest


def _soak(path: str, kills: int, draws: random.Random) -> str:
    """Kill jobs, and compare what each loads with what the one before had saved."""
    lost: dict[str, list[int]] = {kind: [] for kind in KILLS}
    within, before = 0, None
    kind = ""
    for number in range(kills + 1):
        last, kind = kind, draws.choices([*KILLS], [*KILLS.values()])[0]
        run = _Run(path)
        run.kill(kind, draws)
        loaded, steps = run.steps["loaded"], run.steps
        within += steps["saving"] > steps["saved"]
        if before is not None:
            least, most = before.at_least(last), max(before.steps.values())
            what = f"kill {number} ({last}), after {before.steps}: loaded {loaded}"
            if not least <= loaded <= most:
                raise SystemExit("\n".join([f"{what}, not from {least} to {most}", *run.said]))
            saved = max(before.steps["loaded"], before.steps["saved"])
            if loaded < saved and not any("lost" in line for line in run.said):
                raise SystemExit("\n".join([f"{what}, and nothing says so", *run.said]))
            lost[last].append(max(0, saved - loaded))
        before = run
        if number % 50 == 49:
            print(f"{number + 1} kills, step {steps['saving']}", flush=True)
    lines = [
        f"- {name}: {len(steps)} kills, of steps that `save` had returned for "
        f"{sum(steps) / len(steps):.2f} lost on average, {max(steps)} at most"
        for name, steps in lost.items()
        if steps
    ]
    assert before is not None
    lines.append(
        f"- {before.steps['saving']} steps in all, {within} of the jobs killed within `save`; none "
        "torn, none lost that was known to be whole, no loss without a warning"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=f"{__doc__} 1,000 kills take about ten minutes; their results are kept."
    )
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()  # trainers are forked
    os.environ["TORCHRELAY_TRANSPORT_PEER_TIMEOUT_S"] = "60"  # longer than any delay here
    folder = os.environ["TMPDIR"] = tempfile.mkdtemp()
    try:
        found = _soak(f"{folder}/ckpt", arguments.kills, random.Random(arguments.seed))
    finally:
        end_servers(2)
        shutil.rmtree(folder, ignore_errors=True)
    print(found)
    if arguments.kills >= 200:
        title = "checkpoint: trainers, memory servers and hosts killed at random moments"
        write("checkpoint_memory_soak", title, __doc__ or "", found)


if __name__ == "__main__":
    main()

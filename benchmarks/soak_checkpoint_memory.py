"""Is a torn checkpoint ever loaded from memory, or a whole one lost, when trainers, memory servers
and hosts are killed at random moments?

Two trainers on two simulated hosts save every step with `Checkpointer(partner=True)`. At a random
time one of them is killed (SIGKILL), or its memory server, or both, which is all of its host, or
all of both hosts; then the trainers that are left are ended, as a launcher does, and both start
again. What they load must be the exact state of a step: at least the last that was known to be
whole, and at most the last that was saved. Only the death of both hosts may lose more: then it is
the last step on the disk. Exits with an error if not.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress

import torch
import torch.distributed as dist
from report import write
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchrelay.checkpoint import Checkpointer
from torchrelay.checkpoint._memory_socket import MemoryClient, job_of
from torchrelay.errors import TorchRelayError

KILLS = ("trainer", "server", "host", "both hosts")
DISK_EVERY = 50
_ROWS, _COLUMNS = 2048, 512
_MOST_SAVES = 12  # of a job, until the kill


def _whole(step: int) -> torch.Tensor:
    return (torch.arange(_ROWS * _COLUMNS, dtype=torch.float32) + step).view(_ROWS, _COLUMNS)


def _train(rank: int, folder: str, attempt: int, report: int) -> None:
    """A trainer: loads, compares, and saves until it is killed. Reports what it has done."""
    os.environ["TORCHRELAY_HOST_ID"] = str(rank)
    store = dist.FileStore(f"{folder}/store-{attempt}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = DeviceMesh("cpu", [0, 1])
    w = distribute_tensor(_whole(-1), mesh, [Shard(0)])
    state = {"w": w, "step": -1}
    job = Checkpointer(f"{folder}/ckpt", partner=True, disk_every=DISK_EVERY, keep=1)
    loaded = job.load(state)
    if loaded is not None:
        local = w.to_local()
        expected = _whole(loaded)[rank * len(local) : (rank + 1) * len(local)]
        if state["step"] != loaded or not torch.equal(local, expected):
            os.write(report, b"torn %d\n" % loaded)
            os._exit(1)
    os.write(report, b"loaded %d\n" % (-1 if loaded is None else loaded))
    step = -1 if loaded is None else loaded
    while True:
        step += 1
        os.write(report, b"saving %d\n" % step)
        w.to_local().copy_(_whole(step)[rank * _ROWS // 2 : (rank + 1) * _ROWS // 2])
        job.save({"w": w, "step": step}, step=step)  # the one before is whole when it returns
        os.write(report, b"whole %d\n" % (step - 1))


def _server_pid(folder: str, host: int) -> int | None:
    os.environ["TORCHRELAY_HOST_ID"] = str(host)
    with (
        suppress(OSError, TorchRelayError),
        closing(MemoryClient(job_of(f"{folder}/ckpt"))) as client,
    ):
        return int(client.ask("status")["pid"])
    return None


def _kill(pid: int | None) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Soak:
    """A job that is killed and started again."""

    def __init__(self, folder: str, draws: random.Random) -> None:
        self._folder, self._draws = folder, draws
        self._attempt = 0
        self.loaded: Counter[str] = Counter()
        self.saves = 0

    def run(self, kind: str) -> dict[str, int]:
        """Start the job, and kill ``kind`` at a random moment; return the last steps reported."""
        self._attempt += 1
        ends, trainers = [], []
        for rank in range(2):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                    _train(rank, self._folder, self._attempt, writer)
                finally:
                    os._exit(2)
            os.close(writer)
            ends.append(os.fdopen(reader))
            trainers.append(pid)
        first = [end.readline() for end in ends]
        if any(line.startswith("torn") for line in first):
            raise SystemExit(f"{kind}: a torn state was loaded: {first}")
        if not all(line.startswith("loaded") for line in first):
            raise SystemExit(f"{kind}: a job did not start: {first}")
        servers = [_server_pid(self._folder, host) for host in range(2)]
        started = time.perf_counter()
        # After the loss of a host, the next checkpoint that is whole has its copies again.
        for _ in range(2 * self._draws.randint(2 * (kind != "trainer"), _MOST_SAVES)):
            ends[0].readline()
        time.sleep(self._draws.random() * min(0.1, time.perf_counter() - started))
        victim = self._draws.randrange(2)
        victims = [0, 1] if kind == "both hosts" else [victim]
        for one in victims:
            if kind != "server":
                _kill(trainers[one])
            if kind != "trainer":
                _kill(servers[one])
        time.sleep(self._draws.random() * 0.05)
        for pid in trainers:
            _kill(pid)
            os.waitpid(pid, 0)
        steps = {"loaded": -1, "saving": -1, "whole": -1}
        for end, line in zip(ends, first, strict=True):
            with end:
                for name, number in (one.split() for one in [line, *end.read().splitlines()]):
                    steps[name] = max(steps[name], int(number))
        return steps

    def close(self) -> None:
        for host in range(2):
            _kill(_server_pid(self._folder, host))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=f"{__doc__} 1,000 kills take about half an hour; their results are kept."
    )
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # trainers are forked
    os.environ["TORCHRELAY_TRANSPORT_PEER_TIMEOUT_S"] = "2"
    draws = random.Random(arguments.seed)
    folder = tempfile.mkdtemp()
    os.environ["TMPDIR"] = folder
    soak = Soak(folder, draws)
    at_least, at_most, kind = -1, -1, "nothing"
    lost: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    try:
        for number in range(arguments.kills + 1):
            is_last = number == arguments.kills
            before, kind = kind, draws.choices(KILLS, (4, 4, 4, 1))[0]
            steps = soak.run("both hosts" if is_last else kind)
            if not at_least <= steps["loaded"] <= at_most:
                raise SystemExit(
                    f"kill {number} ({before}): loaded {steps['loaded']}, not from {at_least} to "
                    f"{at_most}"
                )
            lost[before] += at_most - steps["loaded"]
            counts[before] += 1
            newest = max(steps["loaded"], steps["whole"])
            at_most = max(steps["loaded"], steps["saving"])
            at_least = newest if kind != "both hosts" else -1
            if kind == "both hosts":  # what the disk has by then
                at_least = min(newest, (newest - 1) // DISK_EVERY * DISK_EVERY - DISK_EVERY)
            if (number + 1) % 50 == 0:
                print(f"{number + 1} kills, step {at_most}, lost {dict(lost)}", flush=True)
    finally:
        soak.close()
        shutil.rmtree(folder, ignore_errors=True)
    lines = [
        f"- {name}: {counts[name]} kills, {lost[name] / counts[name]:.2f} steps lost of those that "
        "had begun to be saved, on average"
        for name in KILLS
        if counts[name]
    ]
    lines.append(f"- {at_most} steps in all; none torn, none lost that was known to be whole")
    print("\n".join(lines))
    if arguments.kills >= 200:
        title = "checkpoint: trainers, memory servers and hosts killed at random moments"
        write("checkpoint_memory_soak", title, __doc__ or "", "\n".join(lines))


if __name__ == "__main__":
    main()

"""What does an elastic job cost: to heal a member, to lose one, and in each step?

    python benchmarks/bench_elastic.py            # as root; about seven minutes
    python benchmarks/bench_elastic.py --smoke    # little of each; writes nothing

- Heal: two members in network namespaces have a state, and a third one comes and gets it. All links
  have 1 Gbit/s. What counts is how long healing stops the job, checksums included.
- Kill: members on one host take steps without a computation. One, drawn at random, is killed. What
  counts is the time until all others have committed a step without it. Another takes its place.
  The same by torchft, if it is installed: `python -m venv build/torchft`, and
  `build/torchft/bin/pip install -c constraints.txt torch numpy torchft`. Its lighthouse misses
  heartbeats after 500 ms, a tenth of its default, and waits for members for 100 ms. And by
  torchrun, which starts all ranks again: they load what a `Checkpointer` has in memory.
- Goodput: the same jobs of four members, in each step of which a member sleeps 50 ms for a batch of
  its own. Every 15 s one of them is killed, and another is started in its place 4 s later; under
  torchrun, one of the ranks that are started again is 4 s late. Goodput is how many batches the job
  commits, as a share of what jobs that nobody disturbs commit in the same time: for as long as four
  members can work, one of four, else one of three. Both were measured for 15 s before the first
  kill. A member cannot work from its kill until another in its place has been started and has
  imported torch. So what the dead would have done is not counted; what the others do twice or wait
  for is, and so are healing, loading, and the start of ranks that were not killed.
- Step: two members on one host take steps with a small model, by `Elastic`, by
  DistributedDataParallel over sml, and by a backward pass and an all-reduce of one flat tensor.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import free_port, milliseconds, parser_of, table, write
from torch import nn

from torchrelay.checkpoint import Checkpointer
from torchrelay.training import Elastic, Step

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import namespaces

TORCHFT = Path(__file__).parents[1] / "build/torchft/bin/python"
MBIT = 1000
TIMEOUT_S = 20.0
STEP_S, EVERY_S, AWAY_S, KILLS = 0.05, 15.0, 4.0, 3  # of goodput


class Member:
    """A process, and the pipe over which it reports."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.Process(
            target=target, args=(theirs, *arguments), daemon=True
        )
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join()
        self.pipe.close()


# --- heal


def be_healed(pipe: Connection, host: int, pid: int, size_bytes: int) -> None:
    namespaces.enter(pid)
    os.environ["TORCHRELAY_TRANSPORT_INTERFACE"] = f"10.78.{host}.2"
    os.environ["TORCHRELAY_HOST_ID"] = f"host {host}"
    torch.set_num_threads(1)
    model = nn.ParameterList(torch.randn(size_bytes // 4 // 10) for _ in range(10))
    addresses = [f"10.78.{each}.2:29500" for each in range(3)]
    settings: dict[str, Any] = {"address": addresses[host], "peers": ",".join(addresses)}
    with Elastic({"model": model}, **settings, token="bench", timeout_s=TIMEOUT_S) as elastic:
        size = 0
        while True:
            with elastic.step() as step:
                time.sleep(0.05)
            if step.size != size:
                size = step.size
                pipe.send((size, elastic._costs.seconds["heals"]))


def heal(size_bytes: int, times: int) -> list[float]:
    """Return how long a third member takes to get the state of two."""
    took_s = []
    with namespaces.star(3) as hosts:
        hosts.route()
        hosts.limit(MBIT)
        members = [Member(be_healed, host, hosts.pids[host], size_bytes) for host in (0, 1)]
        for member in members:
            while member.pipe.recv()[0] < 2:
                pass
        for _ in range(times):
            newcomer = Member(be_healed, 2, hosts.pids[2], size_bytes)
            took_s.append(newcomer.pipe.recv()[1])
            newcomer.kill()
        for member in members:
            member.kill()
    return took_s


# --- kill and goodput


def be_killed(pipe: Connection, address: str, peers: str, step_s: float) -> None:
    torch.set_num_threads(1)
    model, pid = nn.Linear(100, 100), os.getpid()
    pipe.send((pid, 0, 0, 0.0))
    with Elastic({"model": model}, address=address, peers=peers, timeout_s=TIMEOUT_S) as elastic:
        while True:
            with elastic.step() as step:
                step.reduce(model)
                time.sleep(step_s)
            if step.committed:
                pipe.send((pid, step.number, step.size, time.monotonic()))


class Program:
    """A process that prints what it reports."""

    def __init__(self, *command: Any) -> None:
        self.process = subprocess.Popen(
            [*map(str, command)],
            bufsize=0,  # what was read is seen by `wait`
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.pipe = self

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def recv(self) -> tuple[int, int, int, float]:
        pid, number, size, now_s = self.read().split()
        return int(pid), int(number), int(size), float(now_s)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Job:
    """Members that are started on their own.

    Each reports its process when it can work, as of a step of size 0, and with each step that it
    has committed the step's number, the members in it, and the time.

    Args:
        start: starts a member at one of ``addresses``.

    Attributes:
        size: how many members there are.
        starting: how many of them cannot work yet.
        sizes: by number, the members of each step that was committed.
    """

    def __init__(self, start: Callable[[str], Member | Program], addresses: list[str]) -> None:
        self.start, self.free = start, addresses
        self.members: dict[str, Member | Program] = {}
        self.size, self.starting, self.sizes = 0, 0, dict[int, int]()
        self.alive, self.dead = set[int](), set[int]()  # processes
        while self.free:
            self.bring_back()

    def bring_back(self) -> None:
        address = self.free.pop()
        self.members[address] = self.start(address)
        self.starting += 1
        self.size += 1

    def lose(self) -> None:
        address = random.choice([*self.members])
        self.members.pop(address).kill()
        self.free.append(address)
        self.size -= 1

    def close(self) -> None:
        while self.members:
            self.lose()

    def reports(self, longest_s: float | None = None) -> Iterator[tuple[int, int, float]]:
        """Wait for reports of committed steps: process, members and time."""
        pipes: list[Any] = [member.pipe for member in self.members.values()]
        for pipe in wait(pipes, longest_s):
            pid, number, size, now_s = pipe.recv()  # type: ignore[union-attr, call-arg]
            if pid in self.dead:
                continue
            self.alive.add(pid)
            self.starting -= not size
            if size:
                self.sizes[number] = size
                yield pid, size, now_s

    def committed_s(self) -> float:
        """Return when the last of the members committed its first step with all of them."""
        first_s: dict[int, float] = {}
        while len(first_s) < self.size:
            for pid, size, now_s in self.reports():
                if size == self.size:
                    first_s.setdefault(pid, now_s)
        return max(first_s.values())

    def batches(self, for_s: float) -> int:
        """Return how many batches are committed in a time."""
        before, end_s = sum(self.sizes.values()), time.monotonic() + for_s
        while (left_s := end_s - time.monotonic()) > 0:
            for _ in self.reports(left_s):
                pass
        return sum(self.sizes.values()) - before


class OfTorchft(Job):
    def __init__(self, size: int, step_s: float) -> None:
        script = Path(__file__).with_name("elastic_torchft.py")
        self.lighthouse = Program(TORCHFT, script, "lighthouse")
        address, names = self.lighthouse.read(), itertools.count()
        super().__init__(
            lambda _: Program(TORCHFT, script, "member", address, next(names), step_s),
            [str(index) for index in range(size)],
        )

    def close(self) -> None:
        super().close()
        self.lighthouse.kill()


class OfTorchrun(Job):
    """All ranks are started again when one is lost, one of them late."""

    def __init__(self, size: int, step_s: float, away_s: float) -> None:
        self.folder = tempfile.mkdtemp()

        def start(_: str) -> Program:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc-per-node={size}", "--max-restarts=99"]
            script = Path(__file__).with_name("elastic_restart.py")
            return Program(*command, script, self.folder, step_s, away_s)

        super().__init__(start, [""])
        self.size = self.starting = size

    def lose(self) -> None:
        victim = random.choice([*self.alive])
        self.dead |= self.alive
        self.alive.clear()
        self.starting = self.size
        os.kill(victim, signal.SIGKILL)

    def bring_back(self) -> None:
        if not self.members:  # else torchrun does
            super().bring_back()

    def close(self) -> None:
        (torchrun,) = self.members.values()
        assert isinstance(torchrun, Program)
        torchrun.process.terminate()
        torchrun.process.communicate()
        Checkpointer(self.folder).close(drop=True)
        shutil.rmtree(self.folder)


def of_elastic(size: int, step_s: float) -> Job:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(size)]
    peers = ",".join(addresses)
    return Job(lambda address: Member(be_killed, address, peers, step_s), addresses)


Start = Callable[[int, float, float], Job]  # members, and seconds of a step and of an absence


def kill(job: Job, times: int) -> list[float]:
    """Return the times from a kill to the next step of the others, or of all ranks."""
    took_s = []
    for _ in range(times):
        job.committed_s()
        killed_s = time.monotonic()
        job.lose()
        took_s.append(job.committed_s() - killed_s)
        job.bring_back()
    job.close()
    return took_s


def goodput(start: Start, size: int, every_s: float, away_s: float, times: int) -> float:
    """Return the goodput of a job of which ``times`` members are killed, as said above."""
    undisturbed = {}
    for members in (size - 1, size):
        job = start(members, STEP_S, away_s)
        job.committed_s()
        undisturbed[members] = job.batches(every_s) / every_s
        if members < size:
            job.close()
    committed, due = 0, 0.0
    for _ in range(times):
        killed_s = time.monotonic()
        job.lose()
        committed += job.batches(away_s)
        job.bring_back()
        while job.starting:
            committed += job.batches(0.01)
        back_s = time.monotonic() - killed_s
        rest_s = max(every_s - back_s, 0.0)
        committed += job.batches(rest_s)
        due += undisturbed[size - 1] * back_s + undisturbed[size] * rest_s
    job.close()
    return committed / due


def kills(sizes: list[int], times: int, *faults: Any) -> list[list[object]]:
    """Return a row for each kind of job and number of members; ``faults`` are those of goodput."""
    kinds: dict[str, Start] = {
        "Elastic": lambda size, step_s, _: of_elastic(size, step_s),
        "torchft": lambda size, step_s, _: OfTorchft(size, step_s),
        "a restart by torchrun": OfTorchrun,
    }
    if not TORCHFT.exists():
        del kinds["torchft"]
    rows: list[list[object]] = []
    for size in sizes:
        for name, start in kinds.items():
            took_s = kill(
                start(size, 0.01, 0.0), times if start is not OfTorchrun else min(times, 3)
            )
            rows.append([size, name, *milliseconds(took_s)[:2], ""])
    for row, start in zip(rows[-len(kinds) :], kinds.values(), strict=True):
        row[-1] = f"{goodput(start, size, *faults):.1%}"
    return rows


# --- step


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))


def timed(model: nn.Module, times: int, step: Callable[[], None]) -> list[float]:
    """Return the seconds of steps, after some that do not count."""
    took_s = []
    for _ in range(times + 5):
        started_s = time.monotonic()
        model.zero_grad()
        step()
        took_s.append(time.monotonic() - started_s)
    return took_s[5:]


def step_elastic(pipe: Connection, rank: int, addresses: list[str], times: int) -> None:
    torch.set_num_threads(1)
    model, x = small_model(), torch.randn(8, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings: dict[str, Any] = {"address": addresses[rank], "peers": ",".join(addresses)}

    def take(during: Callable[[Step], None]) -> Step:
        with elastic.step() as step:
            during(step)
        return step

    def compute(step: Step) -> None:
        model(x).square().mean().backward()
        step.reduce(model)

    def one() -> None:
        if take(compute).committed:
            optimizer.step()

    with Elastic({"model": model}, **settings, timeout_s=TIMEOUT_S) as elastic:
        while take(lambda _: None).size < len(addresses):
            pass
        pipe.send(timed(model, times, one))


def step_plain(pipe: Connection, rank: int, folder: str, times: int, is_ddp: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("sml", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model, x = small_model(), torch.randn(8, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = nn.parallel.DistributedDataParallel(model) if is_ddp else model

    def one() -> None:
        wrapped(x).square().mean().backward()
        if not is_ddp:
            gradients = [one.grad for one in model.parameters() if one.grad is not None]
            flat = torch.cat([one.view(-1) for one in gradients]) / 2
            dist.all_reduce(flat)
            parts = torch.split(flat, [one.numel() for one in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        optimizer.step()

    pipe.send(timed(model, times, one))
    dist.destroy_process_group()


def step(times: int) -> dict[str, list[float]]:
    """Return the seconds of steps by kind, of the slower member."""
    took_s = {}
    for kind in ("a backward pass and an all-reduce", "DistributedDataParallel", "Elastic"):
        with tempfile.TemporaryDirectory() as folder:
            if kind == "Elastic":
                addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
                members = [Member(step_elastic, rank, addresses, times) for rank in range(2)]
            else:
                is_ddp = kind == "DistributedDataParallel"
                members = [Member(step_plain, rank, folder, times, is_ddp) for rank in range(2)]
            both = [member.pipe.recv() for member in members]
            for member in members:
                member.process.join()
        took_s[kind] = [max(pair) for pair in zip(*both, strict=True)]
    return took_s


def main() -> None:
    is_smoke = parser_of(__doc__, "little of each; writes nothing").parse_args().smoke
    random.seed(0)
    load = os.getloadavg()[0]
    parts = []
    if why := namespaces.missing():
        parts.append(f"Healing was not measured: {why}.")
    else:
        size_bytes = 20_000_000 if is_smoke else 500_000_000
        healed_s = heal(size_bytes, 1 if is_smoke else 3)
        median_s = statistics.median(healed_s)
        share = 8 * size_bytes / median_s / (MBIT * 1e6)
        row = [f"{size_bytes / 1e6:.0f} MB", f"{median_s:.2f} s", f"{share:.0%}"]
        parts.append(table(["state", f"healed over {MBIT} Mbit/s", "share of the link"], [row]))
    times, sizes = (2, [2]) if is_smoke else (10, [2, 4])
    rows = kills(sizes, times, *((2.0, 0.5, 1) if is_smoke else (EVERY_S, AWAY_S, KILLS)))
    parts.append(table(["members", "", "kill to the next step, p50", "p99", "goodput"], rows))
    if not TORCHFT.exists():
        parts.append("torchft is not installed in build/torchft.")
    rows = [[kind, *milliseconds(took)[:2]] for kind, took in step(5 if is_smoke else 100).items()]
    parts.append(table(["step of 4.2 million parameters", "p50", "p99"], rows))
    parts.append(
        f"p99 of {times} kills, three of torchrun's, is the slowest. Load average of the machine: "
        f"{load:.1f} before, {os.getloadavg()[0]:.1f} after."
    )
    print("\n\n".join(parts))
    if not is_smoke:
        write("elastic", "An elastic job: healing, kills and steps", *parts)


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    main()

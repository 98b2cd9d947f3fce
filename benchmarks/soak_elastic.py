"""What does an elastic job lose when members are killed, frozen or cut off all the time?

    python benchmarks/soak_elastic.py                 # as root; ten minutes
    python benchmarks/soak_elastic.py --faults 1000   # eight hours

Eight members run in network namespaces. Every 29 s one of them is killed and started again, frozen
for a while, or cut off for a while. A step takes as long as its samples: each member sleeps 5 ms
for each of its own. Members compare each sum with what it must be, and note a checksum of their
parameters after each step; the parameters of one step must be equal on all members.

Goodput is how many samples the job commits in a second of a member that can work, as a share of
that of the same job before the first fault. A member cannot work from a fault until it is started
again, thawed or connected. So what the dead would have done is not counted; what the others do
twice or wait for is, and so is healing. A hang is a minute without a committed step.

What a kind of fault costs is by how much those steps after it, or after the return, are longer than
the median that take twice as long; and how long the one that returns has not taken a step.
"""

from __future__ import annotations

import bisect
import os
import random
import signal
import statistics
import sys
import time
import traceback
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import Pipe, Process, connection, set_start_method
from pathlib import Path
from typing import Any

import torch
from report import milliseconds, parser_of, table, write

from torchrelay.training import Elastic, ElasticLoader

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import namespaces

MEMBERS, EVERY_S, AWAY_S, HANG_S = 8, 29.0, 8.0, 60.0
SAMPLES, BATCH, SAMPLE_S, NUMEL = 4000, 80, 0.005, 250_000
KINDS = ["kill", "freeze", "cut"]


def be_member(index: int, pid: int, timeout_s: float, pipe: connection.Connection) -> None:
    namespaces.enter(pid)
    os.environ["TORCHRELAY_TRANSPORT_INTERFACE"] = f"10.78.{index}.2"
    os.environ["TORCHRELAY_HOST_ID"] = f"host {index}"
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(NUMEL))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES))
    loader = ElasticLoader(data, BATCH)
    states: dict[str, Any] = {
        "model": torch.nn.ParameterList([parameter]),
        "optimizer": optimizer,
        "data": loader,
    }
    addresses = [f"10.78.{host}.2:29500" for host in range(MEMBERS)]
    pipe.send(("ready", 0, 0))
    try:
        with Elastic(
            states,
            address=addresses[index],
            peers=",".join(addresses),
            token="soak",
            timeout_s=timeout_s,
            wait_s=1e9,
        ) as elastic:
            while True:
                with elastic.step() as step:
                    taken = loader.take(step)
                    own = torch.zeros(0) if taken is None else taken[0].double()
                    time.sleep(SAMPLE_S * len(own))
                    parameter.grad = torch.full((NUMEL,), float(own.mean()) if len(own) else 0.0)
                    step.reduce([parameter])
                if step.committed:
                    every = loader.samples(step.number)
                    expected = sum(every) / len(every)
                    if not torch.allclose(parameter.grad, torch.tensor(expected), rtol=1e-5):
                        pipe.send(("wrong sum", step.number, 0))
                    optimizer.step()
                    digest = zlib.crc32(parameter.detach().numpy().tobytes())
                    pipe.send(("step", step.number, digest))
    except BaseException:
        traceback.print_exc()
        pipe.send(("failed", 0, 0))
        raise


@dataclass
class Job:
    """The members, what they report, and what that adds up to."""

    hosts: namespaces.Hosts
    timeout_s: float
    members: dict[int, tuple[Process, connection.Connection]] = field(default_factory=dict)
    able: set[int] = field(default_factory=set)
    digests: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    committed_s: list[float] = field(default_factory=list)
    stepped_s: dict[int, float] = field(default_factory=dict)  # by member, of its last step
    costs_s: dict[str, tuple[list[float], ...]] = field(
        default_factory=lambda: {kind: ([], [], []) for kind in KINDS}
    )
    able_s: float = 0.0
    last_s: float = field(default_factory=time.monotonic)
    step_s: float = field(default_factory=time.monotonic)
    wrong: int = 0
    hangs: int = 0
    failed: int = 0

    def start(self, index: int) -> None:
        ours, theirs = Pipe()
        arguments = (index, self.hosts.pids[index], self.timeout_s, theirs)
        process = Process(target=be_member, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self.members[index] = process, ours

    def watch(self, until_s: float) -> None:
        while (now_s := time.monotonic()) < until_s:
            self.able_s += len(self.able) * (now_s - self.last_s)
            self.last_s = now_s
            if now_s - self.step_s > HANG_S:
                self.hangs, self.step_s = self.hangs + 1, now_s
            pipes = {pipe: index for index, (_, pipe) in self.members.items()}
            for ready in connection.wait([*pipes], min(0.05, until_s - now_s)):
                assert isinstance(ready, connection.Connection)
                try:
                    what, number, digest = ready.recv()
                except (EOFError, OSError):
                    self.members.pop(pipes[ready])
                    continue
                if what == "ready":
                    self.able.add(pipes[ready])
                elif what == "step":
                    self.step_s = self.stepped_s[pipes[ready]] = now_s
                    if number not in self.digests:
                        self.committed_s.append(now_s)
                    self.digests[number].add(digest)
                else:
                    self.wrong += what == "wrong sum"
                    self.failed += what == "failed"

    def excess_s(self, from_s: float, to_s: float) -> float:
        """Return by how much the slow steps of a time were longer than the median of all so far."""
        median_s = statistics.median(b - a for a, b in pairwise(self.committed_s))
        first = bisect.bisect(self.committed_s, from_s) - 1
        times_s = [*self.committed_s[first : bisect.bisect(self.committed_s, to_s)], to_s]
        took_s = [later - former for former, later in pairwise(times_s)]
        return sum(took - median_s for took in took_s if took > 2 * median_s)

    def fault(self, kind: str, index: int, end_s: float) -> None:
        """Let a member be away for a while; it comes back, and we watch until ``end_s``."""
        process, _ = self.members[index]
        lost_s = time.monotonic()
        self.able.discard(index)
        others = [other for other in range(MEMBERS) if other != index]
        if kind == "kill":
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
        elif kind == "freeze":
            os.kill(process.pid or 0, signal.SIGSTOP)
        else:
            for other in others:
                self.hosts.cut(index, other)
        self.watch(time.monotonic() + AWAY_S)
        self.stepped_s.pop(index, None)
        returns_s = time.monotonic()
        if kind == "kill":
            self.start(index)
        else:
            if kind == "freeze":
                os.kill(process.pid or 0, signal.SIGCONT)
            else:
                self.hosts.mend()
            self.able.add(index)
        while index not in self.stepped_s and time.monotonic() < end_s:
            self.watch(time.monotonic() + 0.05)
        back_s = time.monotonic()
        self.watch(end_s)
        costs = (
            self.excess_s(lost_s, returns_s),
            self.excess_s(returns_s, end_s),
            back_s - returns_s,
        )
        for known, cost in zip(self.costs_s[kind], costs, strict=True):
            known.append(cost)

    def rate(self, until_s: float, faults: list[str]) -> tuple[float, int]:
        """Return the samples per second of a member that can work, and the steps, of a time."""
        self.watch(time.monotonic())
        steps, able_s = len(self.digests), self.able_s
        for kind in faults:
            next_s = time.monotonic() + EVERY_S
            self.fault(kind, random.choice([*self.members]), next_s)
        self.watch(until_s)
        done = len(self.digests) - steps
        return BATCH * done / (self.able_s - able_s), done


def main() -> None:
    parser = parser_of(__doc__, "three faults; writes nothing")
    parser.add_argument("--faults", type=int, default=18)
    parser.add_argument("--timeout", type=float, default=1.0, help="timeout_s of the job")
    arguments = parser.parse_args()
    count = 3 if arguments.smoke else arguments.faults
    random.seed(0)
    load = os.getloadavg()[0]
    with namespaces.star(MEMBERS) as hosts:
        hosts.route()
        job = Job(hosts, arguments.timeout)
        for index in range(MEMBERS):
            job.start(index)
        while len(job.able) < MEMBERS:
            job.watch(time.monotonic() + 1)
        job.watch(time.monotonic() + 10)
        undisturbed, _ = job.rate(time.monotonic() + 20, [])
        faults = [KINDS[index % len(KINDS)] for index in range(count)]
        disturbed, steps = job.rate(0.0, faults)
        for process, _ in job.members.values():
            process.kill()
            process.join()
    diverged = sum(len(digests) > 1 for digests in job.digests.values())
    rows = [
        ["faults: kill, freeze, cut in turn", count],
        ["timeout_s", arguments.timeout],
        ["steps committed", steps],
        ["goodput", f"{disturbed / undisturbed:.1%}"],
        ["wrong sums", job.wrong],
        ["steps with diverged parameters", diverged],
        ["hangs", job.hangs],
        ["members that raised", job.failed],
    ]
    costs = [
        [kind, *(milliseconds(took_s)[0] for took_s in job.costs_s[kind])]
        for kind in KINDS
        if job.costs_s[kind][0]
    ]
    parts = [
        table(["of 8 members", ""], rows),
        table(["median", "lost by the others", "lost by its return", "until it is back"], costs),
        f"Load average of the machine: {load:.1f} before, {os.getloadavg()[0]:.1f} after; run with "
        f"nice {os.nice(0)}.",
    ]
    print("\n\n".join(parts))
    if not arguments.smoke:
        write("soak_elastic", "An elastic job whose members are lost all the time", *parts)
    if job.wrong or diverged or job.hangs or job.failed:
        sys.exit(1)


if __name__ == "__main__":
    set_start_method("fork")
    main()

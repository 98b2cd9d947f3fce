"""What does an elastic job lose when members are killed, frozen or cut off all the time?

    python benchmarks/soak_elastic.py                 # as root; fourteen minutes
    python benchmarks/soak_elastic.py --faults 1000 --every 3  # an hour

The second writes a file of its own, without goodput. Interrupted, it writes what it has.

Eight members run in network namespaces. Every 29 s one of them is killed and started again, frozen
for a while, or cut off for a while: 8 s, or a third of the time between faults. The next one comes
when all have taken a step again. A step takes as long as its samples: each member sleeps 5 ms for
each of its own, of a batch that eight and seven divide evenly. Members compare each sum with what
it must be, and note a checksum of their parameters after each step; the parameters of one step must
be equal on all members.

Goodput is how many samples the job commits, as a share of what jobs that nobody disturbs commit in
the same time: for as long as eight members can work, one of eight, else one of seven. Both were
measured for a minute before the first fault and for one after the last. A member cannot work from a
fault until it is started again, thawed or connected. So what the dead would have done is not
counted; what the others do twice or wait for is, and so is healing. A hang is a minute without a
committed step, or one until a member that returned takes its first.

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

MEMBERS, EVERY_S, AWAY_S, SETTLE_S, HANG_S = 8, 29.0, 8.0, 5.0, 60.0
SAMPLES, BATCH, SAMPLE_S, NUMEL = 4480, 112, 0.005, 250_000
KINDS = ["kill", "freeze", "cut"]


def be_member(index: int, pid: int, timeout_s: float, pipe: connection.Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
    every_s: float
    members: dict[int, tuple[Process, connection.Connection]] = field(default_factory=dict)
    able: set[int] = field(default_factory=set)
    digests: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    committed_s: list[float] = field(default_factory=list)
    stepped_s: dict[int, float] = field(default_factory=dict)  # by member, of its last step
    costs_s: dict[str, tuple[list[float], ...]] = field(
        default_factory=lambda: {kind: ([], [], []) for kind in KINDS}
    )
    # By how many members could work.
    able_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    last_s: float = field(default_factory=time.monotonic)
    step_s: float = field(default_factory=time.monotonic)
    wrong: int = 0
    hangs: int = 0
    failed: int = 0

    def problems(self) -> dict[str, int]:
        """Return how often happened what must not."""
        return {
            "wrong sums": self.wrong,
            "steps with diverged parameters": sum(
                len(digests) > 1 for digests in self.digests.values()
            ),
            "hangs": self.hangs,
            "members that raised": self.failed,
        }

    def start(self, index: int) -> None:
        ours, theirs = Pipe()
        arguments = (index, self.hosts.pids[index], self.timeout_s, theirs)
        process = Process(target=be_member, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self.members[index] = process, ours

    def watch(self, until_s: float) -> None:
        while (now_s := time.monotonic()) < until_s:
            self.able_s[len(self.able)] += now_s - self.last_s
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

    def lose(self, kind: str, index: int) -> None:
        process, _ = self.members[index]
        self.able.discard(index)
        if kind == "kill":
            process.kill()
            process.join()
        elif kind == "freeze":
            os.kill(process.pid or 0, signal.SIGSTOP)
        else:
            for other in set(range(MEMBERS)) - {index}:
                self.hosts.cut(index, other)

    def bring_back(self, kind: str, index: int) -> None:
        """Let a lost member work again, and watch until it has taken a step."""
        self.stepped_s.pop(index, None)
        if kind == "kill":
            self.start(index)
        else:
            if kind == "freeze":
                os.kill(self.members[index][0].pid or 0, signal.SIGCONT)
            else:
                self.hosts.mend()
            self.able.add(index)
        until_s = time.monotonic() + HANG_S
        while index not in self.stepped_s and time.monotonic() < until_s:
            self.watch(time.monotonic() + 0.05)
        self.hangs += index not in self.stepped_s

    def fault(self, kind: str, index: int) -> None:
        """Let a member be away for a while, and note what that costs."""
        lost_s = time.monotonic()
        self.lose(kind, index)
        self.watch(lost_s + min(AWAY_S, self.every_s / 3))
        returns_s = time.monotonic()
        self.bring_back(kind, index)
        back_s = time.monotonic()
        end_s = max(back_s, lost_s + self.every_s)
        self.watch(end_s)
        costs = (
            self.excess_s(lost_s, returns_s),
            self.excess_s(returns_s, end_s),
            back_s - returns_s,
        )
        for known, cost in zip(self.costs_s[kind], costs, strict=True):
            known.append(cost)

    def samples_of(self, minute_s: float) -> float:
        """Return the samples per second while nothing happens to the members that there are."""
        self.watch(time.monotonic() + SETTLE_S)
        steps, start_s = len(self.digests), time.monotonic()
        self.watch(start_s + minute_s)
        return BATCH * (len(self.digests) - steps) / (time.monotonic() - start_s)

    def undisturbed(self, minute_s: float) -> dict[int, float]:
        """Return the samples per second of jobs that lose nobody, by how many members they have."""
        rates = {MEMBERS: self.samples_of(minute_s)}
        self.lose("kill", MEMBERS - 1)
        rates[MEMBERS - 1] = self.samples_of(minute_s)
        self.bring_back("kill", MEMBERS - 1)
        self.watch(time.monotonic() + SETTLE_S)
        return rates


def main() -> None:
    parser = parser_of(__doc__, "three faults; writes nothing")
    parser.add_argument("--faults", type=int, default=18)
    parser.add_argument("--timeout", type=float, default=0.5, help="timeout_s of the job")
    parser.add_argument("--every", type=float, default=EVERY_S, help="seconds between faults")
    arguments = parser.parse_args()
    count = 3 if arguments.smoke else arguments.faults
    random.seed(0)
    load = os.getloadavg()[0]
    with namespaces.star(MEMBERS) as hosts:
        hosts.route()
        job = Job(hosts, arguments.timeout, arguments.every)
        for index in range(MEMBERS):
            job.start(index)
        while len(job.able) < MEMBERS:
            job.watch(time.monotonic() + 1)
        is_measured = not arguments.smoke and arguments.every == EVERY_S
        minute_s = 60 if is_measured else 5
        before = job.undisturbed(minute_s)
        steps = len(job.digests)
        job.able_s.clear()
        for done in range(count):
            try:
                job.fault(KINDS[done % len(KINDS)], random.choice([*job.members]))
            except KeyboardInterrupt:
                count, is_measured = done, False
                break
            if done % 20 == 19:
                print(f"{done + 1} faults; {job.problems()}", flush=True)
        steps, able_s = len(job.digests) - steps, job.able_s.copy()
        after = job.undisturbed(minute_s) if is_measured else before
        for process, _ in job.members.values():
            process.kill()
            process.join()
    alone = {members: (before[members] + after[members]) / 2 for members in before}
    goodput = BATCH * steps / sum(alone[members] * able_s[members] for members in alone)
    rows = [
        ["faults: kill, freeze, cut in turn", count],
        ["timeout_s", arguments.timeout],
        ["steps committed", steps],
        *job.problems().items(),
    ]
    if is_measured:
        rows[3:3] = [
            ["goodput", f"{goodput:.1%}"],
            *(
                [
                    f"undisturbed job of {members}, before and after",
                    f"{before[members]:.1f} and {after[members]:.1f} samples/s",
                ]
                for members in alone
            ),
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
    if is_measured:
        write("soak_elastic", "An elastic job whose members are lost all the time", *parts)
    elif not arguments.smoke:
        write("soak_elastic_faults", "An elastic job that loses a member every few seconds", *parts)
    if any(job.problems().values()):
        sys.exit(1)


if __name__ == "__main__":
    set_start_method("fork")
    main()

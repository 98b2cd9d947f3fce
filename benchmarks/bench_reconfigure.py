"""How long a group takes to lose a member and go on, and to form; and what that leaves behind.

    python benchmarks/bench_reconfigure.py            # about four minutes
    python benchmarks/bench_reconfigure.py --smoke    # a few kills; writes nothing

Members sum 1 MB all the time. One of them, drawn at random, is killed. The others leave its handle
out, reconfigure, and sum again; nobody else tells them who is lost. A new process takes its place.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from report import milliseconds, parser_of, resident_bytes, table, write

from torchrelay._group import Op
from torchrelay._members import Member
from torchrelay.errors import PeerLostError

TIMEOUT_S = 60.0
NUMEL = 250_000
HOSTS = {"2, one host": "aa", "8, one host": "aaaaaaaa", "8, two hosts": "aaaabbbb"}


def check_sum(member: Member) -> None:
    assert member.group is not None and member.configuration is not None
    source = torch.full((NUMEL,), member.configuration.rank + 1.0)
    total = torch.empty(NUMEL)
    member.group.all_reduce(total, source, Op.SUM, TIMEOUT_S)
    assert total.eq(sum(range(1, member.configuration.size + 1))).all()


def go_on(member: Member) -> float:
    """Sum until a member is lost; return when the others have their next sum."""
    handles: tuple[str, ...] = ()
    try:
        while True:
            check_sum(member)
    except PeerLostError as error:
        assert member.configuration is not None
        formed = member.configuration
        handles = tuple(
            handle for rank, handle in enumerate(formed.handles) if rank not in error.ranks
        )
        uuid = formed.uuid + 1
    member.reconfigure(uuid, handles, TIMEOUT_S)
    check_sum(member)
    return time.monotonic()


def remains() -> tuple[int, int, int, int]:
    """Descriptors, threads, segments, and resident bytes that are no file's."""
    gc.collect()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    segments = sum(
        "torchrelay-group" in line for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return descriptors, threading.active_count(), segments, resident_bytes("RssAnon")


def be_member(host: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHRELAY_HOST_ID"] = host
    with Member() as member:
        pipe.send(member.handle)
        while True:
            command, uuid, handles = pipe.recv()
            started_s = time.monotonic()
            if command == "form":
                member.reconfigure(uuid, handles, TIMEOUT_S)
                took_s = time.monotonic() - started_s
                check_sum(member)
                pipe.send(took_s)
            elif command == "go on":
                pipe.send(go_on(member))
            elif command == "remains":
                member.reconfigure(uuid, [member.handle], TIMEOUT_S)
                pipe.send(remains())
            else:
                return


@dataclass
class Pool:
    """Processes that are members, and their pipes."""

    hosts: str
    uuid: int = 0
    processes: list[multiprocessing.Process] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)
    handles: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for host in self.hosts:
            self.add(host)

    def add(self, host: str) -> None:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.Process(target=be_member, args=(host, theirs), daemon=True)
        process.start()
        self.processes.append(process)
        self.pipes.append(ours)
        self.handles.append(ours.recv())

    def tell(self, command: str) -> None:
        self.uuid += 2
        for index, pipe in enumerate(self.pipes):
            uuid = self.uuid if command == "form" else -1000 * self.uuid - index
            pipe.send((command, uuid, self.handles))

    def form(self) -> float:
        """Form a group of all; return the time of the slowest."""
        self.tell("form")
        took_s: list[float] = [pipe.recv() for pipe in self.pipes]
        return max(took_s)

    def kill(self, index: int) -> float:
        """Kill a member while all sum; return the time until the last of the others has a sum."""
        self.tell("go on")
        time.sleep(random.uniform(0.05, 0.15))
        killed_s = time.monotonic()
        victim, pipe = self.processes.pop(index), self.pipes.pop(index)
        self.handles.pop(index)
        os.kill(victim.pid or 0, signal.SIGKILL)
        ended_s: list[float] = [each.recv() for each in self.pipes]
        victim.join()
        pipe.close()
        return max(ended_s) - killed_s

    def close(self) -> None:
        self.tell("end")
        for process in self.processes:
            process.join()


def main() -> None:
    parser = parser_of(__doc__, "a few of all; writes nothing")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--reconfigurations", type=int, default=200)
    arguments = parser.parse_args()
    kills, reconfigurations = arguments.kills, arguments.reconfigurations
    if arguments.smoke:
        kills, reconfigurations = 3, 10
    torch.set_num_threads(1)
    random.seed(0)
    rows, grown = [], []
    load = os.getloadavg()[0]
    for name, placement in HOSTS.items():
        hosts = placement
        pool = Pool(hosts)
        pool.form()
        killed = []
        for _ in range(kills):
            index = random.randrange(len(hosts))
            killed.append(pool.kill(index))
            hosts = hosts[:index] + hosts[index + 1 :] + hosts[index]
            pool.add(hosts[-1])
            pool.form()
        for _ in range(5):
            pool.form()
        pool.tell("remains")
        before = [pipe.recv() for pipe in pool.pipes]
        formed = [pool.form() for _ in range(reconfigurations)]
        pool.tell("remains")
        after = [pipe.recv() for pipe in pool.pipes]
        pool.close()
        rows += [
            [name, "kill to the next right sum of all others", len(killed), *milliseconds(killed)],
            [name, "reconfigure, slowest member", len(formed), *milliseconds(formed)],
        ]
        differences = [
            [late - early for early, late in zip(*pair, strict=True)]
            for pair in zip(before, after, strict=True)
        ]
        more = [max(column) for column in zip(*differences, strict=True)]
        grown.append([name, reconfigurations, *more[:3], f"{more[3] / 1024:.0f} KiB"])
    header = ["members", "what", "times", "median", "p99", "most"]
    left = ["members", "reconfigurations", "descriptors", "threads", "segments", "memory"]
    parts = [
        table(header, rows),
        "More than before, in the member where it is most:",
        table(left, grown),
        f"Load average of the machine: {load:.1f} before, {os.getloadavg()[0]:.1f} after; run with "
        f"nice {os.nice(0)}.",
    ]
    print("\n\n".join(parts))
    if not arguments.smoke:
        write("reconfigure", "Groups that lose a member and go on", *parts)


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    main()

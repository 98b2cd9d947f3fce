"""Does the parameter manager lose, double or leak anything, when its links are slow and its workers
die?

First, nodes are started again and again, 2, 3 and 4 of them, and must come up, agree and leave
cleanly. Then the nodes' workers push, pull, set and announce random keys over links that delay,
reorder and duplicate, while workers are killed (SIGKILL) and started again. Each worker counts in a
file what it began to push, and what was acknowledged; in the end every count at every node must lie
between the two, which are equal for who was never killed. Exits with an error, and says what is
wrong, if anything is. By default the rows have optimizer state, so that nodes also lend them.

``python benchmarks/soak_parameters.py`` takes 12 minutes; ``--seconds`` and ``--starts`` make it
shorter.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch
import torch.distributed as dist

from torchrelay import _native, config
from torchrelay.parameters import UpdateRule
from torchrelay.parameters._server import Server
from torchrelay.parameters._topology import Topology, topology_of
from torchrelay.parameters._worker import AccessHandle, Worker
from torchrelay.world import Ranks

Keys = np.ndarray[Any, np.dtype[np.int64]]

PUSHED_KEYS, SET_KEYS = 2000, 120
ROWS = PUSHED_KEYS + SET_KEYS
BATCH, LOOKAHEAD, MOST_UNFINISHED = 48, 4, 32
TIMEOUT_S = 120.0
# Adagrad whose steps subtract the gradient exactly: beside such an eps, the root of the state is
# nothing.
RULES = {"add": UpdateRule("add"), "adagrad": UpdateRule("adagrad", lr=2.0**40, eps=2.0**40)}
MAX_DELAY_S, DUPLICATES = 0.02, 0.02
FEWEST_FDS_LOST, LEAST_LEAK_BYTES = 16, 24 << 20  # less is noise
LATE_THREADS = 1  # plain sockets start one when a socket is first full

_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Plan:
    """A job: ``nodes`` nodes of ``members`` workers each, the first of which serves its node."""

    nodes: int
    members: int
    port: int
    folder: str
    delayed: bool
    rule: str = "add"

    @property
    def size(self) -> int:
        return self.nodes * self.members

    def store(self, *, master: bool = False) -> dist.Store:
        timeout = timedelta(seconds=TIMEOUT_S)
        return dist.TCPStore("127.0.0.1", self.port, is_master=master, timeout=timeout)

    def topology(self, rank: int, store: dist.Store) -> Topology:
        settings = config.Parameters(timeout_s=TIMEOUT_S, max_unfinished=MOST_UNFINISHED)
        topology = topology_of(
            Ranks(store, rank, self.size),
            "127.0.0.1",
            node_of_rank=lambda other: other // self.members,
            settings=settings,
        )
        if self.delayed and topology.network is not None:
            topology.network = _delayed(topology.network, seed=rank)
        return topology

    def journal(self, rank: int) -> Journal:
        counts = np.memmap(Path(self.folder) / f"{rank}.journal", np.int64, "r+", shape=(3, ROWS))
        return Journal(counts[0], counts[1], counts[2, :3])


def _delayed(network: Callable[[], _native.Network], seed: int) -> Callable[[], _native.Network]:
    return lambda: _native.DelayedNetwork(network(), MAX_DELAY_S, DUPLICATES, seed)


@dataclass(frozen=True)
class Journal:
    """What a worker did so far, in a file that outlives it: updates by key, and pushes, pulls and
    sets.
    """

    begun: Keys
    acknowledged: Keys
    operations: Keys


class Load:
    """One worker's random accesses. Column ``rank`` of a row counts this worker's pushes to it."""

    def __init__(self, plan: Plan, rank: int, server: Server, worker: Worker) -> None:
        self.plan, self.rank, self.server, self.worker = plan, rank, server, worker
        self.journal = plan.journal(rank)
        self.random = np.random.default_rng((rank, os.getpid()))
        self.announced = deque([self.batch() for _ in range(LOOKAHEAD)])
        self.unfinished: deque[tuple[AccessHandle | None, Keys]] = deque()
        self.ones = np.zeros((BATCH, plan.size), dtype=np.float32)
        self.ones[:, rank] = 1 if plan.rule == "add" else -1  # gradients are subtracted

    def batch(self) -> Keys:
        return (PUSHED_KEYS * self.random.random(BATCH) ** 3).astype(np.int64)

    def step(self) -> None:
        upcoming = self.batch()
        self.worker.intent(upcoming, self.worker.current_clock() + LOOKAHEAD)
        self.announced.append(upcoming)
        keys = self.announced.popleft()
        if self.random.random() < 0.3:
            keys = self.batch()  # nobody expects these
        chance = self.random.random()
        if chance < 0.45:
            self.push(keys, wait=True)
        elif chance < 0.75:
            self.push(keys, wait=False)
        elif chance < 0.95 or self.rank % self.plan.members != 0:
            self.pull(keys)
        elif chance < 0.998:
            self.set()
        else:
            self.worker.wait_sync()
        self.worker.advance_clock()

    def push(self, keys: Keys, *, wait: bool) -> None:
        np.add.at(self.journal.begun, keys, 1)
        handle = self.worker.push(keys, self.ones, not wait)
        self.journal.operations[0] += 1
        self.unfinished.append((handle, keys))
        while self.unfinished:
            handle, pushed = self.unfinished[0]
            if handle is not None and not handle.is_completed():
                break
            np.add.at(self.journal.acknowledged, pushed, 1)
            self.unfinished.popleft()

    def pull(self, keys: Keys) -> None:
        out = np.empty((BATCH, self.plan.size), dtype=np.float32)
        least = self.journal.acknowledged[keys].copy()
        self.worker.pull(keys, out)
        self.journal.operations[1] += 1
        mine = out[:, self.rank]
        wrong = (mine < least) | (mine > self.journal.begun[keys])
        if wrong.any():
            key = keys[wrong][0]
            raise AssertionError(
                f"rank {self.rank} pulled {mine[wrong][0]:g} of its own pushes to key {key}, of "
                f"which {least[wrong][0]} were acknowledged and {self.journal.begun[key]} begun"
            )

    def set(self) -> None:
        """Only workers that are never killed set: a set of the dead may arrive late, and a later
        one count less.
        """
        mine = (
            PUSHED_KEYS
            + self.rank
            + self.plan.size * self.random.integers(SET_KEYS // self.plan.size)
        )
        number = self.journal.begun[mine] + 1
        self.journal.begun[mine] = number
        self.worker.set(np.array([mine]), np.full((1, self.plan.size), number, dtype=np.float32))
        self.journal.acknowledged[mine] = number
        self.journal.operations[2] += 1

    def finish(self) -> None:
        self.worker.wait_all()
        for _, keys in self.unfinished:
            np.add.at(self.journal.acknowledged, keys, 1)
        self.unfinished.clear()
        self.worker.wait_sync()


def usage() -> dict[str, int]:
    """What this process holds: descriptors, threads, shared segments, private memory in bytes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "segments": Path("/proc/self/maps").read_text().count("memfd:torchrelay"),
        "bytes": int(status["RssAnon"].split()[0]) << 10,
    }


def run_worker(plan: Plan, rank: int) -> None:
    """One life of one worker: loads until the store says stop, then shows what it sees of all
    keys.
    """
    torch.set_num_threads(1)
    store = plan.store()
    server = Server(
        ROWS, length=plan.size, rule=RULES[plan.rule], topology=plan.topology(rank, store)
    )
    worker = Worker(rank % plan.members, server)
    load = Load(plan, rank, server, worker)
    leads = rank % plan.members == 0
    next_look_s = 0.0
    stop = False
    while not stop:
        load.step()
        if time.monotonic() > next_look_s:
            next_look_s = time.monotonic() + 0.25
            stop = store.check(["stop"])
            if leads:
                with (Path(plan.folder) / f"{rank}.usage").open("a") as file:
                    file.write(json.dumps({"s": time.monotonic(), **usage()}) + "\n")
    load.finish()
    store.add("finished", 1)
    while store.add("finished", 0) < plan.size:
        time.sleep(0.05)
    if leads:
        seen = np.empty((ROWS, plan.size), dtype=np.float32)
        worker.pull(np.arange(ROWS), seen)
        np.save(Path(plan.folder) / f"{rank}.seen.npy", seen)
        statistics = {"protocol_errors": 0.0, **server.statistics()}
        (Path(plan.folder) / f"{rank}.statistics").write_text(json.dumps(statistics))
    worker.close()
    server.close()


def run_start(plan: Plan, rank: int) -> None:
    """Comes up, counts everybody once, leaves."""
    torch.set_num_threads(1)
    server = Server(100, length=1, topology=plan.topology(rank, plan.store()))
    worker = Worker(0, server)
    keys = np.arange(100)
    worker.push(keys, np.ones(100, dtype=np.float32))
    worker.barrier()
    out = np.empty(100, dtype=np.float32)
    worker.pull(keys, out)
    worker.barrier()
    worker.close()
    server.close()
    assert (out == plan.size).all(), f"rank {rank} of {plan.size} sees {out}"


def spawn(target: Callable[[Plan, int], None], plan: Plan, rank: int) -> BaseProcess:
    process = _context.Process(target=target, args=(plan, rank))
    process.start()
    return process


def joined(processes: list[BaseProcess], timeout_s: float = TIMEOUT_S) -> list[str]:
    """Waits for all; what went wrong."""
    deadline = time.monotonic() + timeout_s
    wrong = []
    for rank, process in enumerate(processes):
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
            wrong.append(f"rank {rank} did not end within {timeout_s:g} s")
        elif process.exitcode != 0:
            wrong.append(f"rank {rank} ended with {process.exitcode}")
    return wrong


def starts(count: int) -> tuple[list[float], list[str]]:
    """Seconds from first to last sign of life of each of ``count`` jobs of 2, 3, 4, 2 ... nodes;
    what went wrong.
    """
    seconds, wrong = [], []
    for number in range(count):
        with tempfile.TemporaryDirectory() as folder:
            plan = Plan(2 + number % 3, 1, report.free_port(), folder, delayed=False)
            store = plan.store(master=True)
            started = time.monotonic()
            problems = joined([spawn(run_start, plan, rank) for rank in range(plan.size)])
            seconds.append(time.monotonic() - started)
            wrong += [f"start {number} of {plan.nodes} nodes: {problem}" for problem in problems]
            del store
    return seconds, wrong


@dataclass
class Outcome:
    """Of one soak."""

    seconds: float
    kills: int = 0
    operations: dict[str, int] = field(default_factory=dict)
    acknowledged: int = 0  # key updates
    in_flight: int = 0  # of those killed: begun, never acknowledged
    arrived: int = 0  # of these
    usage: list[str] = field(default_factory=list)
    statistics: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def soak(seconds: float, nodes: int, members: int, rule: str) -> Outcome:
    """Random load, while workers that serve nobody are killed and started again."""
    outcome = Outcome(seconds)
    chance = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(nodes, members, report.free_port(), folder, True, rule)
        for rank in range(plan.size):
            np.zeros((3, ROWS), dtype=np.int64).tofile(Path(folder) / f"{rank}.journal")
        store = plan.store(master=True)
        processes = [spawn(run_worker, plan, rank) for rank in range(plan.size)]
        end_s = time.monotonic() + seconds
        mortal = [rank for rank in range(plan.size) if rank % members != 0]
        while time.monotonic() < end_s and not outcome.wrong:
            time.sleep(chance.uniform(0.3, 1.5))
            outcome.wrong += [
                f"rank {rank} ended with {process.exitcode}"
                for rank, process in enumerate(processes)
                if process.exitcode is not None
            ]
            if not mortal or outcome.wrong:
                continue
            rank = chance.choice(mortal)
            killed = processes[rank]
            assert killed.pid is not None
            os.kill(killed.pid, signal.SIGKILL)
            killed.join()
            outcome.kills += 1
            time.sleep(chance.uniform(0, 0.3))
            processes[rank] = spawn(run_worker, plan, rank)
        store.set("stop", "")
        outcome.wrong += joined(processes)
        if not outcome.wrong:
            verify(plan, outcome)
    return outcome


def verify(plan: Plan, outcome: Outcome) -> None:
    """Compares what the nodes hold with what the workers did."""
    leaders = range(0, plan.size, plan.members)
    seen = [np.load(Path(plan.folder) / f"{rank}.seen.npy") for rank in leaders]
    for rank, other in zip(leaders, seen, strict=True):
        if not np.array_equal(other, seen[0]):
            outcome.wrong.append(f"after wait_sync, rank {rank} sees other values than rank 0")
    operations = np.zeros(3, dtype=np.int64)
    for rank in range(plan.size):
        journal = plan.journal(rank)
        operations += journal.operations
        begun, sure = journal.begun[:PUSHED_KEYS], journal.acknowledged[:PUSHED_KEYS]
        found = seen[0][:PUSHED_KEYS, rank].astype(np.int64)
        lost, doubled = np.maximum(sure - found, 0).sum(), np.maximum(found - begun, 0).sum()
        if lost or doubled:
            outcome.wrong.append(f"rank {rank}: {lost} updates lost, {doubled} doubled")
        if rank in leaders and not np.array_equal(begun, sure):
            outcome.wrong.append(
                f"rank {rank} was never killed, but has updates that were not acknowledged"
            )
        outcome.acknowledged += int(sure.sum())
        outcome.in_flight += int((begun - sure).sum())
        outcome.arrived += int((found - sure).sum())
        mine = np.arange(PUSHED_KEYS + rank, ROWS, plan.size)
        if rank in leaders and (seen[0][mine, 0] != journal.acknowledged[mine]).any():
            outcome.wrong.append(f"rank {rank}: a set was lost")
    outcome.operations = dict(zip(("pushes", "pulls", "sets"), operations.tolist(), strict=True))
    for rank in leaders:
        outcome.usage.append(leaks(plan, rank, outcome.wrong))
        statistics = json.loads((Path(plan.folder) / f"{rank}.statistics").read_text())
        for name, value in statistics.items():
            outcome.statistics[name] = outcome.statistics.get(name, 0) + value


def leaks(plan: Plan, rank: int, wrong: list[str]) -> str:
    """What the node's serving process held after a fifth of the time, and at the end."""
    lines = (Path(plan.folder) / f"{rank}.usage").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    fifth = max(1, len(samples) // 5)
    early, late = samples[fifth : 2 * fifth] or samples, samples[-fifth:]
    before, after = (
        {name: np.median([s[name] for s in part]) for name in usage()} for part in (early, late)
    )
    more = {name: after[name] - before[name] for name in after}
    if more["fds"] > FEWEST_FDS_LOST or more["threads"] > LATE_THREADS or more["segments"] > 0:
        wrong.append(
            f"rank {rank} leaks descriptors, threads or segments: {before} early, {after} late"
        )
    if more["bytes"] > max(LEAST_LEAK_BYTES, 0.2 * before["bytes"]):
        wrong.append(f"rank {rank} leaks memory: {before} early, {after} late")
    return (
        f"node {rank // plan.members}: {before['fds']:.0f} then {after['fds']:.0f} descriptors, "
        f"{before['threads']:.0f} then {after['threads']:.0f} threads, {before['segments']:.0f} "
        f"then {after['segments']:.0f} segments, {before['bytes'] / 1e6:.0f} then "
        f"{after['bytes'] / 1e6:.0f} MB private memory"
    )


def started(seconds: list[float], wrong: list[str]) -> str:
    bad = len({problem.split(":")[0] for problem in wrong})
    return (
        f"{len(seconds) - bad} of {len(seconds)} starts of 2 to 4 nodes were clean; from fork to "
        f"exit {np.median(seconds):.1f} s in the median, {max(seconds):.1f} s at most."
    )


def described(outcome: Outcome, nodes: int, members: int) -> list[str]:
    counted = outcome.operations
    return [
        f"{outcome.seconds:.0f} s of random load on {nodes} nodes of {members} workers, links "
        f"delayed by up to {MAX_DELAY_S * 1e3:g} ms (so reordered) and {DUPLICATES:.0%} of "
        f"messages duplicated; {outcome.kills} workers killed and started again.",
        report.table(
            ["counted", ""],
            [
                [
                    "pushes, pulls, sets (batches)",
                    ", ".join(f"{counted.get(n, 0):,}" for n in counted),
                ],
                ["updates of keys acknowledged", f"{outcome.acknowledged:,}"],
                ["of the killed: under way, not acknowledged", f"{outcome.in_flight:,}"],
                ["of these, arrived", f"{outcome.arrived:,}"],
                ["lost, doubled, wrong reads", "none" if not outcome.wrong else "see below"],
                *[
                    [name.replace("_", " "), f"{outcome.statistics.get(name, 0):,.0f}"]
                    for name in (
                        "relocations",
                        "replicas_made",
                        "refreshes",
                        "duplicates",
                        "protocol_errors",
                    )
                ],
            ],
        ),
        "What each node's serving process held, early and at the end:\n\n"
        + "\n".join(f"- {line}" for line in outcome.usage),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="of random load")
    parser.add_argument("--starts", type=int, default=50, help="of nodes, before that")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--members", type=int, default=2, help="workers of a node")
    parser.add_argument("--rule", choices=RULES, default="adagrad", help="of pushes")
    parser.add_argument("--write", action="store_true", help="the results file")
    arguments = parser.parse_args()
    _context.set_forkserver_preload(["torch", "torch.distributed", "torchrelay.parameters"])
    parts: list[str] = []
    wrong: list[str] = []
    if arguments.starts:
        seconds, wrong = starts(arguments.starts)
        parts.append(started(seconds, wrong))
    if arguments.seconds:
        outcome = soak(arguments.seconds, arguments.nodes, arguments.members, arguments.rule)
        parts += described(outcome, arguments.nodes, arguments.members)
        wrong += outcome.wrong
    if wrong:
        parts.append("Wrong:\n\n" + "\n".join(f"- {problem}" for problem in wrong))
    print("\n\n".join(parts))
    if arguments.write:
        report.write("parameters_soak", "The parameter manager under faults", *parts)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

"""What does an elastic job cost: to heal a member, to lose one, and in each step?

    python benchmarks/bench_elastic.py            # as root; under three minutes
    python benchmarks/bench_elastic.py --smoke    # little of each; writes nothing

- Heal: two members in network namespaces have a state, and a third one comes and gets it. All links
  have 1 Gbit/s. What counts is how long healing stops the job, checksums included.
- Kill: members on one host take steps without a computation. One, drawn at random, is killed. What
  counts is the time until all others have committed a step without it. Another takes its place.
- Step: two members on one host take steps with a small model, by `Elastic`, by
  DistributedDataParallel over sml, and by a backward pass and an all-reduce of one flat tensor.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import free_port, milliseconds, parser_of, table, write
from torch import nn

from torchrelay.training import Elastic, Step

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import namespaces

MBIT = 1000
TIMEOUT_S = 20.0


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


# --- kill


def be_killed(pipe: Connection, address: str, peers: str) -> None:
    torch.set_num_threads(1)
    model = nn.Linear(100, 100)
    with Elastic({"model": model}, address=address, peers=peers, timeout_s=TIMEOUT_S) as elastic:
        while True:
            with elastic.step() as step:
                step.reduce(model)
                time.sleep(0.01)
            if step.committed:
                pipe.send((step.size, time.monotonic()))


def committed_s(members: list[Member]) -> float:
    """Return when the last of ``members`` committed its first step with all of them."""
    first_s: dict[Connection, float] = {}
    while len(first_s) < len(members):
        for pipe in wait([member.pipe for member in members]):
            assert isinstance(pipe, Connection)
            size, now_s = pipe.recv()
            if size == len(members):
                first_s.setdefault(pipe, now_s)
    return max(first_s.values())


def kill(size: int, times: int) -> list[float]:
    """Return the times from a kill to the next step of the others."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(size)]
    peers = ",".join(addresses)
    members = [Member(be_killed, address, peers) for address in addresses]
    took_s = []
    for _ in range(times):
        committed_s(members)
        index = random.randrange(size)
        victim, address = members.pop(index), addresses.pop(index)
        killed_s = time.monotonic()
        victim.kill()
        took_s.append(committed_s(members) - killed_s)
        members.append(Member(be_killed, address, peers))
        addresses.append(address)
    for member in members:
        member.kill()
    return took_s


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
    kills, sizes = (2, [2]) if is_smoke else (10, [2, 4, 8])
    rows = [[size, *milliseconds(kill(size, kills))[:2]] for size in sizes]
    parts.append(table(["members", "kill to the next step, p50", "p99"], rows))
    rows = [[kind, *milliseconds(took)[:2]] for kind, took in step(5 if is_smoke else 100).items()]
    parts.append(table(["step of 4.2 million parameters", "p50", "p99"], rows))
    parts.append(
        f"p99 of {kills} kills is the slowest. Load average of the machine: {load:.1f} before, "
        f"{os.getloadavg()[0]:.1f} after."
    )
    print("\n\n".join(parts))
    if not is_smoke:
        write("elastic", "An elastic job: healing, kills and steps", *parts)


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    main()

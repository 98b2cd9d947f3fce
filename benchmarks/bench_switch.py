"""The aggregation switch: packets per second of both data planes, goodput against loss and of a
tree, quantization error against its bound, and a training curve with and without the switch.

    python benchmarks/bench_switch.py            # about three minutes
    python benchmarks/bench_switch.py --smoke    # one tiny iteration; writes nothing

Needs root and iproute2, and for XDP clang when torchrelay was built. Hosts are network namespaces,
each with one veth link to the namespace of the switch, on the same cores; a link passes packets one
by one, as a cable does. A "packet" is one of 256
values that comes into the switch; each goes out again once a sum is complete, to all workers. The
switch's own time is the CPU time of the UDP switch's threads, with their system calls; of the XDP
switch it is the run time of its programs as the kernel measures it, without what the driver does
before and after. Every result is checked before it is counted.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import re
import secrets
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from report import parser_of, save, subplots, table, write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import namespaces
from switch_ports import enable_gro, missing_for_xdp, within
from torchrelay.aggregation.switch import (
    DataPlane,
    SwitchClient,
    SwitchServer,
    UdpDataPlane,
    Uplink,
    XdpDataPlane,
)
from torchrelay.config import Aggregation

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "switch.png"
PLANES = ("udp", "xdp generic", "xdp native")
LOSSES = (0.0, 0.001, 0.01, 0.05)
LINK_MBIT = 1000
TREE_MBIT, NUM_RACKS, RACK_HOSTS = 200, 2, 4
EXPONENTS = range(-90, 121, 10)  # of the largest values of chunks


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    count: int  # values of a sum
    rounds: int
    workers: tuple[int, ...]
    losses: tuple[float, ...]
    chunks: int  # of each exponent
    steps: int  # of training


FULL = Size(1 << 22, 7, (1, 2, 4, 8), LOSSES, 256, 400)
SMOKE = Size(20_000, 1, (2,), LOSSES[:2], 2, 3)


@dataclass
class Switch:
    """A switch with a link to each of the hosts that ``pids`` hold, which reach it at
    ``addresses``.
    """

    server: SwitchServer
    pids: list[int]
    addresses: list[str]
    cpu_s: Callable[[], float]

    @contextlib.contextmanager
    def clients(self, window: int = 256) -> Iterator[list[SwitchClient]]:
        """One worker on each host."""
        session_id = secrets.randbits(64)
        options = Aggregation(num_worker_threads=1, max_outstanding_packets=window)

        def connect(host: int) -> SwitchClient:
            return SwitchClient(self.addresses[host], host, len(self.pids), session_id, options)

        with contextlib.ExitStack() as stack:
            yield [
                stack.enter_context(within(pid, functools.partial(connect, host)))
                for host, pid in enumerate(self.pids)
            ]


@contextlib.contextmanager
def switch(name: str, hosts: int, mbit: int = 0, loss: float = 0.0) -> Iterator[Switch]:
    """A switch of a kind in :data:`PLANES`; each packet is lost with probability ``loss`` on its
    way in, and on its way out.
    """
    with contextlib.ExitStack() as stack:
        star = stack.enter_context(namespaces.star(hosts))
        star.segment()
        if name == "xdp native":
            for pid in star.pids:
                within(pid, enable_gro)  # or the kernel's veth would not take redirected frames

        def plane() -> DataPlane:
            if name == "udp":
                return UdpDataPlane("0.0.0.0", 0, drop_ingress=loss, drop_egress=loss)
            ports = [f"port{host}" for host in range(hosts)]
            return XdpDataPlane(ports, 0, mode=name.split()[1])

        before = threads()
        if name != "udp":
            stack.enter_context(bpf_stats())
        server = stack.enter_context(SwitchServer(within(star.switch, plane)))
        if mbit:
            star.limit(mbit)
        cpu = functools.partial(threads_s, threads() - before) if name == "udp" else programs_s
        addresses = [f"10.78.{host}.1:{server.plane.port}" for host in range(hosts)]
        yield Switch(server, star.pids, addresses, cpu)


@contextlib.contextmanager
def tree() -> Iterator[Switch]:
    """A switch above those of racks; all links have the same rate."""
    with contextlib.ExitStack() as stack:
        racks, root = stack.enter_context(namespaces.racks(NUM_RACKS, RACK_HOSTS, TREE_MBIT))

        def serve(uplink: Uplink | None = None) -> SwitchServer:
            return SwitchServer(UdpDataPlane("0.0.0.0", 0), uplink=uplink)

        before = threads()
        server = stack.enter_context(within(root, serve))
        addresses = []
        for index, rack in enumerate(racks):
            uplink = Uplink(f"10.79.{index}.1:{server.plane.port}", index, NUM_RACKS)
            leaf = stack.enter_context(within(rack.switch, functools.partial(serve, uplink)))
            addresses += [f"10.80.{index}.254:{leaf.plane.port}"] * RACK_HOSTS
        cpu = functools.partial(threads_s, threads() - before)
        yield Switch(server, [pid for rack in racks for pid in rack.pids], addresses, cpu)


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def threads_s(ids: set[str]) -> float:
    """CPU time of threads of this process."""
    paths = [Path("/proc/self/task", id_, "schedstat") for id_ in ids]
    return sum(int(path.read_text().split()[0]) for path in paths if path.exists()) / 1e9


def programs_s() -> float:
    """Run time of this process's XDP programs."""
    total = 0
    for path in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found = re.search(r"prog_type:\t6\n(?s:.*)run_time_ns:\t(\d+)", path.read_text())
            total += int(found[1]) if found else 0
    return total / 1e9


@contextlib.contextmanager
def bpf_stats() -> Iterator[None]:
    """Let the kernel measure its programs' run time."""
    descriptor = ctypes.CDLL("libbpf.so.1", use_errno=True).bpf_enable_stats(0)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "bpf_enable_stats")
    try:
        yield
    finally:
        os.close(descriptor)


def sum_all(clients: list[SwitchClient], tensors: list[torch.Tensor]) -> float:
    """All-reduce ``tensors`` in place; return the seconds it took."""
    with ThreadPoolExecutor(len(clients)) as pool:
        list(pool.map(lambda _: None, clients))
        started = time.perf_counter()
        list(pool.map(SwitchClient.all_reduce, clients, tensors))
        return time.perf_counter() - started


@dataclass(frozen=True)
class Speed:
    """The rounds of one setting."""

    seconds: list[float]
    size_bytes: int
    packets: int
    switch_s: float
    retransmissions: int

    @property
    def goodput_gbit(self) -> float:
        return self.size_bytes * 8 / statistics.median(self.seconds) / 1e9

    @property
    def packets_per_s(self) -> float:
        return self.packets / sum(self.seconds)

    @property
    def own_us(self) -> float:
        """The switch's own time for a packet."""
        return self.switch_s / self.packets * 1e6


def measure(switch: Switch, size: Size, dtype: torch.dtype, window: int = 256) -> Speed:
    """Time sums of ones."""
    seconds = []
    with switch.clients(window) as clients:
        tensors = [torch.empty(size.count, dtype=dtype) for _ in clients]
        for round_ in range(size.rounds + 1):
            for tensor in tensors:
                tensor.fill_(1)
            if round_ == 1:  # the first warms up
                packets, switch_s = switch.server.stats().counts["received"], switch.cpu_s()
            seconds.append(sum_all(clients, tensors))
            assert all(bool((tensor == len(clients)).all()) for tensor in tensors), "a wrong sum"
        packets = switch.server.stats().counts["received"] - packets
        again = sum(client.stats().packets.retransmissions for client in clients)
        switch_s = switch.cpu_s() - switch_s
        return Speed(seconds[1:], size.count * dtype.itemsize, packets, switch_s, again)


def speeds(size: Size) -> dict[tuple[str, int], Speed]:
    """Of each data plane and number of workers, for int32."""
    if reason := missing_for_xdp():
        print(f"bench_switch: without XDP, {reason}")
    found = {}
    for workers in size.workers:
        for name in PLANES[:1] if reason else PLANES:
            with switch(name, workers) as one:
                found[name, workers] = measure(one, size, torch.int32)
    return found


def lossy(size: Size) -> dict[float, Speed]:
    """By probability of loss each way, for float32 of two workers on links of a limited rate."""
    found = {}
    for loss in size.losses:
        with switch("udp", 2, LINK_MBIT, loss) as one:
            found[loss] = measure(one, size, torch.float32)
    return found


def flat_and_tree(size: Size) -> dict[str, Speed]:
    """Of one switch with all hosts at its ports, and of a tree, for float32, at links of the same
    rate.
    """
    with switch("udp", NUM_RACKS * RACK_HOSTS, TREE_MBIT) as one:
        flat = measure(one, size, torch.float32, window=64)
    with tree() as one:
        return {
            "one switch": flat,
            f"{NUM_RACKS} racks below a switch": measure(one, size, torch.float32, window=64),
        }


@dataclass(frozen=True)
class Errors:
    """Of sums of chunks whose largest value is just below 2^exponent."""

    largest: float
    bound: float  # n^2 * 2^e / 2^32


def quantization(size: Size, workers: int) -> dict[int, Errors]:
    """By exponent. All but the first value of a chunk are small, or the rounding of the sum to
    float32, which is not counted, would hide the error.
    """
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([2.0**exponent for exponent in EXPONENTS]).repeat_interleave(size.chunks)
    small = torch.tensor([1.0, *[2.0**-16] * 255])
    scale = (scales[:, None] * small).flatten()
    uniform = [torch.rand(len(scale), generator=generator) * 2 - 1 for _ in range(workers)]
    tensors = [values * scale for values in uniform]
    exact = torch.stack([tensor.double() for tensor in tensors]).sum(0)
    with switch("udp", workers) as one, one.clients() as clients:
        sum_all(clients, tensors)
    rounding = exact.abs() * 2.0**-24
    errors = ((tensors[0].double() - exact).abs() - rounding).clamp(min=0)
    found = {}
    for exponent, part in zip(EXPONENTS, errors.view(len(EXPONENTS), -1), strict=True):
        found[exponent] = Errors(float(part.max()), workers**2 * math.ldexp(1, exponent - 32))
        assert found[exponent].largest <= found[exponent].bound, f"beyond the bound at {exponent}"
    return found


class NextByte(torch.nn.Module):
    """Guesses a byte from the 16 before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Embedding(256, 16),
            torch.nn.Flatten(),
            torch.nn.Linear(256, 256),
            torch.nn.GELU(),
            torch.nn.Linear(256, 256),
        )

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The loss of ``(n, 17)`` bytes."""
        return torch.nn.functional.cross_entropy(self.layers(batch[:, :-1]), batch[:, -1])


def sources() -> torch.Tensor:
    """The bytes of Python's standard library's modules."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.tensor(list(b"".join(path.read_bytes() for path in paths)))


def train(steps: int, workers: int, reduce: Callable[[list[torch.Tensor]], None]) -> list[float]:
    """Train with a batch of each worker at each step, and gradients that ``reduce`` sums in place;
    return the mean loss of the steps.

    All workers have the same gradient, so one model stands for them all.
    """
    torch.manual_seed(0)
    data, model = sources(), NextByte()
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=2e-3)
    losses = []
    for _ in range(steps):
        gradients, loss_sum = [], 0.0
        for _ in range(workers):
            first = torch.randint(len(data) - 17, (128, 1))
            loss = model(data[first + torch.arange(17)])
            found = torch.autograd.grad(loss, parameters)
            gradients.append(torch.cat([gradient.flatten() for gradient in found]))
            loss_sum += loss.item()
        reduce(gradients)
        sizes = [parameter.numel() for parameter in parameters]
        parts = torch.split(gradients[0] / workers, sizes)
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
        losses.append(loss_sum / workers)
    return losses


def training(size: Size, workers: int = 4) -> dict[str, list[float]]:
    """Losses by step, with gradients summed in float32, and by the switch."""

    def plain(gradients: list[torch.Tensor]) -> None:
        gradients[0] = torch.stack(gradients).sum(0)

    with switch("udp", workers) as one, one.clients() as clients:

        def through_switch(gradients: list[torch.Tensor]) -> None:
            sum_all(clients, gradients)
            assert all(torch.equal(gradients[0], gradient) for gradient in gradients)

        return {
            "summed in float32": train(size.steps, workers, plain),
            "summed by the switch": train(size.steps, workers, through_switch),
        }


def last(losses: list[float]) -> float:
    """The mean of the last tenth."""
    return statistics.mean(losses[-max(1, len(losses) // 10) :])


def tables(
    fast: dict[tuple[str, int], Speed],
    lost: dict[float, Speed],
    trees: dict[str, Speed],
    errors: dict[int, dict[int, Errors]],
    curves: dict[str, list[float]],
) -> list[str]:
    columns = ["data plane", "workers", "packets/s", "goodput of a worker, Gbit/s"]
    floor = LINK_MBIT / 1000
    return [
        "## Packets of 256 int32",
        table(
            [*columns, "switch's own time of a packet, us", "packets/s of a core, by that"],
            [
                [
                    name,
                    workers,
                    f"{speed.packets_per_s:,.0f}",
                    f"{speed.goodput_gbit:.2f}",
                    f"{speed.own_us:.2f}",
                    f"{1e6 / speed.own_us:,.0f}",
                ]
                for (name, workers), speed in fast.items()
            ],
        ),
        f"## Goodput against loss\n\nTwo workers, float32, links of {LINK_MBIT} Mbit/s, udp.",
        table(
            ["lost each way", "goodput, Gbit/s", "of the link", "of lossless", "sent again"],
            [
                [
                    f"{loss:.1%}",
                    f"{speed.goodput_gbit:.3f}",
                    f"{speed.goodput_gbit / floor:.0%}",
                    f"{speed.goodput_gbit / lost[0.0].goodput_gbit:.0%}",
                    f"{speed.retransmissions:,}",
                ]
                for loss, speed in lost.items()
            ],
        ),
        f"## A tree of switches\n\n{NUM_RACKS * RACK_HOSTS} workers, float32, udp, all links of "
        f"{TREE_MBIT} Mbit/s.",
        table(
            ["switches", "goodput, Gbit/s", "of the link"],
            [
                [
                    name,
                    f"{speed.goodput_gbit:.3f}",
                    f"{speed.goodput_gbit / TREE_MBIT * 1000:.0%}",
                ]
                for name, speed in trees.items()
            ],
        ),
        "## Error of a sum of float32, against its bound n^2 * 2^e / 2^32\n\nUniform values, of "
        f"each chunk one up to 2^e and the others up to 2^(e-16), e from {min(EXPONENTS)} to "
        f"{max(EXPONENTS)}.",
        table(
            ["workers", "largest error / bound", "largest error / 2^e"],
            [
                [
                    workers,
                    f"{max(one.largest / one.bound for one in by_exponent.values()):.0%}",
                    f"{max(x.largest / 2.0**e for e, x in by_exponent.items()):.1e}",
                ]
                for workers, by_exponent in errors.items()
            ],
        ),
        "## Training with and without the switch\n\nNext byte of the standard library's sources, "
        f"4 workers, {len(next(iter(curves.values())))} steps of Adam.",
        table(
            ["gradients", "first loss", "loss, mean of the last tenth"],
            [[name, f"{one[0]:.4f}", f"{last(one):.4f}"] for name, one in curves.items()],
        ),
    ]


def plot(
    fast: dict[tuple[str, int], Speed],
    lost: dict[float, Speed],
    errors: dict[int, dict[int, Errors]],
    curves: dict[str, list[float]],
    path: Path,
) -> None:
    """A panel for each table."""
    figure, ((top, loss_axis), (error, curve)) = subplots(2, 2, figsize=(10, 7))
    for name in dict.fromkeys(name for name, _ in fast):
        points = {n: 1e6 / speed.own_us for (one, n), speed in fast.items() if one == name}
        top.plot(points.keys(), points.values(), "o-", label=name)
    top.set(xlabel="workers", ylabel="packets/s of a core", ylim=(0, None), title="Packets")
    goodputs = [speed.goodput_gbit for speed in lost.values()]
    loss_axis.plot([100 * loss for loss in lost], goodputs, "o-", label="udp, 2 workers")
    loss_axis.axhline(LINK_MBIT / 1000, color="black", linestyle="--", label="link")
    loss_axis.set(xlabel="lost each way, %", ylabel="goodput, Gbit/s", ylim=(0, None))
    loss_axis.set_title("Loss")
    for workers, by_exponent in errors.items():
        found = [by_exponent[exponent].largest for exponent in EXPONENTS]
        bounds = [by_exponent[exponent].bound for exponent in EXPONENTS]
        (line,) = error.plot(EXPONENTS, found, "o", label=f"{workers} workers")
        error.plot(EXPONENTS, bounds, "--", color=line.get_color())
    error.set(xlabel="exponent of the largest value", ylabel="error of a sum", yscale="log")
    error.set_title("Quantization; dashed: the bound")
    for (name, losses), style in zip(curves.items(), ("-", ":"), strict=True):
        curve.plot(losses, style, label=name)
    curve.set(xlabel="step", ylabel="loss", title="Training, 4 workers")
    for axis in (top, loss_axis, error, curve):
        axis.legend(frameon=False)
        axis.grid(alpha=0.3)
    save(figure, path)


def main() -> None:
    smoke = parser_of(__doc__).parse_args().smoke
    if namespaces.missing():
        print(f"bench_switch: skipped, {namespaces.missing()}")
        return
    size = SMOKE if smoke else FULL
    torch.set_num_threads(1)
    fast, lost = speeds(size), lossy(size)
    errors = {workers: quantization(size, workers) for workers in ((2,) if smoke else (2, 4, 8))}
    curves = training(size)
    parts = tables(fast, lost, flat_and_tree(size), errors, curves)
    print("\n\n".join(parts))
    plot(fast, lost, errors, curves, Path(os.devnull) if smoke else IMAGE)
    if not smoke:
        notes = (__doc__ or "").split("\n\n")[-1].strip()
        write("switch", "The aggregation switch", notes, *parts)


if __name__ == "__main__":
    main()

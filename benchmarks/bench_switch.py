"""The aggregation switch: packets per second, goodput against loss, and quantization error against
its bound.

    python benchmarks/bench_switch.py            # about a minute
    python benchmarks/bench_switch.py --smoke    # one tiny iteration; writes nothing

Workers are threads of one process on the loopback interface, so they share the cores with the
switch: packets per second are those of the whole, not of the switch alone. Every result is checked
before it is counted.
"""

from __future__ import annotations

import argparse
import math
import secrets
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from report import table, write

from torchrelay.aggregation.switch import SwitchClient, SwitchOptions, SwitchServer, UdpDataPlane

ROUNDS = 7
COUNT = 1 << 22
LOSSES = (0.0, 0.001, 0.01, 0.05)
# Of the chunks' values: their spread in powers of ten.
SPREADS = (0, 3, 6)


@dataclass(frozen=True)
class Run:
    """The rounds of one setting, for ``count`` values and ``packets`` received by the switch in
    all.
    """

    seconds: list[float]
    count: int
    packets: int
    retransmissions: int

    @property
    def goodput_gbit(self) -> float:
        return self.count * 32 / statistics.median(self.seconds) / 1e9

    @property
    def packets_per_s(self) -> float:
        return self.packets / sum(self.seconds)


def run(num_workers: int, count: int, loss: float, rounds: int, dtype: torch.dtype) -> Run:
    """Time ``rounds`` sums; each packet is lost with probability ``loss``, each way."""
    session_id = secrets.randbits(64)
    options = SwitchOptions(num_worker_threads=1)
    plane = UdpDataPlane(port=0, drop_ingress=loss, drop_egress=loss)
    with SwitchServer(plane) as server, ThreadPoolExecutor(num_workers) as pool:
        address = server.address

        def connect(rank: int) -> SwitchClient:
            return SwitchClient(address, rank, num_workers, session_id, options)

        clients = list(pool.map(connect, range(num_workers)))
        tensors = [torch.ones(count, dtype=dtype) for _ in clients]
        seconds: list[float] = []
        packets = 0
        for round_ in range(rounds + 1):
            for tensor in tensors:
                tensor.fill_(1)
            before = server.stats().received
            start = time.perf_counter()
            list(
                pool.map(
                    lambda pair: pair[0].all_reduce(pair[1]), zip(clients, tensors, strict=True)
                )
            )
            if round_ > 0:  # the first warms up
                seconds.append(time.perf_counter() - start)
                packets += server.stats().received - before
            assert all(bool((tensor == num_workers).all()) for tensor in tensors), "a sum is wrong"
        again = sum(client.stats().retransmissions for client in clients)
        for client in clients:
            client.close()
    return Run(seconds, count, packets, again)


def quantization(num_workers: int, count: int, spread: int) -> tuple[float, float]:
    """Return the largest error of a sum, and the same as a part of its chunk's bound."""
    generator = torch.Generator().manual_seed(spread)
    scale = 10 ** (torch.rand(count, generator=generator) * spread)
    tensors = [torch.randn(count, generator=generator) * scale for _ in range(num_workers)]
    exact = torch.stack([tensor.double() for tensor in tensors]).sum(0)
    largest = torch.stack([tensor.abs() for tensor in tensors]).amax(0).view(-1, 256).amax(1)
    session_id = secrets.randbits(64)
    with SwitchServer(UdpDataPlane(port=0)) as server, ThreadPoolExecutor(num_workers) as pool:

        def work(rank: int) -> None:
            options = SwitchOptions(num_worker_threads=1)
            with SwitchClient(server.address, rank, num_workers, session_id, options) as client:
                client.all_reduce(tensors[rank])

        list(pool.map(work, range(num_workers)))
    error = (tensors[0].double() - exact).abs()
    bound = torch.tensor([num_workers**2 * 2.0 ** math.frexp(float(x))[1] / 2**32 for x in largest])
    rounding = exact.abs() * 2.0**-24
    part = float(((error - rounding).clamp(min=0).view(-1, 256).amax(1) / bound).max())
    assert part <= 1, f"the error is {part:g} times its bound"
    return float(error.max()), part


def timed(smoke: bool) -> Callable[[int, float, torch.dtype], Run]:
    """Return :func:`run` with the size and number of rounds of this run."""
    count, rounds = (20_000, 1) if smoke else (COUNT, ROUNDS)
    return lambda num_workers, loss, dtype: run(num_workers, count, loss, rounds, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="one tiny iteration; writes nothing")
    smoke = parser.parse_args().smoke
    measure = timed(smoke)
    speeds = []
    for num_workers in (2,) if smoke else (1, 2, 4, 8):
        for dtype in (torch.int32, torch.float32):
            result = measure(num_workers, 0.0, dtype)
            speeds.append(
                [
                    str(num_workers),
                    str(dtype),
                    f"{result.packets_per_s:,.0f}",
                    f"{result.goodput_gbit:.2f}",
                ]
            )
    losses = []
    lossless = measure(2, 0.0, torch.float32)
    for loss in LOSSES[:2] if smoke else LOSSES:
        result = measure(2, loss, torch.float32) if loss else lossless
        part = result.goodput_gbit / lossless.goodput_gbit
        losses.append(
            [
                f"{loss:.1%}",
                f"{result.goodput_gbit:.2f}",
                f"{part:.0%}",
                f"{result.retransmissions:,}",
            ]
        )
    errors = []
    for spread in SPREADS[:1] if smoke else SPREADS:
        largest, part = quantization(4, 256 * (4 if smoke else 4096), spread)
        errors.append([f"10^0 to 10^{spread}", f"{largest:.3g}", f"{part:.0%}"])
    parts = [
        table(
            ["workers", "values", "packets/s into the switch", "goodput of a worker, Gbit/s"],
            speeds,
        ),
        table(["loss each way", "goodput, Gbit/s", "of lossless", "packets sent again"], losses),
        table(["values' scale, 4 workers", "largest error", "of the chunk's bound"], errors),
    ]
    print("\n\n".join(parts))
    if not smoke:
        write("switch", "The aggregation switch", (__doc__ or "").split("\n\n")[-1].strip(), *parts)


if __name__ == "__main__":
    main()

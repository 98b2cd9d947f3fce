"""Collectives over hosts in network namespaces: ``sml``, Gloo over all ranks, the links' limit.

    python benchmarks/bench_hosts.py            # about six minutes
    python benchmarks/bench_hosts.py --smoke    # a few cases, one round; writes nothing

Needs root and iproute2. Hosts are joined by a bridge; each link has a token bucket of the given
rate each way. An aggregation switch is one more address of the bridge, so each host reaches it
through a port of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import parser_of, save, start_ranks, subplots, table, write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import namespaces
from switch_ports import within
from torchrelay.aggregation.switch import SwitchServer, UdpDataPlane

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "hosts.png"
SIZE_BYTES = 16 << 20


@dataclass(frozen=True)
class Case:
    """Ranks on hosts named by letters, joined by links of a rate each way."""

    name: str
    placement: str
    mbit: int  # 0: not limited
    switch: bool = False  # whether sml sums through an aggregation switch
    loss: float = 0.0  # of packets to the switch, and of packets from it
    window: int = 256  # packets; a window must pass the link within the packet timeout of 10 ms
    size_bytes: int = SIZE_BYTES
    messages: int = 1  # all are asynchronous, as DDP's buckets


CASES = (
    Case("2 x 2, block-wise", "aabb", 1000),
    Case("2 x 2, round-robin", "abab", 1000),
    Case("2 x 4, block-wise", "aaaabbbb", 1000),
    Case("2 x 2, block-wise", "aabb", 0),
    Case("2 x 2, block-wise, 4 x 25 MB", "aabb", 0, size_bytes=25_000_000, messages=4),
    Case("2 x 2, block-wise, switch", "aabb", 0, True),
    Case("2 x 2, block-wise, switch", "aabb", 1000, True),
    Case("8 x 1, 4 MiB, switch", "abcdefgh", 100, True, window=64, size_bytes=4 << 20),
    Case(
        "8 x 1, 4 MiB, switch, 1 % lost each way",
        "abcdefgh",
        100,
        True,
        0.01,
        window=64,
        size_bytes=4 << 20,
    ),
)


SMOKE = [case for case in CASES if case.placement == "aabb" and case.switch]

# Messages of these sizes, back to back where they are small.
SIZES = (1 << 10, 64 << 10, SIZE_BYTES)
CALLS = {1 << 10: 50, 64 << 10: 20, SIZE_BYTES: 1}


def collectives(size: int, ranks: int, group: Any) -> dict[str, Callable[[], object]]:
    """Each collective on messages of ``size`` bytes, over the ranks of ``group``."""
    whole, block = torch.ones(size // 4), torch.ones(size // 4 // ranks)
    wholes = list(whole.chunk(ranks))
    return {
        "all_reduce": lambda: dist.all_reduce(whole, dist.ReduceOp.MAX, group=group),
        "reduce": lambda: dist.reduce(whole, 1, dist.ReduceOp.MAX, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter(
            block, wholes, dist.ReduceOp.MAX, group=group
        ),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "all_gather": lambda: dist.all_gather(wholes, block, group=group),
        "all_to_all": lambda: dist.all_to_all_single(whole, whole.clone(), group=group),
    }


def time_collectives(
    gloo: Any, rounds: int, sizes: Sequence[int]
) -> dict[str, dict[str, list[float]]]:
    """Seconds per call of each collective and size, by backend."""
    times: dict[str, dict[str, list[float]]] = {}
    for size in sizes:
        ranks = dist.get_world_size()
        rivals = {name: collectives(size, ranks, g) for name, g in (("sml", None), ("gloo", gloo))}
        for operation in rivals["sml"]:
            times[f"{operation} {size}"] = {name: [] for name in rivals}
            for round_ in range(rounds + 1):
                for name, calls in rivals.items():
                    dist.barrier()
                    started = time.perf_counter()
                    for _ in range(CALLS[size]):
                        calls[operation]()
                    dist.barrier()
                    if round_ > 0:
                        took_s = (time.perf_counter() - started) / CALLS[size]
                        times[f"{operation} {size}"][name].append(took_s)
    return times


def rank_main(
    rank: int,
    case: Case,
    hosts: namespaces.Hosts,
    path: str,
    rounds: int,
    switch: str,
    sizes: Sequence[int],
) -> None:
    """Time both backends in turn; rank 0 writes the seconds to ``path``.times."""
    placement = case.placement
    namespaces.enter(hosts.pids["abcdefgh".index(placement[rank])])
    os.environ.update(
        TORCHRELAY_HOST_ID=placement[rank],
        TORCHRELAY_TRANSPORT_INTERFACE="eth0",
        GLOO_SOCKET_IFNAME="eth0",
    )
    if switch:
        os.environ["TORCHRELAY_AGGREGATION_SWITCH"] = switch
        os.environ["TORCHRELAY_AGGREGATION_MAX_OUTSTANDING_PACKETS"] = str(case.window)
    import torchrelay.aggregation  # noqa: F401, PLC0415 - registers the backend

    torch.set_num_threads(1)
    store = dist.FileStore(path, len(placement))
    dist.init_process_group("sml", store=store, rank=rank, world_size=len(placement))
    gloo = dist.new_group(backend="gloo")
    tensors = [torch.ones(case.size_bytes // 4) for _ in range(case.messages)]
    times: dict[str, Any] = {"sml": [], "gloo": []}
    if sizes:
        times = time_collectives(gloo, rounds, sizes)
    for round_ in range(0 if sizes else rounds + 1):
        for name, group in (("sml", None), ("gloo", gloo)):
            for tensor in tensors:
                tensor.fill_(1.0)
            dist.barrier()
            started = time.perf_counter()
            works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
            for work in works:
                work.wait()
            dist.barrier()
            if round_ > 0:
                times[name].append(time.perf_counter() - started)
            for tensor in tensors:  # sums of a switch are quantized
                assert torch.allclose(tensor, torch.tensor(float(len(placement))))
    if rank == 0:
        Path(f"{path}.times").write_text(json.dumps(times))
    dist.destroy_process_group()


def run(case: Case, rounds: int, sizes: Sequence[int] = ()) -> dict[str, Any]:
    """Seconds per all_reduce of each backend, or of each collective and any of ``sizes``."""
    with (
        tempfile.TemporaryDirectory() as folder,
        namespaces.switched(len(set(case.placement))) as hosts,
        contextlib.ExitStack() as stack,
    ):
        switch = ""
        if case.switch:
            address, loss = hosts.address_switch(), case.loss
            plane = within(
                hosts.switch, lambda: UdpDataPlane(address, 0, drop_ingress=loss, drop_egress=loss)
            )
            switch = stack.enter_context(SwitchServer(plane)).address
        if case.mbit:
            hosts.limit(case.mbit)
        path = f"{folder}/store"
        arguments = (case, hosts, path, rounds, switch, sizes)
        start_ranks(rank_main, arguments, len(case.placement))
        return json.loads(Path(f"{path}.times").read_text())  # type: ignore[no-any-return]


def plot(found: list[tuple[Case, float, float]], path: Path) -> None:
    """Bars of both backends' times over the floor, where links have a rate."""
    limited = [(case, sml, gloo) for case, sml, gloo in found if case.mbit]
    figure, axis = subplots(figsize=(9, 3.8))
    sml_times = [sml / floor_s(case) for case, sml, _ in limited]
    gloo_times = [gloo / floor_s(case) for case, _, gloo in limited]
    for offset, name, heights in ((-0.2, "sml", sml_times), (0.2, "Gloo", gloo_times)):
        axis.bar([place + offset for place in range(len(limited))], heights, 0.4, label=name)
    axis.axhline(1, color="black", linestyle="--", label="the message at the link's rate")
    names = [f"{case.name.replace(', ', chr(10))}\n{case.mbit} Mbit/s" for case, _, _ in limited]
    axis.set_xticks(range(len(limited)), names, fontsize=8)
    axis.set(ylabel="time of an all_reduce / floor", title=f"{SIZE_BYTES >> 20} MiB float32")
    axis.legend(frameon=False)
    save(figure, path)


def floor_s(case: Case) -> float:
    """The time of the message at the link's rate; 0 where that is not limited."""
    return case.messages * case.size_bytes * 8 / (case.mbit * 1e6) if case.mbit else 0.0


def main() -> None:
    smoke = parser_of(__doc__, "a few cases, one round; writes nothing").parse_args().smoke
    rounds, cases, sizes = (1, SMOKE, SIZES[:2]) if smoke else (5, CASES, SIZES)
    if namespaces.missing():
        print(f"bench_hosts: skipped, {namespaces.missing()}")
        return
    rows, found = [], []
    for case in cases:
        times = run(case, rounds if case.mbit else 2 * rounds)
        sml, gloo = (statistics.median(times[key]) for key in ("sml", "gloo"))
        floor = floor_s(case)
        found.append((case, sml, gloo))
        rows.append(
            [
                case.name,
                f"{case.mbit} Mbit/s" if case.mbit else "not limited",
                f"{sml * 1e3:.0f} ms",
                f"{gloo * 1e3:.0f} ms",
                f"{sml / gloo:.2f}",
                f"{floor * 1e3:.0f} ms" if case.mbit else "-",
                f"{floor / sml:.0%}" if case.mbit else "-",
            ]
        )
        print(*rows[-1], sep=" | ", flush=True)
    header = [
        "hosts x ranks",
        "links",
        "sml",
        "Gloo",
        "sml / Gloo",
        "floor: U at the link's rate",
        "of it",
    ]
    notes = (
        f"all_reduce of {SIZE_BYTES >> 20} MiB float32, where nothing else is said, median of "
        f"{rounds}, of {2 * rounds} where links are not limited; backends in turn, a barrier at "
        "the end. 4 x 25 MB are four at once, as DDP's buckets."
    )
    others = []
    for key, times in run(Case("2 x 2", "aabb", 0), rounds, sizes).items():
        operation, size = key.split()
        sml, gloo = (statistics.median(times[name]) * 1e3 for name in ("sml", "gloo"))
        others.append(
            [operation, f"{int(size):,}", f"{sml:.2f}", f"{gloo:.2f}", f"{sml / gloo:.2f}"]
        )
    for row in others:
        print(*row, sep=" | ", flush=True)
    about = (
        "Collectives over 2 x 2 ranks, block-wise, links not limited; the size is that of the "
        "whole message; ms a call, back to back where messages are small."
    )
    other_header = ["collective", "bytes", "sml", "Gloo", "sml / Gloo"]
    plot(found, Path(os.devnull) if smoke else IMAGE)
    if not smoke:
        parts = [table(header, rows), about, table(other_header, others)]
        write("hosts", "Collectives between hosts", notes, *parts)


if __name__ == "__main__":
    main()

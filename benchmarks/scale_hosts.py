"""``sml`` over 2 to 64 hosts of one rank each, in network namespaces behind a router: start,
connections, memory, and the time of an all_reduce, with a model of it.

    python benchmarks/scale_hosts.py              # about six minutes; not part of ``make bench``
    python benchmarks/scale_hosts.py --hosts 2 4  # these only; writes nothing

Needs root and iproute2. Links have a rate each way. All hosts share the cores of this machine, so
what each host computes is waited for by all: the model counts it so. Sums are checked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import resident_bytes, table, write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import namespaces
import torchrelay.aggregation  # noqa: F401 - before the ranks are forked

HOSTS = (2, 4, 8, 16, 32, 64)
FITTED = 16  # the model is fitted to so many hosts and fewer
SIZES = (8, 64 << 10, 1 << 20, 4 << 20)
MBIT = 100
CALLS = {8: 20, 64 << 10: 5, 1 << 20: 2, 4 << 20: 1}
ROUNDS = 5


def rank_main(rank: int, hosts: namespaces.Hosts, path: str) -> None:
    """Measure as host ``rank``; each writes what it found to ``path``.``rank``."""
    namespaces.enter(hosts.pids[rank])
    os.environ["TORCHRELAY_HOST_ID"] = str(rank)
    os.environ["TORCHRELAY_TRANSPORT_INTERFACE"] = "eth0"
    torch.set_num_threads(1)
    size = len(hosts.pids)
    before = resident_bytes("RssAnon")
    started = time.perf_counter()
    store = dist.FileStore(path, size)
    dist.init_process_group("sml", store=store, rank=rank, world_size=size)
    dist.barrier()
    found: dict[str, Any] = {
        "start": time.perf_counter() - started,
        "connections": connections(),
        "bytes": resident_bytes("RssAnon") - before,
        "threads": len(os.listdir("/proc/self/task")),
    }
    for nbytes in SIZES:
        tensor, times = torch.empty(nbytes // 4), []
        for _ in range(ROUNDS + 1):
            tensor.fill_(rank)
            dist.all_reduce(tensor)
            if not tensor.eq(size * (size - 1) // 2).all():
                raise SystemExit(f"a wrong sum of {nbytes} bytes over {size} hosts")
            dist.barrier()
            started = time.perf_counter()
            for _ in range(CALLS[nbytes]):
                dist.all_reduce(tensor)
            times.append((time.perf_counter() - started) / CALLS[nbytes])
        found[str(nbytes)] = statistics.median(times[1:])
    Path(f"{path}.{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


def connections() -> int:
    """The established TCP connections of this network namespace; a socket to itself is one end."""
    lines = [
        line
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return sum(line.split()[3] == "01" for line in lines)


def run(num_hosts: int, mbit: int) -> dict[str, float]:
    """The slowest host's times, and the most of the rest that any host has."""
    with tempfile.TemporaryDirectory() as folder, namespaces.star(num_hosts) as hosts:
        # Each host has a network of its own: the kernel has one table of neighbours for all
        # namespaces, which 64 hosts on one network would fill.
        hosts.route()
        hosts.limit(mbit)
        path = f"{folder}/store"
        mp.start_processes(rank_main, (hosts, path), num_hosts, start_method="fork")  # type: ignore[no-untyped-call]
        found = [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(num_hosts)]
    return {key: max(one[key] for one in found) for key in found[0]}


def terms(hosts: int, nbytes: int, mbit: int) -> list[float]:
    """What the model adds: a constant, messages, bytes through the cores, bytes through a link."""
    link_s = 2 * (hosts - 1) / hosts * nbytes * 8 / (mbit * 1e6)
    return [1, hosts * (hosts - 1), (hosts - 1) * nbytes, link_s]


def fit(found: dict[int, dict[str, float]], mbit: int) -> Any:
    """Factors of :func:`terms`, by least squares of relative errors."""
    rows, wanted = [], []
    for hosts, measured in found.items():
        for nbytes in SIZES if hosts <= FITTED else ():
            seconds = measured[str(nbytes)]
            rows.append(np.array(terms(hosts, nbytes, mbit)) / seconds)
            wanted.append(1.0)
    return np.linalg.lstsq(np.array(rows), np.array(wanted), rcond=None)[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=HOSTS)
    parser.add_argument("--mbit", type=int, default=MBIT, help="rate of each link, each way")
    options = parser.parse_args()
    if namespaces.missing():
        print(f"scale_hosts: skipped, {namespaces.missing()}")
        return
    found = {}
    for hosts in options.hosts:
        found[hosts] = run(hosts, options.mbit)
        print(hosts, found[hosts], flush=True)
    if tuple(options.hosts) != HOSTS:
        return
    factors = fit(found, options.mbit)
    shape_rows = [
        [
            hosts,
            f"{measured['start']:.2f} s",
            int(measured["connections"]),
            int(measured["threads"]),
            f"{measured['bytes'] / 1e6:.1f} MB",
        ]
        for hosts, measured in found.items()
    ]
    time_rows = []
    for hosts, measured in found.items():
        for nbytes in SIZES:
            seconds = measured[str(nbytes)]
            expected = float(np.dot(terms(hosts, nbytes, options.mbit), factors))
            link_s = terms(hosts, nbytes, options.mbit)[3]
            time_rows.append(
                [
                    hosts,
                    f"{nbytes:,}",
                    f"{seconds * 1e3:.2f}",
                    f"{expected * 1e3:.2f}" + ("" if hosts <= FITTED else ", predicted"),
                    f"{expected / seconds:.2f}",
                    f"{link_s * 1e3:.2f}",
                ]
            )
    a, b, c, d = factors
    write(
        "hosts_scale",
        "sml over 2 to 64 hosts",
        f"Hosts are network namespaces with one rank each on a machine of {os.cpu_count()} cores; "
        f"links have {options.mbit} Mbit/s each way. Of each figure, the host that has most. The "
        "memory is what a rank has of its own more after the group is formed.",
        table(["hosts", "start of the group", "connections", "threads", "memory"], shape_rows),
        f"all_reduce, ms; median of {ROUNDS} rounds. The model, fitted to {FITTED} hosts and "
        f"fewer, for *H* hosts, *U* bytes and links of rate *R*: {a * 1e6:.0f} us + H(H-1) x "
        f"{b * 1e6:.1f} us + (H-1) U x {c * 1e9:.2f} ns + {d:.2f} x 2(H-1)/H U/R. The second and "
        "third terms are computation, here of all hosts on the same cores; on hosts of their own, "
        "each has one H-th of them. The last column is the last term with the factor 1, the floor.",
        table(["hosts", "bytes", "measured", "model", "model / measured", "floor"], time_rows),
    )


if __name__ == "__main__":
    main()

"""Differentiable MPI beside bare mpi4py, mpi4torch (if it is installed) and torch's own collectives
(gloo), on 2 ranks; and over process groups beside torch's differentiable collectives.

    python benchmarks/bench_mpi.py                              # 8 B to 64 MiB: 5 minutes
    python benchmarks/bench_mpi.py --cases Allreduce --sizes 8  # prints, and writes nothing
    python benchmarks/bench_mpi.py --smoke                      # once; writes nothing

Starts ``mpirun -n 2`` on itself. mpi4torch 0.1.3 has to be adapted to compile with torch 2.13,
whose autograd nodes are intrusive pointers. A case's result is checked before it is timed. The
rivals of a row run in turn in the same processes; a time is the slower rank's, the median over
rounds. Every call gives new memory, save ``Bcast_`` and ``Reduce_``, which overwrite. Up to 16 MiB
it mostly is memory that was freed before; of 64 MiB, whose pages are touched for the first time,
that is a large part, for every rival. Forward and backward by bare mpi4py reduces a tensor, then a
cotangent, and holds both results, as autograd does. mpi4py's calls block inside MPI, where neither
a timeout nor Ctrl-C reaches them; ours start without blocking and test.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mpi_cases import GROUP_RIVALS, Case, cases, group_cases
from report import table, write

SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
ROUNDS = 9
# How long one rival is timed in one round, and at most how often it is called.
ROUND_S = 0.04
MOST_CALLS = 1000
RIVALS = ("torchrelay", "bare mpi4py", "mpi4torch", "torch (gloo)")
GROUP_SIZES = (8, 64 << 10, 16 << 20)


class Row(NamedTuple):
    """One case at one size: seconds a call, by rival."""

    case: str
    size_bytes: int
    seconds: dict[str, float]

    @property
    def ratio(self) -> float:
        return self.seconds["torchrelay"] / self.seconds["bare mpi4py"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="one tiny iteration; writes nothing")
    parser.add_argument("--cases", nargs="+", help="names of cases, or how they begin")
    parser.add_argument("--sizes", type=int, nargs="+", help="of messages, in bytes")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    results = launch()
    rows = [Row(*each) for each in results["rows"]]
    groups = over_groups([Row(*each) for each in results["group_rows"]])
    parts = [*targets(rows), *groups, *everything(rows, results["library"])]
    print("\n\n".join(parts))
    if not (arguments.smoke or arguments.cases or arguments.sizes):
        write(
            "mpi",
            "Differentiable MPI on one host",
            (__doc__ or "").split("\n\n")[-1].strip(),
            floor(),
            *parts,
        )


def launch() -> Any:
    """Runs this script's worker on 2 ranks; returns what rank 0 measured."""
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    with tempfile.TemporaryDirectory() as folder:
        mpirun = str(Path(sys.executable).parent / "mpirun")
        worker = [sys.executable, __file__, *sys.argv[1:], "--worker", folder]
        subprocess.run([mpirun, "-n", "2", *worker], env=environ, check=True)
        return json.loads((Path(folder) / "results.json").read_text())


def work(arguments: argparse.Namespace) -> None:
    """One rank: measures, and leaves the results in the worker's folder."""
    import torch.distributed as dist  # noqa: PLC0415
    from mpi4py import MPI  # noqa: PLC0415 - only ranks start MPI

    torch.set_num_threads(1)
    bare = MPI.COMM_WORLD.Dup()
    folder = Path(bare.bcast(str(arguments.worker)))
    store = dist.FileStore(str(folder / "store"), bare.size)
    dist.init_process_group("gloo", store=store, rank=bare.rank, world_size=bare.size)
    wanted = (8, 1024) if arguments.smoke else arguments.sizes or SIZES
    rounds = 1 if arguments.smoke else ROUNDS

    def rows(given: Iterable[Case]) -> list[Row]:
        found = []
        for case in given:
            if arguments.cases is None or case.name.startswith(tuple(arguments.cases)):
                case.check()
                with torch.set_grad_enabled(case.grad):
                    found.append(Row(case.name, case.size_bytes, measure(bare, case.runs, rounds)))
        return found

    results = {
        "group_rows": rows(group_cases([size for size in GROUP_SIZES if size <= max(wanted)])),
        "rows": rows(cases(bare, wanted)),
        "library": MPI.Get_library_version().split(",")[0].splitlines()[0],
    }
    if bare.rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def measure(bare: Any, runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median over rounds of each run's seconds, the runs in turn within each round."""

    def seconds(run: Callable[[], object], count: int) -> float:
        bare.Barrier()
        start = time.perf_counter()
        for _ in range(count):
            run()
        taken: float = (time.perf_counter() - start) / count
        slowest: float = max(bare.allgather(taken))
        return slowest

    counts = {
        name: min(MOST_CALLS, int(ROUND_S / seconds(run, 3)) + 1) if rounds > 1 else 1
        for name, run in runs.items()
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run, counts[name]))
    return {name: statistics.median(taken) for name, taken in times.items()}


BOUNDS = """**What bounds them.** Of a forward and backward pass of 8 B, autograd takes about 17 µs
(`Tensor.backward`, its engine, the leaf's gradient; measured with a node of torch's own). Nodes
written in Python take 6 µs more; TorchRelay is not linked to torch. A Python node that calls
mpi4py's blocking Allreduce twice takes 27 to 32 µs. With two of ours, which are started and polled
so that they can time out, it takes 38 to 40 µs. The order of calls costs 4 µs for tokens and 8 µs
for checks of the backward pass and of torch's mode. Functions whose lengths may differ between
ranks take 10 to 15 µs more: 3 µs to exchange the lengths, the rest in Python. This overhead still
shows at 1 MiB, where mpi4py takes 60 to 110 µs, partly because Python's data have left the caches
by then. A forward and backward pass of 1 MiB exceeds two calls without gradient by more than the
50 µs of Python; so it does in mpi4torch, which is C++. No page is new and the gradient is not
copied; the cause is not known.

Rows vary between runs by up to a factor of two, those of bare mpi4py too, and reductions of 1 MiB
sometimes by four: compare within a row, and no closer than 0.2."""

GROUP_BOUNDS = """
What bounds 8 B: autograd takes what the last row takes, a node in Python with a token 3 µs more,
and the headers of both calls 3 to 4 µs. That is already 0.6 of torch's time. The rest is Python
without a hot spot: half of it the two calls and their checks, the other half the order of calls and
the checks of the backward pass."""

# What is asked for: case, size, the most seconds or a ratio to a rival, in words, and as a function
# of the row.
TARGETS: tuple[tuple[str, int, str, Callable[[Row], float | None]], ...] = (
    ("Allreduce", 8, "8 us", lambda row: 8e-6),
    ("Allreduce, forward and backward", 8, "40 us", lambda row: 40e-6),
    (
        "Allreduce, forward and backward",
        64 << 20,
        "1.1 x bare mpi4py twice",
        lambda row: 1.1 * row.seconds["bare mpi4py"],
    ),
    ("Allgather along axis 1", 8 << 20, "15 ms", lambda row: 15e-3),
    (
        "Alltoall",
        16 << 20,
        "half of mpi4torch",
        lambda row: 0.5 * row.seconds["mpi4torch"] if "mpi4torch" in row.seconds else None,
    ),
)


def targets(rows: list[Row]) -> list[str]:
    """The table of what is asked for."""
    lines = []
    for case, size_bytes, words, bound in TARGETS:
        for row in rows:
            if (row.case, row.size_bytes) == (case, size_bytes):
                most, ours = bound(row), row.seconds["torchrelay"]
                met = "not measured" if most is None else "yes" if ours <= most else "no"
                lines.append((case, human(size_bytes), *cells(row), f"at most {words}", met))
    large = [row for row in rows if row.size_bytes >= 1 << 20]
    over = [
        f"{row.case} {human(row.size_bytes)} {row.ratio:.2f}" for row in large if row.ratio > 1.1
    ]
    text = (
        f"From 1 MiB up, {len(large) - len(over)} of {len(large)} rows are within 1.1 x bare mpi4py"
    )
    header = ("case", "size", *(f"{rival}, us" for rival in RIVALS), "asked for", "met")
    summary = f"{text}{'; not: ' if over else '.'}{', '.join(over)}"
    return ["## What is asked for", table(header, lines), summary, BOUNDS]


def everything(rows: list[Row], library: str) -> list[str]:
    """The table of every case at every size."""
    header = ("case", "size", *(f"{rival}, us" for rival in RIVALS), "ratio to bare")
    lines = [(row.case, human(row.size_bytes), *cells(row), f"{row.ratio:.2f}") for row in rows]
    return [f"## Every function, 2 ranks, {library}", table(header, lines)]


def over_groups(rows: list[Row]) -> list[str]:
    """The table of process groups: a row for each rival, a column for each size."""
    header = ("Allreduce, forward and backward", *(f"{human(r.size_bytes)}, us" for r in rows))
    columns = [cells(row, GROUP_RIVALS) for row in rows]
    lines = [(name, *(column[i] for column in columns)) for i, name in enumerate(GROUP_RIVALS)]
    ratios = ", ".join(
        f"{row.seconds['torchrelay (sml)'] / row.seconds['torch.distributed.nn (sml)']:.2f} for "
        f"{human(row.size_bytes)}"
        for row in rows
    )
    text = (
        f"torchrelay takes {ratios} of the time of `torch.distributed.nn.functional.all_reduce` "
        f"over the same `sml` group.{GROUP_BOUNDS}"
    )
    return ["## Over process groups, float32, 2 ranks", table(header, lines), text]


def cells(row: Row, rivals: Sequence[str] = RIVALS) -> list[str]:
    return [f"{row.seconds[rival] * 1e6:.1f}" if rival in row.seconds else "" for rival in rivals]


def human(size_bytes: int) -> str:
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << shift:
            return f"{size_bytes >> shift} {unit}"
    return f"{size_bytes} B"


def floor() -> str:
    """What a message through shared memory cannot beat: one core's copy."""
    source = torch.ones(1 << 26, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    rate = source.numel() / min(times)
    installed = "" if importlib.util.find_spec("mpi4torch") else " mpi4torch was not installed."
    copied_ms = (1 << 26) / rate * 1e3
    return (
        f"One core copies {rate / 1e9:.1f} GB/s, 64 MiB in {copied_ms:.1f} ms: a lower bound."
        f"{installed}"
    )


if __name__ == "__main__":
    main()

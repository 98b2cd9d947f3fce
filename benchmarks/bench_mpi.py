"""Differentiable MPI beside bare mpi4py, mpi4torch (if it is installed) and torch's own collectives
(gloo), on 2 ranks; and over process groups beside torch's differentiable collectives.

    python benchmarks/bench_mpi.py                              # 8 B to 64 MiB: 5 minutes
    python benchmarks/bench_mpi.py --cases Allreduce --sizes 8  # prints, and writes nothing
    python benchmarks/bench_mpi.py --smoke                      # once; writes nothing

Starts ``mpirun -n 2`` on itself. mpi4torch 0.1.3 compiles with torch 2.13 once its source makes
autograd nodes by ``c10::make_intrusive`` instead of ``std::shared_ptr`` and ``deleteNode``. A
case's result is checked before it is timed. The rivals of a row run in turn in the same processes,
in rounds of 2 ms, or of one call that takes longer; a time is the slower rank's in the best round,
the one that other programs disturbed least. Every call gives new memory, save ``Bcast_`` and
``Reduce_``, which overwrite. Up to 16 MiB it mostly is memory that was freed before; of 64 MiB,
whose pages are touched for the first time, that is a large part, for every rival. Forward and
backward by bare mpi4py reduces a tensor, then a cotangent, and holds both results, as autograd
does. mpi4py's calls block inside MPI, where neither a timeout nor Ctrl-C reaches them; ours start
without blocking and test.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mpi_cases import GROUP_RIVALS, Case, cases, group_cases
from report import parser_of, table, write

SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
# How long one rival is timed in one round, and at least.
ROUND_S = 0.002
RIVAL_S = 0.24
FEWEST_ROUNDS, MOST_ROUNDS = 7, 100
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
    parser = parser_of(__doc__)
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

    def rows(given: Iterable[Case]) -> list[Row]:
        found = []
        for case in given:
            if arguments.cases is None or case.name.startswith(tuple(arguments.cases)):
                case.check()
                with torch.set_grad_enabled(case.grad):
                    seconds = measure(bare, case.runs, arguments.smoke)
                    found.append(Row(case.name, case.size_bytes, seconds))
        return found

    results = {
        "group_rows": rows(group_cases([size for size in GROUP_SIZES if size <= max(wanted)])),
        "rows": rows(cases(bare, wanted)),
        "library": MPI.Get_library_version().split(",")[0].splitlines()[0],
    }
    if bare.rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def measure(bare: Any, runs: dict[str, Callable[[], object]], smoke: bool) -> dict[str, float]:
    """The least over rounds of each run's seconds, the runs in turn within each round."""

    def seconds(run: Callable[[], object], count: int) -> float:
        bare.Barrier()
        start = time.perf_counter()
        for _ in range(count):
            run()
        taken: float = (time.perf_counter() - start) / count
        slowest: float = max(bare.allgather(taken))
        return slowest

    if smoke:
        return {name: seconds(run, 1) for name, run in runs.items()}
    least = {name: min(seconds(run, 3) for _ in range(3)) for name, run in runs.items()}
    counts = {name: int(ROUND_S / each) + 1 for name, each in least.items()}
    longest_s = max(counts[name] * each for name, each in least.items())
    for _ in range(max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(RIVAL_S / longest_s)))):
        for name, run in runs.items():
            least[name] = min(least[name], seconds(run, counts[name]))
    return least


BOUNDS = """**What bounds them.** Of a forward and backward pass of 8 B, autograd takes what a
node in Python without communication takes, in the next table, and the two calls what they take
without gradient. The rest is the order of calls, the checks of the backward pass, and waiting for
the other rank, which has as much to do.

At 1 KiB, a Gather of bare mpi4py takes 1.0 µs. The check of a call, an exchange of headers that
is polled so that it can time out, takes 1.3 µs; with the new tensor and the Gather itself it is
2.9 µs, 2.8 times the bare call, before any of our own Python. That takes 4 to 7 µs a call and
has no hot spot: five calls of Python from the method to the transport, and a few attributes of
tensors, at 0.05 to 0.3 µs each. It still shows at 1 MiB, where mpi4py takes 40 to 110 µs.

A forward and backward pass of 1 MiB exceeds two calls without gradient by more: glibc returns
the memory of freed results to the system, and the next pass touches new pages. With
`MALLOC_TRIM_THRESHOLD_` and `MALLOC_MMAP_THRESHOLD_` of 256 MiB, its processor time without
waiting for others is 101 µs instead of 178, and that of a multiplication and its derivative 62
instead of 104. The library leaves these settings of a process alone.

mpi4torch's nodes are in C++, compiled against one torch, and it does not compare calls: a forward
and backward pass of 8 B takes what autograd alone takes with a node of torch's. A node in Python
alone takes longer, so TorchRelay, which is not built against a torch, cannot reach it.

A row may be off by 0.2, and by more where another program ran in every round."""

GROUP_BOUNDS = """
The last two rows are autograd alone, with a node in Python and with one of torch's. At 8 B, both
take one step of the group per call: TorchRelay exchanges headers that hold the values, and torch
reduces. The rest is Python without a hot spot: a few µs a call, and as much for the order of
calls and the checks of the backward pass. At 64 KiB, TorchRelay takes two steps per call,
because calls are compared before their data moves."""

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

"""Differentiable MPI beside bare mpi4py and torch's own differentiable collectives (gloo).

``python benchmarks/bench_mpi.py`` starts ``mpirun -n 2`` on itself and writes benchmarks/results/mpi.md.
The rivals of a row run in turn, in the same processes; a row's result is checked before it is timed.
"""

# ruff: noqa: B023, PLC0415 - functions made in a loop are called in its round; only ranks import MPI
from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

RESULTS = Path(__file__).parent / "results" / "mpi.md"
SIZES = (8, 1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
Run = Callable[[], object]


def microseconds(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """The median over rounds of each run's time, the runs in turn within each round of some 50 ms a run."""
    from mpi4py import MPI

    def seconds(run: Run, count: int) -> float:
        MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - start) / count

    first = {name: max(MPI.COMM_WORLD.allgather(seconds(run, 2))) for name, run in runs.items()}
    counts = {name: min(1000, int(0.05 / each) + 1) if rounds > 1 else 1 for name, each in first.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run, counts[name]) * 1e6)
    return {name: statistics.median(t) for name, t in times.items()}


def worker(smoke: bool) -> list[str]:
    import torch.distributed as dist
    import torch.distributed.nn.functional as dist_functional
    from mpi4py import MPI

    from torchrelay import mpi

    torch.set_num_threads(1)
    comm, bare = mpi.COMM_WORLD, MPI.COMM_WORLD.Dup()
    n, r, rounds = comm.size, comm.rank, 1 if smoke else 7
    folder = bare.bcast(os.environ["TORCHRELAY_BENCH_FOLDER"])
    store = dist.FileStore(f"{folder}/store", n)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=r, world_size=n)
    torch_all_reduce: Callable[[Tensor], Tensor] = dist_functional.all_reduce
    warnings.filterwarnings(
        "ignore", category=FutureWarning
    )  # that one is deprecated, and has no successor for autograd
    lines: list[str] = []

    def row(case: str, size_bytes: int, runs: dict[str, Run], bounds: str = "") -> None:
        taken = microseconds(runs, rounds)
        bare_us = taken["bare mpi4py"]
        cells = [
            f"{taken[name]:.1f}" if name in taken else ""
            for name in ("torchrelay", "bare mpi4py", "torch gloo")
        ]
        lines.append(
            f"| {case} | {human(size_bytes)} | {' | '.join(cells)} | {taken['torchrelay'] / bare_us:.2f} | {bounds} |"
        )

    for size in SIZES[:3] if smoke else SIZES:
        x = torch.arange(size // 8, dtype=torch.float64) + r
        out = torch.empty_like(x)
        spec = (x.numpy(), MPI.DOUBLE)
        leaf = x.clone().requires_grad_()
        ones = torch.ones_like(x)

        def ours() -> Tensor:
            with torch.no_grad():
                return comm.Allreduce(x, mpi.MPI_SUM)  # type: ignore[no-any-return]

        def forward_backward() -> Tensor:
            comm.Allreduce(leaf, mpi.MPI_SUM).backward(ones)
            grad, leaf.grad = leaf.grad, None
            assert grad is not None
            return grad

        def torch_forward_backward() -> Tensor:
            torch.autograd.backward(torch_all_reduce(leaf), ones)
            grad, leaf.grad = leaf.grad, None
            assert grad is not None
            return grad

        def bare_once() -> None:
            bare.Allreduce(spec, (np.empty(size // 8), MPI.DOUBLE))

        def bare_twice() -> None:
            bare_once()
            bare_once()

        assert torch.equal(ours(), n * x - n * r + n * (n - 1) // 2)
        assert torch.equal(forward_backward(), n * ones) and torch.equal(torch_forward_backward(), n * ones)
        row(
            "Allreduce, no grad",
            size,
            {
                "torchrelay": ours,
                "bare mpi4py": bare_once,
                "torch gloo": lambda: dist.all_reduce(out),
            },
            "8 us at 8 B; ratio 1.1 from 1 MiB",
        )
        row(
            "Allreduce, forward and backward",
            size,
            {"torchrelay": forward_backward, "bare mpi4py": bare_twice, "torch gloo": torch_forward_backward},
            "40 us at 8 B; ratio 1.1 at 64 MiB",
        )

    for size in SIZES[1:3] if smoke else (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26):
        table(size, row, comm, bare)
    with torch.no_grad():
        matrix = torch.rand(1024, (1 << 10) if not smoke else 8, dtype=torch.float64)
        size = matrix.numel() * 8
        assert torch.equal(
            comm.Allgather(matrix, 1)[:, : matrix.shape[1]], torch.from_numpy(bare.bcast(matrix.numpy()))
        )
        row(
            "Allgather along axis 1",
            size,
            {
                "torchrelay": lambda: comm.Allgather(matrix, 1),
                "bare mpi4py": lambda: bare.Allgather(matrix.numpy(), np.empty((n, *matrix.shape))),
            },
            "15 ms at 8 MiB",
        )
    dist.destroy_process_group()
    return lines


def table(size: int, row: Callable[..., None], comm: object, bare: object) -> None:
    """Every collective without grad, contiguous, beside mpi4py's blocking call."""
    from mpi4py import MPI

    from torchrelay import mpi

    assert isinstance(comm, mpi.Communicator) and isinstance(bare, MPI.Intracomm)
    n, r = comm.size, comm.rank
    x = torch.rand(size // 8 // n * n, dtype=torch.float64)
    a, part = x.numpy(), x.numel() // n
    same = np.empty_like(a)

    def new(count: int) -> np.ndarray:
        return np.empty(count)

    memory = torch.zeros_like(x)
    other = (r + 1) % n
    cases: dict[str, tuple[Run, Run]] = {
        "Bcast_": (lambda: comm.Bcast_(memory, 0), lambda: bare.Bcast(same, 0)),
        "Reduce_": (
            lambda: comm.Reduce_(memory, mpi.MPI_SUM, 0),
            lambda: bare.Reduce(a, same, MPI.SUM, 0),
        ),
        "Gather": (
            lambda: comm.Gather(x, 0, 0),
            lambda: bare.Gather(a, new(n * x.numel()) if r == 0 else None, 0),
        ),
        "Allgather": (lambda: comm.Allgather(x, 0), lambda: bare.Allgather(a, new(n * x.numel()))),
        "Scatter": (lambda: comm.Scatter(x, 0, part, 0), lambda: bare.Scatter(a, new(part), 0)),
        "Alltoall": (lambda: comm.Alltoall(x, 0, 0, x.numel()), lambda: bare.Alltoall(a, new(x.numel()))),
        "Reduce_scatter": (
            lambda: comm.Reduce_scatter(x, mpi.MPI_SUM, 0, part),
            lambda: bare.Reduce_scatter(a, new(part)),
        ),
        "Scan": (lambda: comm.Scan(x, mpi.MPI_SUM), lambda: bare.Scan(a, new(x.numel()))),
        "Sendrecv": (
            lambda: comm.Sendrecv(x, other, other),
            lambda: bare.Sendrecv(a, other, 0, new(x.numel()), other, 0),
        ),
    }
    halves = x.view(n, part)
    cases["Alltoall"] = (lambda: comm.Alltoall(halves, 1, 0, 1), lambda: bare.Alltoall(a, new(x.numel())))
    with torch.no_grad():
        for name, (ours, theirs) in cases.items():
            ours()
            row(name, size, {"torchrelay": ours, "bare mpi4py": theirs}, "ratio 1.1 from 1 MiB")


def human(size_bytes: int) -> str:
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << shift:
            return f"{size_bytes >> shift} {unit}"
    return f"{size_bytes} B"


def copy_rate() -> float:
    """Bytes a second of one core's copy: what a message through shared memory cannot beat."""
    source = torch.ones(1 << 26, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return source.numel() / min(times)


def report(lines: list[str], command: str) -> str:
    from mpi4py import MPI

    library = MPI.Get_library_version().split(",")[0].splitlines()[0]
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    head = f"""# Differentiable MPI: figures

- Hardware: {cpu}, {os.cpu_count()} cores; one core copies {copy_rate() / 1e9:.1f} GB/s (64 MiB: {(1 << 26) / copy_rate() * 1e3:.1f} ms), the floor of any message
- Software: Python {platform.python_version()}, torch {torch.__version__}, {library}, 2 ranks on this host
- Command: `{command}`
- Medians of 7 rounds in us, rivals in turn in the same processes. The machine is shared: only ratios within a row mean something.

mpi4py's calls block inside MPI, where neither a timeout nor Ctrl-C reaches them; ours start without blocking and test.
Both give new memory, save Bcast_ and Reduce_, which overwrite; its pages are touched for the first time, which is most of a large message's time.

| case | size | torchrelay | bare mpi4py | torch gloo | ratio to bare | asked for |
|---|---|---|---|---|---|---|
"""
    return head + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one tiny iteration, which writes no results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        from mpi4py import MPI

        lines = worker(arguments.smoke)
        if MPI.COMM_WORLD.rank == 0:
            text = report(lines, "python benchmarks/bench_mpi.py")
            print(text)
            if not arguments.smoke:
                RESULTS.write_text(text)
        return
    launch(arguments.smoke)


def launch(smoke: bool) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        environ = {
            **os.environ,
            "TORCHRELAY_BENCH_FOLDER": folder,
            "OMP_NUM_THREADS": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        }
        command = [
            str(Path(sys.executable).parent / "mpirun"),
            "-n",
            "2",
            sys.executable,
            __file__,
            "--worker",
        ]
        subprocess.run(command + ["--smoke"] * smoke, env=environ, check=True)


if __name__ == "__main__":
    main()

"""What importing TorchRelay costs beyond importing torch, and what starting ``sml`` costs beyond
starting Gloo.

Imports are in fresh processes, interleaved, and measured in processor time, because other programs
on the machine change the time on the clock.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp
from report import parser_of, table, write

import torchrelay.aggregation  # noqa: F401 - before the ranks are forked

TORCH = "import torch"
CASES = {
    "torchrelay": ("import torchrelay", 30),
    "the foundation": ("from torchrelay import buffers, config, world", 30),
    # What torch does when it is imported, unless it is told not to.
    "the entry point": ("from torchrelay._autoload import register; register()", 2),
}
PROGRAM = """
import sys, time
{first}
start = time.process_time()
{second}
taken = time.process_time() - start
print(taken, any(name.startswith("torch.distributed") for name in sys.modules))
"""
ENVIRONMENT = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def seconds(first: str, second: str) -> tuple[float, bool]:
    """The processor time of ``second`` in a fresh process after ``first``, and if torch.distributed
    is loaded then.
    """
    program = PROGRAM.format(first=first, second=second)
    command = [sys.executable, "-c", program]
    output = subprocess.run(
        command, check=True, capture_output=True, text=True, env=ENVIRONMENT
    ).stdout
    elapsed, distributed = output.split()
    return float(elapsed), distributed == "True"


RANKS = (2, 8, 32)


def rank_main(rank: int, size: int, backend: str, path: str) -> None:
    """Start a group; rank 0 writes the seconds until all ranks have passed a barrier."""
    store = dist.FileStore(f"{path}.{backend}", size)
    store.set(f"here/{rank}", "")
    store.wait([f"here/{other}" for other in range(size)])  # all processes have started
    started = time.perf_counter()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    dist.barrier()
    if rank == 0:
        Path(path).write_text(str(time.perf_counter() - started))
    dist.destroy_process_group()


def start(backend: str, ranks: int) -> float:
    """The seconds that a group of ``ranks`` on this host takes to start."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/seconds"
        mp.start_processes(rank_main, (ranks, backend, path), ranks, start_method="fork")  # type: ignore[no-untyped-call]
        return float(Path(path).read_text())


def main() -> None:
    parser = parser_of(__doc__, "one iteration, nothing written")
    repeats = 1 if parser.parse_args().smoke else 5
    alone: list[float] = []
    beyond: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(repeats):
        elapsed, torch_loads_distributed = seconds("", TORCH)
        alone.append(elapsed)
        for name, (statement, _) in CASES.items():
            elapsed, distributed = seconds(TORCH, statement)
            assert distributed == torch_loads_distributed, f"{name} imports torch.distributed"
            beyond[name].append(elapsed)
    rows = [["torch itself", f"{statistics.median(alone) * 1e3:.0f} ms", ""]]
    rows += [
        [f"{name}, after torch", f"{statistics.median(t) * 1e3:.2f} ms", f"{CASES[name][1]} ms"]
        for name, t in beyond.items()
    ]
    starts = []
    for ranks in RANKS[:1] if repeats == 1 else RANKS:
        taken: dict[str, list[float]] = {"sml": [], "gloo": []}
        for _ in range(min(repeats, 3)):
            for backend, seconds_taken in taken.items():
                seconds_taken.append(start(backend, ranks))
        ours, theirs = (statistics.median(taken[backend]) for backend in ("sml", "gloo"))
        starts.append(
            [ranks, f"{ours:.3f} s", f"{theirs:.3f} s", f"{ours - theirs:+.3f} s", "+0.3 s"]
        )
    if repeats > 1:
        write(
            "import",
            "Import and start",
            table(["import", "processor time, median of 5", "at most"], rows),
            "From the call of `init_process_group`, in processes that have all started, to the end "
            "of the first barrier, on the clock; medians of 3, backends in turn.",
            table(["ranks", "sml", "Gloo", "difference", "at most"], starts),
        )


if __name__ == "__main__":
    main()

"""What every benchmark shares: how a results file looks, and what machine and versions it names."""

from __future__ import annotations

import argparse
import collections
import datetime
import gc
import os
import platform
import shlex
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from torchrelay import __version__

RESULTS = Path(__file__).parent / "results"


def parser_of(about: str | None, smoke: str = "one tiny iteration; writes nothing") -> Any:
    """A parser with ``--smoke``, whose help is the docstring of a benchmark."""
    made = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--smoke", action="store_true", help=smoke)
    return made


def start_ranks(function: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Run ``function(rank, *arguments)`` in ``ranks`` processes, forked from one that has imported
    torch, and wait for them.
    """
    mp.set_forkserver_preload(["torch.distributed", "torchrelay.aggregation"])
    mp.start_processes(function, arguments, ranks, start_method="forkserver")  # type: ignore[no-untyped-call]


def subplots(rows: int = 1, columns: int = 1, **options: Any) -> Any:
    """A figure and its axes, as pyplot's, that no window shows."""
    import matplotlib as mpl  # noqa: PLC0415 - takes long to import, for the main process only

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    return pyplot.subplots(rows, columns, layout="constrained", **options)


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def commit() -> str:
    """The commit whose code is measured; with ``-dirty`` if a file differs, pages aside."""
    try:
        changed = _git("status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results", ":!docs")
        return _git("rev-parse", "--short=7", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):  # not in a clone
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(RESULTS.parents[1]), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def machine() -> str:
    """Processor, cores, memory, GPU, kernel, versions and commit, in one line."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"{model}, {len(os.sched_getaffinity(0))} cores, {memory_gib:.0f} GiB{gpu}; Linux "
        f"{platform.release().split('-')[0]}; Python {platform.python_version()}, torch "
        f"{torch.__version__}, torchrelay {__version__}, commit {commit()}"
    )


_held: collections.deque[socket.socket] = collections.deque(maxlen=100)


def free_port() -> int:
    """A TCP port of the loopback interface, for a server of this process or of one that it starts.

    A bound socket keeps it from whoever asks the system for any port; a server that sets
    ``SO_REUSEADDR``, as servers do, can listen there all the same.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    return int(holder.getsockname()[1])


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def spread(values: list[float]) -> str:
    """Median, least and most of some seconds."""
    return f"{statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})"


def percentile(values: Sequence[float], percent: int) -> float:
    """The least of the values that `percent` of them do not exceed."""
    return sorted(values)[max(0, -(-percent * len(values) // 100) - 1)]


def milliseconds(values: list[float]) -> list[str]:
    """Median, 99th percentile and most of times in seconds, for a table."""
    found = statistics.median(values), percentile(values, 99), max(values)
    return [f"{1e3 * value:.0f} ms" for value in found]


def gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.3f} GB"


def resident_bytes(key: str) -> int:
    """``VmRSS``, what is resident now; ``RssAnon``, of it what belongs to no file; or ``VmHWM``,
    the most there was since :func:`reset_peak`.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(key)


def reset_peak() -> int:
    """Forget the peak; return what is resident now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def write(name: str, title: str, *parts: str) -> None:
    """Writes ``results/<name>.md``: title, command, date, machine, then ``parts``, separated by
    blank lines.
    """
    command = f"python benchmarks/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}".strip()
    head = f"`{command}`, {datetime.date.today()}\n\n{machine()}"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text("\n\n".join([f"# {title}", head, *parts]) + "\n")

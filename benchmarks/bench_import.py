"""What importing TorchRelay costs beyond importing torch, in fresh processes, interleaved."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from report import table, write

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
start = time.perf_counter()
{second}
taken = time.perf_counter() - start
print(taken, any(name.startswith("torch.distributed") for name in sys.modules))
"""
ENVIRONMENT = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def seconds(first: str, second: str) -> tuple[float, bool]:
    """How long ``second`` takes in a fresh process after ``first``, and if torch.distributed is
    loaded then.
    """
    program = PROGRAM.format(first=first, second=second)
    command = [sys.executable, "-c", program]
    output = subprocess.run(
        command, check=True, capture_output=True, text=True, env=ENVIRONMENT
    ).stdout
    elapsed, distributed = output.split()
    return float(elapsed), distributed == "True"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one iteration, nothing written")
    repeats = 1 if parser.parse_args().smoke else 11
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
    if repeats > 1:
        write("import", "Import cost", table(["import", "median of 11", "at most"], rows))


if __name__ == "__main__":
    main()

"""What importing TorchRelay costs beyond importing torch, in fresh processes, interleaved."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

from report import table, write

TORCH = "import torch"
CASES = {
    "torchrelay": "import torchrelay",
    "the foundation": "from torchrelay import buffers, config, world",
}
PROGRAM = """
import sys, time
{first}
start = time.perf_counter()
{second}
taken = time.perf_counter() - start
print(taken, any(name.startswith("torch.distributed") for name in sys.modules))
"""


def seconds(first: str, second: str) -> tuple[float, bool]:
    """How long ``second`` takes in a fresh process after ``first``, and if torch.distributed is
    loaded then.
    """
    program = PROGRAM.format(first=first, second=second)
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
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
        for name, statement in CASES.items():
            elapsed, distributed = seconds(TORCH, statement)
            assert distributed == torch_loads_distributed, f"{name} imports torch.distributed"
            beyond[name].append(elapsed)
    rows = [["torch itself", f"{statistics.median(alone) * 1e3:.0f} ms", ""]]
    rows += [
        [f"{name}, after torch", f"{statistics.median(t) * 1e3:.2f} ms", "30 ms"]
        for name, t in beyond.items()
    ]
    if repeats > 1:
        write("import", "Import cost", table(["import", "median of 11", "at most"], rows))


if __name__ == "__main__":
    main()

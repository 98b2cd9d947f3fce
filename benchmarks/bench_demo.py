"""The demo as a user runs it: ``torchrelay demo`` on the code graph, or on WN18RR.

    python benchmarks/bench_demo.py                   # the code graph of the standard library
    python benchmarks/bench_demo.py --wn18rr FOLDER  # with train.txt, valid.txt, test.txt
    python benchmarks/bench_demo.py --smoke           # one epoch of a quarter of it; writes nothing

Each run replaces its own section of ``benchmarks/results/demo.md`` by the command, its time, and
all it printed. A run whose test MRR is below what it must reach fails and writes nothing.
"""

from __future__ import annotations

import datetime
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import report

RESULTS = report.RESULTS / "demo.md"
TITLE = "# The demo\n"

WN18RR_OPTIONS = "--allow-unseen --epochs 20 --dim 100 --negatives 4096 --learning-rate 0.3"

# What a run must reach to be written down: on WN18RR, ComplEx's published figures start about here.
WN18RR_MRR = 0.42
TIMES_BASELINE = 4.0


def run(arguments: list[str]) -> tuple[str, float]:
    """What ``torchrelay demo`` printed, and the seconds it took."""
    command = [sys.executable, "-c", "from torchrelay.cli import main; main()", "demo", *arguments]
    with tempfile.TemporaryDirectory() as folder:  # in which the report is written
        start = time.perf_counter()
        result = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**os.environ, "COLUMNS": "110"},
            cwd=folder,
        )
        seconds = time.perf_counter() - start
    return result.stdout.replace(f"{folder}/", ""), seconds


def mrr(output: str, row: str) -> float:
    """The MRR that a row of the table of figures shows."""
    found = re.search(rf"^│ {re.escape(row)} +│ +[\d,]+ │ +([\d.]+) │", output, re.MULTILINE)
    if found is None:
        raise SystemExit(f"the output has no row {row!r}:\n{output}")
    return float(found[1])


def check(output: str, least: float | None) -> None:
    """Ends the program unless the model has learned: ``least``, or several times the baseline's
    MRR.
    """
    reached = mrr(output, "test")
    least = TIMES_BASELINE * mrr(output, "test, most frequent answer") if least is None else least
    if reached < least:
        raise SystemExit(f"test MRR is {reached}, but must be at least {least:.4f}:\n{output}")


def section(heading: str, command: str, output: str, seconds: float) -> str:
    output = output.replace(str(Path.home()), "~").rstrip()
    return (
        f"## {heading}\n\n{report.machine()}; {datetime.date.today()}\n\n    {command}\n\n"
        f"{seconds:.0f} s from start to end. It printed:\n\n```text\n{output}\n```\n"
    )


def write(heading: str, text: str) -> None:
    """Replaces the section ``heading`` of the results file."""
    old = RESULTS.read_text() if RESULTS.exists() else TITLE
    sections = [
        part
        for part in re.split(r"^(?=## )", old, flags=re.MULTILINE)[1:]
        if not part.startswith(f"## {heading}\n")
    ]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        "\n".join([TITLE, *(part.strip() + "\n" for part in sorted([*sections, text]))])
    )


def main() -> None:
    parser = report.parser_of(__doc__, "one epoch, nothing written")
    parser.add_argument("--wn18rr", type=Path, metavar="FOLDER", help="WN18RR's three files")
    arguments = parser.parse_args()
    if arguments.smoke:
        output, _ = run(["--quick", "--epochs", "1", "--dim", "8", "--negatives", "64"])
        mrr(output, "test")
        return
    if arguments.wn18rr:
        heading, options = "WN18RR", WN18RR_OPTIONS
        data = str(arguments.wn18rr.absolute())
        output, seconds = run(["--data", data, *shlex.split(options)])
        check(output, WN18RR_MRR)
        output = output.replace(data, "WN18RR")
        command = f"torchrelay demo --data WN18RR {options}"
    else:
        heading, command = "The code graph of the standard library", "torchrelay demo"
        output, seconds = run([])
        check(output, None)
    write(heading, section(heading, command, output, seconds))
    print(output)


if __name__ == "__main__":
    main()

"""The demo on a small graph, as a user runs it: what it learns, and when results are
reproducible.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchrelay.demo.code_graph import split_facts
from torchrelay.demo.triples import write_facts

# A process that imports torch starts slowly where many others run.
pytestmark = pytest.mark.timeout(400)

_COMMAND = [sys.executable, "-c", "from torchrelay.cli import main; main()", "demo"]


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    """Addition of 1 to 6 modulo 40, which rotations in the complex plane express exactly."""
    facts = [(f"n{n}", f"plus {k}", f"n{(n + k) % 40}") for n in range(40) for k in range(1, 7)]
    for split, part in split_facts(facts, 0.1, seed=0).items():
        write_facts(tmp_path / f"{split}.txt", part)
    return tmp_path


def run_demo(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "COLUMNS": "120", **environ},
        check=False,
    )


def figures(output: str) -> dict[str, list[float]]:
    """The lines of the table of metrics: questions, MRR, Hits@1, 3, 10."""
    lines = (re.findall(r"[^│]+", line) for line in output.splitlines() if line.startswith("│"))
    rows = {cells[0].strip(): cells[1:] for cells in lines if len(cells) == 6}
    return {
        name: [float(cell.replace(",", "")) for cell in rows[name]]
        for name in rows
        if name.startswith(("valid", "test"))
    }


_SMALL = ("--epochs", "40", "--dim", "16", "--batch-size", "100", "--regularisation", "0.001")


def test_two_processes_learn_addition(sums: Path, tmp_path: Path) -> None:
    """Their updates of the table arrive in any order, so two runs differ in the last digits and
    what follows.
    """
    result = run_demo("--data", str(sums), *_SMALL, TMPDIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "epoch 40 of 40" in result.stdout
    assert "equal bit for bit" in result.stdout
    assert "DDP over gloo" in result.stdout
    stages = [
        line
        for line in result.stdout.splitlines()
        if "torch.load" in line or "a new process" in line
    ]
    assert len(stages) == 2, result.stdout
    assert "load it, the model not initialised" in stages[0] and "equal bit for bit" in stages[0]
    assert "serve: switch to the other model" in stages[1]
    assert not list(tmp_path.glob("torchrelay-demo-*"))
    found = figures(result.stdout)
    assert found["test"][1] > 0.9
    assert found["test"][1] > 3 * found["test, most frequent answer"][1]


def test_one_process_says_the_same_twice(sums: Path) -> None:
    alone = ("--data", str(sums), *_SMALL, "--nproc", "1", "--no-serve")
    first, second = run_demo(*alone), run_demo(*alone)
    found = figures(first.stdout)
    assert found
    assert [line for line in second.stdout.splitlines() if line.startswith("epoch")] == [
        line for line in first.stdout.splitlines() if line.startswith("epoch")
    ]
    assert figures(second.stdout) == found


def test_one_process_runs_the_same_code(sums: Path) -> None:
    result = run_demo("--data", str(sums), *_SMALL, "--nproc", "1", "--no-serve")
    assert result.returncode == 0, result.stderr
    assert "save a checkpoint" in result.stdout and "serve" not in result.stdout
    assert figures(result.stdout)["test"][1] > 0.9

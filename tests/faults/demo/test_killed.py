"""kill -9 of a rank of the demo: the others name it, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from facts import write_facts

_TIMEOUT_S = 20
_COMMAND = [sys.executable, "-c", "from torchrelay.cli import main; main()", "demo"]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The demo on a tiny graph, with more epochs than it can finish."""
    facts = [(f"n{n}", f"plus {k}", f"n{(n + k) % 20}") for n in range(20) for k in range(1, 5)]
    for split in ("train", "valid", "test"):
        write_facts(tmp_path / f"{split}.txt", facts)
    options = [
        "--data",
        str(tmp_path),
        "--epochs",
        "10000000",
        "--nproc",
        "3",
        "--timeout",
        str(_TIMEOUT_S),
        "--report",
        str(tmp_path / "report.html"),
    ]
    job = subprocess.Popen(
        [*_COMMAND, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield job
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.communicate()


def ranks_of(job: subprocess.Popen[str]) -> dict[int, int]:
    """The process of each rank: the children of torchrun, which the command has become."""
    found = {}
    for children in Path(f"/proc/{job.pid}/task").glob("*/children"):
        for child in children.read_text().split():
            environ = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            rank = next((entry[5:] for entry in environ if entry.startswith(b"RANK=")), None)
            if rank is not None:
                found[int(rank)] = int(child)
    return found


def alive(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("victim", [0, 1])
def test_the_survivors_name_a_killed_rank(running: subprocess.Popen[str], victim: int) -> None:
    assert running.stdout is not None and running.stderr is not None
    for line in running.stdout:
        if line.startswith("epoch 5 "):
            break
    ranks = ranks_of(running)
    assert sorted(ranks) == [0, 1, 2]
    os.kill(ranks[victim], signal.SIGKILL)
    _, errors = running.communicate(timeout=100)
    assert running.returncode not in (0, None)
    sentences = [line for line in errors.splitlines() if line.startswith("torchrelay demo, rank ")]
    for survivor in {0, 1, 2} - {victim}:
        said = [
            line for line in sentences if line.startswith(f"torchrelay demo, rank {survivor}: ")
        ]
        assert len(said) == 1 and f"rank {victim}" in said[0].partition(": ")[2], errors
    assert not any(alive(process) for process in ranks.values())

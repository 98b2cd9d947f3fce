"""Ranks of the demo that are killed or terminated: the others name them, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

import preloaded
from demo_job import started
from facts import write_facts
from torchrelay.demo.options import DemoOptions

_TIMEOUT_S = 20
_EPOCHS = 10_000_000  # more than it can finish


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """A folder with a tiny graph."""
    facts = [(f"n{n}", f"plus {k}", f"n{(n + k) % 20}") for n in range(20) for k in range(1, 5)]
    for split in ("train", "valid", "test"):
        write_facts(tmp_path / f"{split}.txt", facts)
    return tmp_path


def wait_for_training(job: subprocess.Popen[str]) -> None:
    assert job.stdout is not None
    for line in job.stdout:
        if line.startswith("epoch 5 "):
            break


def ranks_of(folder: Path) -> dict[int, int]:
    """The process of each rank of the job whose ``TMPDIR`` is ``folder``."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            environ = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        if b"torchrelay.demo.worker" in command and f"TMPDIR={folder}".encode() in environ:
            found.update({int(e[5:]): int(process.name) for e in environ if e.startswith(b"RANK=")})
    return found


def alive(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("victim", [0, 1])
def test_the_survivors_name_a_killed_rank(graph: Path, victim: int) -> None:
    options = [f"--data={graph}", f"--report={graph / 'report.html'}", f"--timeout={_TIMEOUT_S}"]
    with started(*options, "--nproc=3", f"--epochs={_EPOCHS}", TMPDIR=str(graph)) as running:
        wait_for_training(running)
        ranks = ranks_of(graph)
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
    assert victim == 0 or not list(graph.glob("torchrelay-demo-*"))  # rank 0's, which it removes


def test_a_terminated_rank_removes_its_folder(graph: Path) -> None:
    """It ends after the seconds that it has for its last words."""
    program = "from torchrelay.demo import worker; worker._LAST_WORDS_S = 1; worker.main()"
    options = DemoOptions(data=graph, epochs=_EPOCHS, report=graph / "report.html")
    with subprocess.Popen(
        [preloaded.python(), "-c", program, options.to_json()],
        stdout=subprocess.PIPE,
        text=True,
        env=preloaded.environment(TMPDIR=str(graph)),
    ) as rank:
        try:
            wait_for_training(rank)
            assert list(graph.glob("torchrelay-demo-*"))
            rank.terminate()
            rank.communicate(timeout=60)
        finally:
            rank.kill()
    assert rank.returncode == 128 + signal.SIGTERM
    assert not list(graph.glob("torchrelay-demo-*"))

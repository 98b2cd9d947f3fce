"""Ranks that torchrun starts again: its store keeps the keys of the ranks before them."""

from __future__ import annotations

import contextlib
import re
import subprocess
from pathlib import Path

import pytest

from ranks import free_port, python

JOB = str(Path(__file__).with_name("restarted_job.py"))
# A job starts up to ten ranks and their agents, each of which imports torch.
PATIENCE_S = 500
pytestmark = pytest.mark.timeout(PATIENCE_S + 60)


def agent(
    *arguments: str, **environ: str
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """An agent with two ranks at most, which looks after them often."""
    torchrun = ("-m", "torch.distributed.run", "--monitor-interval=0.1")
    return python(*torchrun, *arguments, **environ)


def finished(process: subprocess.Popen[str]) -> list[tuple[str, ...]]:
    """The rank, number of ranks and first step of each rank that came to its end."""
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    return sorted(re.findall(r"rank (\d) of (\d) did steps (\d) to 4", output))


def test_restarts_in_one_agent_at_all_moments(tmp_path: Path) -> None:
    moments = ["registered", "joining", "table", "step"]
    with agent(
        "--standalone", "--nproc-per-node=2", "--max-restarts=4", JOB, str(tmp_path), "torchrun",
        *moments,
    ) as process:  # fmt: skip
        assert finished(process) == [("0", "2", "2"), ("1", "2", "2")]


def test_restarts_of_two_hosts_with_static_ranks(tmp_path: Path) -> None:
    where = [f"--master-port={free_port()}", "--master-addr=127.0.0.1", "--nnodes=2"]
    job = ["--max-restarts=3", JOB, str(tmp_path), "connect", "registered", "step"]
    with (
        agent(*where, "--node-rank=0", *job, TORCHRELAY_HOST_ID="a", VICTIM="0") as first,
        agent(*where, "--node-rank=1", *job, TORCHRELAY_HOST_ID="b", VICTIM="1") as second,
    ):
        assert finished(second) == [("1", "2", "2")]
        assert finished(first) == [("0", "2", "2")]


def test_a_job_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    # Long enough for an agent that is silent, or the second to come, on a busy machine.
    beat = "keep_alive_interval=1,keep_alive_max_attempt=15,last_call_timeout=20"
    where = [
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job",
        "--nnodes=1:2", "--max-restarts=3", "--local-addr=127.0.0.1",
    ]  # fmt: skip
    job = [JOB, str(tmp_path), "torchrun", "agent"]
    with (
        agent(*where, f"--rdzv-conf=is_host=1,{beat}", *job, VICTIM="0") as first,
        agent(*where, f"--rdzv-conf=is_host=0,{beat}", *job, VICTIM="1"),
    ):
        assert finished(first) == [("0", "1", "2")]

"""A script written for AdaPM, on one to three nodes of two worker threads; also where a node
fails.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import preloaded
from ranks import free_port

# A process that imports torch starts slowly where many others run.
pytestmark = pytest.mark.timeout(400)

SCRIPT = Path(__file__).parents[2] / "adapm_script.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [preloaded.python(), "-m", "torchrelay.compat", str(SCRIPT), *map(str, arguments)]
    environ = {**os.environ, "DMLC_PS_ROOT_PORT": str(free_port())}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environ
    )


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_an_original_script_runs(nodes: int) -> None:
    ended = run(nodes)
    assert ended.returncode == 0, ended.stderr
    pulled = 2 * 6 * (2 * 2 * nodes) * 2  # elements, pushes of all, workers
    assert sorted(ended.stdout.split("\n")[:nodes]) == [
        f"node {node}: {pulled}" for node in range(nodes)
    ]


@pytest.mark.parametrize(
    ("nodes", "fault", "said"),
    [
        (1, "worker", "worker 0 of node 0 has ended without close()"),
        (3, "worker", "worker 0 of node 2 has ended without close()"),
        (2, "main", "node 1 is lost"),
        (3, "killed", "node 2 is lost"),
    ],
)
def test_a_node_that_fails_is_named_by_the_others(nodes: int, fault: str, said: str) -> None:
    ended = run(nodes, fault)
    assert ended.returncode != 0
    assert "PeerLostError" in ended.stderr and said in ended.stderr, ended.stderr

"""A part of PyTorch's own test suite for backends over two hosts of two ranks each; see
``tests/c10d_suite.py`` for all of it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# A process that imports torch starts slowly where many others run.
pytestmark = pytest.mark.timeout(400)

SUITE = Path(__file__).parents[2] / "c10d_suite.py"
# Of each collective one test in a group of two ranks on different hosts, or with all ranks.
NAMES = (
    "test_all_gather_group",
    "test_all_reduce_coalesced_group_sum",
    "test_all_reduce_group_sum",
    "test_broadcast_group",
    "test_gather_group",
    "test_scatter_group",
    "test_send_recv_any_source",
)


def test_over_two_hosts() -> None:
    command = [sys.executable, str(SUITE), "--placement", "aabb", *NAMES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    summary = done.stdout.splitlines()[-1]
    passed = int(summary.split(" tests: ")[1].split(" passed")[0])
    assert passed >= len(NAMES) and summary.endswith("0 failed"), summary

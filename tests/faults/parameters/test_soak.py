"""The soak of ``benchmarks/soak_parameters.py``, short: it takes 50 starts and ten minutes when
asked for nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "soak_parameters.py"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--starts", "6", "--seconds", "0"],
        ["--starts", "0", "--seconds", "5"],
        ["--starts", "0", "--seconds", "5", "--rule", "add"],
    ],
)
def test_nothing_is_lost_doubled_or_leaked(arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Wrong" not in result.stdout

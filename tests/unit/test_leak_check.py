"""The check that every test runs: it must see what the test leaves, and nothing of other
programs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import namespaces

pytest_plugins = ["pytester"]

LEAKS = """
from pathlib import Path

def test_leaves_a_file():
    Path("/dev/shm/torchrelay-test").touch()

def test_leaves_nothing():
    Path("/dev/shm/torchrelay-test").unlink()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
def test_a_file_left_in_shared_memory_fails_the_test(pytester: pytest.Pytester) -> None:
    conftest = Path(__file__).parents[1] / "conftest.py"
    pytester.makeconftest(conftest.read_text())
    pytester.makepyfile(LEAKS)
    result = pytester.runpytest_subprocess(
        "-o", f"pythonpath={conftest.parent}", "-p", "no:cacheprovider", "-o", "markers=processes"
    )
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*AssertionError: the test left *torchrelay-test*"])


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
def test_files_of_other_programs_are_not_seen(outer_mounts: int, tmp_path: Path) -> None:
    name = f"torchrelay-other-{os.getpid()}"
    program = (
        f"import namespaces; namespaces.enter_mounts({outer_mounts})\n"
        f"from pathlib import Path; path = Path('/dev/shm/{name}'); path.touch()\n"
        "print(flush=True); input(); path.unlink()"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(namespaces.__file__).parent)}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[outer_mounts],
        env=environ,
        text=True,
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "\n"
        seen = [path.name for path in Path("/dev/shm").iterdir()]
        other.communicate("\n")
    assert other.returncode == 0
    assert name not in seen

"""The check that every test runs: it must see what the test leaves, and nothing of other
programs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import namespaces
from ranks import free_port

pytest_plugins = ["pytester"]

TESTS = Path(__file__).parents[1]
CONFTEST = TESTS / "conftest.py"

LEAKS = """
from pathlib import Path

def test_leaves_a_file():
    Path("/dev/shm/torchrelay-test").touch()

def test_leaves_nothing():
    Path("/dev/shm/torchrelay-test").unlink()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
def test_a_file_left_in_shared_memory_fails_the_test(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(LEAKS)
    result = pytester.runpytest_subprocess(
        "-o", f"pythonpath={TESTS}", "-p", "no:cacheprovider", "-o", "markers=processes"
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


# Makes a file and deletes the one before, over and over; says how often.
DISTURBER = """
import itertools, os, sys, time
from pathlib import Path

rounds, shared = Path(sys.argv[1]), Path("/dev/shm")
name = f"torchrelay-disturber-{os.getpid()}-"
for number in itertools.count():
    (shared / f"{name}{number}").touch()
    (shared / f"{name}{number - 1}").unlink(missing_ok=True)
    time.sleep(0.001)
    if Path(sys.argv[2]).exists():
        break
    rounds.write_text(str(number))
(shared / f"{name}{number}").unlink()
"""

DISTURBED = """
import time
from pathlib import Path
import pytest

ROUNDS = Path(__file__).with_name("rounds")

def rounds():
    return int(ROUNDS.read_text() or 0)

@pytest.mark.parametrize("index", range(3))
def test_while_files_come_and_go(index):
    begun, deadline = rounds(), time.monotonic() + 60
    while rounds() < begun + 5:
        assert time.monotonic() < deadline, "nobody disturbs"

def test_port(request):
    import ranks
    Path(request.config.rootpath, "port").write_text(str(ranks.free_port()))
"""


@pytest.fixture
def disturbed_folder() -> Iterator[Path]:
    """A folder that every user may use; while it exists, files come and go in ``/dev/shm``."""
    with tempfile.TemporaryDirectory(prefix="disturbed", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "conftest.py").write_text(CONFTEST.read_text())
        (folder / "test_disturbed.py").write_text(DISTURBED)
        (folder / "pytest.ini").write_text(
            f"[pytest]\nmarkers = processes\npythonpath = . {TESTS}\n"
        )
        rounds = folder / "rounds"
        rounds.write_text("0")
        stop = folder / "stop"
        with subprocess.Popen([sys.executable, "-c", DISTURBER, str(rounds), str(stop)]):
            try:
                yield folder
            finally:
                stop.touch()


PRIVILEGES = {
    "same-user": [],
    "no-capabilities": ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"],
    "nobody": ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"],
}


@pytest.mark.parametrize("prefix", PRIVILEGES.values(), ids=PRIVILEGES)
def test_other_programs_disturb_no_test(prefix: list[str], disturbed_folder: Path) -> None:
    """Neither by their files in shared memory nor, if they are test runs too, by their ports."""
    if prefix and (os.geteuid() != 0 or shutil.which(prefix[0]) is None):
        pytest.skip("needs root, and setpriv (util-linux), to give up privileges")
    environ = {name: value for name, value in os.environ.items() if "PYTEST" not in name}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*prefix, sys.executable, "-B", *arguments],
            cwd=disturbed_folder,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )

    if prefix and run("-c", "import pytest, torchrelay").returncode != 0:
        pytest.skip("this user may not read the environment")
    ours = free_port()
    ended = run("-m", "pytest", "-p", "no:cacheprovider", "--basetemp", "temporary")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 passed" in ended.stdout
    theirs = int((disturbed_folder / "port").read_text())
    assert theirs // 500 != ours // 500

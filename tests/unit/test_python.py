"""Helper processes start in any directory, also in one whose files have names of the standard
library's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import torchrelay
from torchrelay._helper import code_command, module_command

SOURCES = Path(torchrelay.__file__).parent


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A directory of modules that must not be imported."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in ("json", "numbers", "numpy", "runpy", "secrets", "socket", "torch", "torchrelay"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name}.py was imported')")
    return folder


def _run(command: list[str], folder: Path) -> str:
    result = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_modules_of_the_current_directory_are_not_imported(hostile: Path) -> None:
    code = (
        "import json, secrets, sys, torchrelay.checkpoint.engine._writer_process; print(sys.argv)"
    )
    assert _run([*code_command(code), "one"], hostile) == "['-c', 'one']\n"
    assert "json.tool" in _run([*module_command("json.tool"), "--help"], hostile)


def test_an_asynchronous_save_in_such_a_directory(hostile: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from torchrelay.checkpoint import async_save\n"
        f"async_save({{'step': 1}}, {str(tmp_path / 'step')!r}).result(60)\n"
    )
    _run([sys.executable, str(script)], hostile)
    assert (tmp_path / "step" / "manifest.json").exists()


def test_every_process_is_started_this_way() -> None:
    others = {"_helper.py", "launch.py"}  # the latter replaces its process by such a command
    for path in SOURCES.rglob("*.py"):
        assert "sys.executable" not in path.read_text() or path.name in others, path

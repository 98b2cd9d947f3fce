"""The command refuses bad input in one sentence, with exit code 2, before it starts a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torchrelay.cli.demo.options import Options

# With execve gone, a process that were started after all would show as a traceback.
_SCRIPT = "import os; del os.execve; from torchrelay.cli import main; main()"


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _SCRIPT, "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("train", "test", "sentence"),
    [
        ("a\tr\tb\n", None, "test.txt is missing"),
        ("a\tr\tb\n", "", "test.txt has no facts"),
        ("a\tr\tb\n", "a\tb\n", "test.txt, line 1: a line must have three fields"),
        ("a\tr\tb\n", "a\tr\tz\n", "the entity 'z' does not occur in train.txt"),
    ],
    ids=["missing file", "empty file", "two columns", "unknown entity"],
)
def test_bad_data(tmp_path: Path, train: str, test: str | None, sentence: str) -> None:
    (tmp_path / "train.txt").write_text(train)
    (tmp_path / "valid.txt").write_text(train)
    if test is not None:
        (tmp_path / "test.txt").write_text(test)
    result = run_demo("--data", str(tmp_path))
    assert result.returncode == 2
    assert sentence in result.stderr
    assert result.stderr.startswith("torchrelay: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_missing_folder() -> None:
    result = run_demo("--data", "/nowhere")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "/nowhere does not exist" in result.stderr


@pytest.mark.parametrize(
    "option", ["--nproc", "--epochs", "--dim", "--batch-size", "--negatives", "--timeout"]
)
def test_options_out_of_range(option: str) -> None:
    assert run_demo(option, "0").returncode == 2


def test_options_survive_the_way_to_the_processes() -> None:
    options = Options(data=Path("/some where"), epochs=3, learning_rate=0.25, cached=True)
    assert Options.from_json(options.to_json()) == options

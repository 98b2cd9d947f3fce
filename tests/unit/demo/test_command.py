"""The command refuses bad input in one sentence, with exit code 2, before it starts a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import preloaded
from torchrelay.cli import main
from torchrelay.demo.options import DemoOptions


class Demo:
    """Calls ``torchrelay demo`` in this process, which cannot become torchrun: that would be an
    AttributeError.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.delattr(os, "execve")
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str) -> tuple[object, str, str]:
        """Exit code, standard output and standard error."""
        self._monkeypatch.setattr(sys, "argv", ["torchrelay", "demo", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *self._capsys.readouterr()


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Demo:
    return Demo(monkeypatch, capsys)


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
def test_bad_data(tmp_path: Path, demo: Demo, train: str, test: str | None, sentence: str) -> None:
    (tmp_path / "train.txt").write_text(train)
    (tmp_path / "valid.txt").write_text(train)
    if test is not None:
        (tmp_path / "test.txt").write_text(test)
    code, output, errors = demo("--data", str(tmp_path))
    assert (code, output) == (2, "")
    assert errors.startswith("torchrelay: ") and sentence in errors
    assert errors.count("\n") == 1


def test_a_missing_folder_from_outside() -> None:
    code = "from torchrelay.cli import main; main()"
    command = [preloaded.python(), "-c", code, "demo", "--data", "/nowhere"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "/nowhere/train.txt is missing" in result.stderr


@pytest.mark.parametrize(
    "option",
    ["--nproc", "--hosts", "--epochs", "--dim", "--batch-size", "--negatives", "--timeout"],
)
def test_options_out_of_range(demo: Demo, option: str) -> None:
    code, _, errors = demo(option, "0")
    assert code == 2 and option in errors


def test_a_report_that_cannot_be_written_is_refused_at_once(demo: Demo, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "report.html"):
        code, _, errors = demo("--report", str(path))
        assert code != 0 and f"cannot be written to {path}" in errors


def test_a_report_of_another_user_is_refused_at_once(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.html"
    report.touch()
    may = lambda path, mode: mode == os.R_OK or Path(path) != report  # noqa: E731
    monkeypatch.setattr(os, "access", may)
    code, _, errors = demo("--report", str(report))
    assert code != 0 and f"cannot be written to {report}" in errors


def test_hosts_need_root(demo: Demo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("a\tr\tb\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    report = str(tmp_path / "report.html")
    code, _, errors = demo("--data", str(tmp_path), "--hosts", "2", "--report", report)
    assert code == 1 and "network namespaces, which need root" in errors


def test_options_survive_the_way_to_the_processes() -> None:
    options = DemoOptions(data=Path("/some where"), epochs=3, learning_rate=0.25)
    for one in (options, DemoOptions()):
        assert DemoOptions.from_json(one.to_json()) == one


def test_quick_changes_what_was_not_given() -> None:
    assert DemoOptions(dim=8).resolved() == DemoOptions(dim=8)
    quick = DemoOptions(quick=True, dim=8).resolved()
    assert (quick.epochs, quick.dim) == (8, 8) and quick.negatives < DemoOptions.negatives
    assert quick.command.startswith("torchrelay demo --epochs 8 --dim 8 ")

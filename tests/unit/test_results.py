"""How results files are written: with the commit they measured, and as one page."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_results_file_names_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = load("report")
    monkeypatch.setattr(report, "RESULTS", tmp_path / "benchmarks" / "results")
    monkeypatch.setattr(sys, "argv", ["bench_x.py", "--repeats", "3"])
    for name in [name for name in os.environ if name.startswith("GIT_")]:  # such as a hook's
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True)

    assert report.commit() == "unknown"
    (tmp_path / "code.py").write_text("1")
    (tmp_path / "benchmarks").mkdir()
    git("init", "-q")
    report.write("x", "A title", "text")
    git("add", ".")
    git("commit", "-q", "-m", "x")
    report.write("x", "A title", "another text")  # results themselves do not count
    text = (report.RESULTS / "x.md").read_text()
    assert text.startswith("# A title\n\n`python benchmarks/bench_x.py --repeats 3`, ")
    assert re.search(r"torchrelay \S+, commit [0-9a-f]{7}$", text, re.MULTILINE)
    (tmp_path / "code.py").write_text("2")
    assert report.commit().endswith("-dirty")


def test_all_results_are_one_page_that_needs_nothing_else() -> None:
    page = pytest.importorskip("markdown") and load("page")
    files = sorted((BENCHMARKS / "results").glob("*.md"))
    text = page.page(files)
    assert len(files) > 10
    for file in files:
        assert f'<section id="{file.stem}">' in text and f'href="#{file.stem}"' in text
    assert text.count("<table>") > 30
    assert not re.search(r'(?:src|href)="(?!#|data:)|<script|url\(', text)
    assert not re.search(r"^\|.*\|$", text, re.MULTILINE)

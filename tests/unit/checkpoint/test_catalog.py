"""Which checkpoint of a folder is meant: the newest of the one series in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from torchrelay import _native
from torchrelay.checkpoint import Reader, latest, load, save, verify
from torchrelay.checkpoint.format import _manifest
from torchrelay.checkpoint.storage import _catalog
from torchrelay.cli import app
from torchrelay.errors import ArgumentError, StorageError, UnsupportedError


def _save(folder: Path, *names: str) -> None:
    for name in names:
        save({"name": name}, folder / name, fsync=False)


def _loaded(folder: Path) -> Any:
    state: dict[str, Any] = {"name": None}
    load(state, folder)
    return state["name"]


def test_what_belongs_to_no_series_is_not_resumed_from(tmp_path: Path) -> None:
    _save(tmp_path, "step-1", "step-2", "best", "final")
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-99")  # a copy, older than step-2
    (tmp_path / "step-98").symlink_to("best")
    assert _loaded(tmp_path) == "step-2"
    assert latest(tmp_path) == str(tmp_path / "step-2")
    assert latest(tmp_path, pattern="b*") == str(tmp_path / "best")
    assert latest(tmp_path, pattern="*") == str(tmp_path / "final")


def test_the_newest_is_the_last_committed_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hour_ns = 3600 * 10**9
    for step, hours in enumerate((5, 1, 9, 2, 2, 0)):  # set back, ahead, back, and stopped
        monkeypatch.setattr("time.time_ns", lambda hours=hours: hours * hour_ns)
        save({"name": f"step-{step}"}, tmp_path / f"step-{step}", fsync=False, keep=2)
        assert _loaded(tmp_path) == f"step-{step}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-5"]


def test_what_another_process_commits_meanwhile_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path, "step-1", "step-2")
    asked, now = "torchrelay.checkpoint.engine._engine.commit_time_ns", _catalog.commit_time_ns

    def meanwhile(heads: dict[str, _manifest.Head]) -> int:  # of the folder as it was listed
        monkeypatch.setattr(asked, now)
        _save(tmp_path, "step-3")
        return now(heads)

    monkeypatch.setattr(asked, meanwhile)
    save({"name": "step-4"}, tmp_path / "step-4", fsync=False, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-4"]


def test_of_several_series_none_is_chosen(tmp_path: Path) -> None:
    _save(tmp_path, "step-1", "step-2", "eval-7", "best")
    message = r"series of checkpoints: eval-\* \(newest eval-7\), step-\* \(newest step-2\); give"
    reads = (_loaded, latest, verify, lambda path: Reader(path).read_metadata())
    for read in reads:
        with pytest.raises(ArgumentError, match=message):
            read(tmp_path)
    # Each piece of advice, followed:
    assert _loaded(tmp_path / "step-2") == "step-2"
    assert latest(tmp_path, pattern="eval-*") == str(tmp_path / "eval-7")
    with pytest.raises(StorageError, match=r"there is no checkpoint here$"):
        load({}, tmp_path / "other-1")
    (tmp_path / "eval-7" / "manifest.json").unlink()
    assert _loaded(tmp_path) == "step-2"


def test_without_a_series_there_must_be_one_checkpoint(tmp_path: Path) -> None:
    _save(tmp_path, "best")
    (tmp_path / "current").symlink_to("best")
    shutil.copytree(tmp_path / "best", tmp_path / "copy-1")  # the same one
    assert _loaded(tmp_path) == "best"
    _save(tmp_path, "last")
    with pytest.raises(ArgumentError, match=r"several checkpoints of no series: last, best; give"):
        load({"name": None}, tmp_path)


def test_resuming_or_starting_takes_two_lines(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        assert latest(folder, None) is None and latest(folder, default="") == ""
        with pytest.raises(StorageError, match=r"no committed checkpoint.*latest\(folder, None\)"):
            latest(folder)
    _save(tmp_path, "step-1")
    state: dict[str, Any] = {"name": None}
    if latest(tmp_path, None):
        load(state, tmp_path)
    assert state["name"] == "step-1"
    assert latest(tmp_path, None, pattern="x*") is None


def test_a_newer_checkpoint_of_another_version_is_not_passed_over(tmp_path: Path) -> None:
    _save(tmp_path, "step-1", "step-2")
    path = tmp_path / "step-2" / "manifest.json"
    body = path.read_bytes().rsplit(b",\n", 1)[0].replace(b'"version":1', b'"version":2')
    path.write_bytes(body + f',\n"crc32c":"{_native.crc32c(body):08x}"}}\n'.encode())
    with pytest.raises(UnsupportedError, match=r"step-2.*has format version 2"):
        _loaded(tmp_path)


def test_the_manifest_of_another_program_is_not_ours(tmp_path: Path) -> None:
    text = '{"name": "a web app", "icons": []}'
    _save(tmp_path / "run", "step-1")
    (tmp_path / "run" / "manifest.json").write_text(text)
    assert _loaded(tmp_path / "run") == "step-1"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "manifest.json").write_text(text)
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "model" / "model.safetensors")
    state = {"w": torch.zeros(2)}
    load(state, tmp_path / "model")
    assert state["w"].tolist() == [1, 1]


def test_ls(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["checkpoint", "ls", str(tmp_path), *arguments])
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split())

    assert "there is no committed checkpoint" in run()
    _save(tmp_path, "step-1", "[best]", "step-2")
    data = (tmp_path / "step-1" / "manifest.json").read_bytes()
    (tmp_path / "step-1" / "manifest.json").write_bytes(data[:-9])
    found = json.loads(run("--json"))
    assert [one["name"] for one in found] == ["step-1", "[best]", "step-2"]
    assert [one["state"] for one in found] == ["damaged", "whole", "whole"]
    assert [one["series"] for one in found] == ["step-*", "", "step-*"]
    assert found[2]["world_size"] == 1 and found[2]["saved_at_ns"] > found[1]["saved_at_ns"]
    assert "[best]" in run() and run().endswith("step-2")
    _save(tmp_path, "eval-1")
    assert "several series of checkpoints" in run()


def test_a_commit_reads_what_lies_beside_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for its date, and again for keep=: on an object store each is a request."""
    for step in range(3):
        save({"step": step}, tmp_path / f"step-{step}")
    read: list[str] = []
    head_at = _manifest.head_at

    def counted(open_folder: Any) -> Any:
        read.append(open_folder.args[0])
        return head_at(open_folder)

    monkeypatch.setattr(_catalog, "head_at", counted)
    save({"step": 3}, tmp_path / "step-3", keep=2)
    assert sorted(read) == [str(tmp_path / f"step-{step}") for step in range(3)]
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3"]


def test_a_checkpoint_is_saved_and_loaded_while_the_interpreter_ends(tmp_path: Path) -> None:
    # Where no thread can be started any more.
    script = f"""
import atexit, torch
from torchrelay.checkpoint import load, save
def at_exit():
    for step in range(3):
        state = {{str(i): torch.full((1 << 21,), step) for i in range(4)}}
        save(state, f"{tmp_path}/step-{{step}}", fsync=False, keep=2)
    load(state, {str(tmp_path)!r}, strict=True)
    print(int(state["3"][0]))
atexit.register(at_exit)
"""
    found = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert found.stdout == "2\n", found.stderr
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]

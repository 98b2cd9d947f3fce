"""Saves, retention and clean-up among files of others, whatever these are called: not one byte of
them is lost.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrelay.checkpoint import Keep, Writer, async_save, latest, load, save, verify
from torchrelay.checkpoint.engine._background import saver as writer_state
from torchrelay.checkpoint.engine._read import ChunkReader
from torchrelay.checkpoint.storage._catalog import open_transaction, retain
from torchrelay.checkpoint.storage._local import LocalTransaction
from torchrelay.errors import ArgumentError, StorageError

DATA = "data-00000-00000.safetensors"
FOREIGN_MANIFEST = json.dumps({"format": "some-other-tool", "version": 1, "files": {DATA: {}}})


def _state(step: int) -> dict[str, Any]:
    return {"step": step, "w": torch.full((50,), float(step))}


def _contents(*folders: Path) -> dict[str, bytes | str]:
    """Everything in the folders: the bytes of files, where links point to, and folders."""
    found: dict[str, bytes | str] = {}
    for path in [path for folder in folders for path in (folder, *folder.rglob("*"))]:
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        elif path.is_file():
            found[str(path)] = path.read_bytes()
        else:
            found[str(path)] = "not a regular file"
    return found


def _fill(folder: Path) -> None:
    """Files as other tools write them, and some that look like a checkpoint's."""
    folder.mkdir()
    for name in (
        "part-00000.json",
        "part-00000-c000.json.gz",
        ".lock",
        ".lock.1234",
        "notes.txt",
        DATA,
        "saving.json",
    ):
        (folder / name).write_text(f"{name}, somebody's")
    (folder / "deep").mkdir()
    (folder / "deep" / "part-00001.json").write_text("deeper")


def _fill_parent(parent: Path) -> list[Path]:
    """Return what others have in the folder around our checkpoints."""
    elsewhere = parent.with_name("elsewhere")
    elsewhere.mkdir()
    (elsewhere / "step-3").write_text("a file outside")
    _fill(parent / "spark")
    (parent / "spark" / "manifest.json").write_text(FOREIGN_MANIFEST)
    _fill(parent / "step-7")  # in the series, by its name
    (parent / "step-7" / "manifest.json").write_text(FOREIGN_MANIFEST)
    _fill(parent / "broken")
    (parent / "broken" / "manifest.json").write_bytes(b'{"format":"torchrelay-checkpoint",\xff')
    (parent / "step-8").write_text("a file")
    (parent / "step-9").symlink_to(parent / "nowhere")
    (parent / "step-10").symlink_to(elsewhere)
    os.mkfifo(parent / "step-11")
    (parent / "step-12").mkdir()
    os.mkfifo(parent / "step-12" / "manifest.json")
    (parent / ".Trash-1000").mkdir()
    (parent / ".Trash-1000" / "kept").write_text("in the desktop's trash")
    (parent / ".backup.torchrelay-trash").write_text("a file with a name like ours")
    (parent / ".link.0123abcd.torchrelay-trash").symlink_to(elsewhere)
    (parent / ".link.torchrelay-saving").symlink_to(elsewhere)
    (parent / ".link.torchrelay-lock").symlink_to(elsewhere / "step-3")
    return [elsewhere, *(path for path in parent.iterdir())]


def test_saves_and_retention_among_files_of_others(tmp_path: Path) -> None:
    parent = tmp_path / "ckpt"
    parent.mkdir()
    foreign = _fill_parent(parent)
    before = _contents(*foreign)
    for step in range(3):
        save(_state(step), parent / f"step-{step}", keep=1, fsync=False)
        save(_state(step), parent / "last", fsync=False)
    async_save(_state(3), parent / "step-3", keep=1).result(60)
    writer_state.close()
    assert _contents(*foreign) == before
    ours = {path.name for path in parent.iterdir()} - {path.name for path in foreign}
    assert ours == {"step-3", "last"}
    assert latest(parent) == str(parent / "step-3")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["spark", "step-7", "broken", "step-8", "step-9", "step-12"])
def test_only_a_checkpoint_of_ours_is_replaced(tmp_path: Path, name: str) -> None:
    import torch.distributed.checkpoint as dcp

    parent = tmp_path / "ckpt"
    parent.mkdir()
    _fill_parent(parent)
    before = _contents(tmp_path)
    for write in (save, async_save):
        with pytest.raises(StorageError, match=name):
            write(_state(0), parent / name)
    with pytest.raises(dcp.CheckpointException, match=name):
        dcp.save(_state(0), storage_writer=Writer(parent / name))
    writer_state.close()
    assert _contents(tmp_path) == before


def test_files_of_others_inside_a_checkpoint_stay(tmp_path: Path) -> None:
    save(_state(0), tmp_path / "step-0", fsync=False)
    config = tmp_path / "step-0" / "config.json"
    config.write_text("mine")
    (tmp_path / "step-0" / "data-00099-00000.safetensors").write_text("mine too")
    with pytest.raises(StorageError, match=r"'config.json' in its folder is not part of it"):
        save(_state(1), tmp_path / "step-0")
    verify(tmp_path / "step-0")
    save(_state(1), tmp_path / "step-1", keep=1, fsync=False)
    # The checkpoint is removed, and what was added to it is not.
    assert sorted(os.listdir(tmp_path)) == ["step-0", "step-1"]
    assert sorted(os.listdir(tmp_path / "step-0")) == [
        "config.json",
        "data-00099-00000.safetensors",
    ]
    assert config.read_text() == "mine"
    with pytest.raises(StorageError, match="left alone"):
        save(_state(2), tmp_path / "step-0")


def test_files_of_others_get_their_folder_back_after_a_removal_that_was_killed(
    tmp_path: Path,
) -> None:
    save(_state(0), tmp_path / "step-0", fsync=False)
    (tmp_path / "step-0" / "config.json").write_text("mine")
    (tmp_path / "step-0").rename(tmp_path / ".step-0.torchrelay-saving")
    save(_state(1), tmp_path / "step-1", fsync=False)
    assert sorted(os.listdir(tmp_path)) == ["step-0", "step-1"]
    assert os.listdir(tmp_path / "step-0") == ["config.json"]
    # The name is in use again: the folder stays hidden, and its name cannot be saved or removed.
    (tmp_path / ".step-1.torchrelay-saving").mkdir()
    (tmp_path / ".step-1.torchrelay-saving" / "config.json").write_text("mine")
    with pytest.raises(StorageError, match=r"removing .*step-1: Directory not empty"):
        save(_state(2), tmp_path / "step-2", keep=1, fsync=False)
    assert os.listdir(tmp_path / ".step-1.torchrelay-saving") == ["config.json"]
    for step in (1, 2):
        verify(tmp_path / f"step-{step}")


def test_a_file_that_appears_during_a_save_is_not_lost(tmp_path: Path) -> None:
    save(_state(0), tmp_path / "x", fsync=False)

    def add(done: int, total: int) -> None:
        (tmp_path / "x" / "config.json").write_text("mine")

    with pytest.raises(StorageError, match=r"'config.json' in its folder"):
        save(_state(1), tmp_path / "x", fsync=False, progress=add)
    assert (tmp_path / "x" / "config.json").read_text() == "mine"
    verify(tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"]


def _saved(parent: Path, *names: str) -> None:
    for name in names:
        save(_state(0), parent / name, fsync=False)


def test_retention_stays_in_its_series(tmp_path: Path) -> None:
    others = ["best", "last", "best-1", "eval-1", "step-1-best", "run2-step-1", "1"]
    _saved(tmp_path, *others, "step-1", "step-2", "step-3")
    shutil.copytree(tmp_path / "best", tmp_path / "step-0")  # a copy of another, not of the series
    (tmp_path / "step-3").rename(tmp_path / "step-33")
    save(_state(4), tmp_path / "step-4", keep=2, fsync=False)
    assert sorted(os.listdir(tmp_path)) == sorted(
        [*others, "step-0", "step-33", "step-2", "step-4"]
    )
    for wrong in ("best", "last"):
        with pytest.raises(ArgumentError, match=f"the name '{wrong}' has no number"):
            save(_state(5), tmp_path / wrong, keep=1)


def test_retention_by_rule(tmp_path: Path) -> None:
    for step in range(0, 90, 10):
        rule = Keep(2, every=40, names=("step-50",))
        save(_state(step), tmp_path / f"step-{step}", keep=rule, fsync=False)
    kept = {int(name.removeprefix("step-")) for name in os.listdir(tmp_path)}
    assert kept == {0, 40, 50, 70, 80}
    async_save(_state(90), tmp_path / "step-90", keep=Keep(1, every=80)).result(60)
    writer_state.close()
    assert sorted(os.listdir(tmp_path)) == ["step-0", "step-80", "step-90"]
    for arguments in ({"last": 0}, {"every": 0}, {"names": "step-50"}):
        with pytest.raises(ArgumentError, match="keep: "):
            Keep(**arguments)


def test_a_checkpoint_that_a_link_points_to_is_kept(tmp_path: Path) -> None:
    _saved(tmp_path, "step-1", "step-2", "step-3")
    (tmp_path / "best").symlink_to("step-1")
    (tmp_path / "step-2-link").symlink_to(tmp_path / "step-3" / DATA)  # nothing that is removed
    save(_state(4), tmp_path / "step-4", keep=1, fsync=False)
    assert sorted(os.listdir(tmp_path)) == ["best", "step-1", "step-2-link", "step-4"]
    verify(tmp_path / "best")
    assert latest(tmp_path) == str(tmp_path / "step-4")
    (tmp_path / "current").symlink_to("step-4")
    assert latest(tmp_path) == str(tmp_path / "step-4")


@pytest.mark.parametrize("name", ["step-0", "step-1"])
def test_retention_removes_only_what_it_has_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Another saver of the series removes one meanwhile, or saves another one under its name."""
    _saved(tmp_path, "step-0", "step-1", "step-2")
    takes_lock = LocalTransaction._takes_lock

    def taken(self: LocalTransaction) -> bool:
        monkeypatch.undo()
        if name == "step-1":  # which is removed first
            shutil.rmtree(tmp_path / name)
        else:
            save(_state(7), tmp_path / name, fsync=False)
        return takes_lock(self)

    monkeypatch.setattr(LocalTransaction, "_takes_lock", taken)
    retain(tmp_path / "step-2", Keep(1))
    left = ["step-2"] if name == "step-1" else ["step-0", "step-2"]
    assert sorted(os.listdir(tmp_path)) == left
    assert all(verify(tmp_path / one) for one in left)


def test_a_torn_checkpoint_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    _saved(tmp_path, "step-1", "step-2", "step-3")
    manifest = tmp_path / "step-3" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    save(_state(4), tmp_path / "step-4", keep=2, fsync=False)
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3", "step-4"]
    with pytest.raises(StorageError, match="not a whole one"):
        save(_state(5), tmp_path / "step-3")
    state = _state(0)
    load(state, tmp_path / "step-2")


def test_a_checkpoint_that_is_removed_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removing(path: Path) -> None:
        """Remove ``path`` after the next load has read its manifest."""
        check_files = ChunkReader.check_files

        def check(self: ChunkReader, names: Iterable[str]) -> None:
            monkeypatch.undo()
            open_transaction(path).remove(self.manifest.id)
            check_files(self, names)

        monkeypatch.setattr(ChunkReader, "check_files", check)

    for step in range(3):
        save(_state(step), tmp_path / f"step-{step}", fsync=False)
    state = _state(-1)
    removing(tmp_path / "step-0")
    with pytest.raises(StorageError, match="step-0: the checkpoint was removed by retention"):
        load(state, tmp_path / "step-0")
    assert state["step"] == -1
    with pytest.raises(StorageError, match=r"may have removed it: the newest is step-2"):
        load(state, tmp_path / "step-0")
    removing(tmp_path / "step-2")
    load(state, tmp_path)
    assert state["step"] == 1

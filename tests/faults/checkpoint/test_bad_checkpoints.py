"""Damaged, foreign and hostile checkpoints: a typed error that names the place, and nothing
changed.

The checkpoints are kept in ``tests/faults/checkpoint/damaged``; its ``make.py`` says what is wrong
with each.
"""

from __future__ import annotations

import errno
import gc
import importlib.util
import os
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrelay import errors
from torchrelay.checkpoint import Reader, Writer, latest, load, save, verify
from torchrelay.checkpoint._tools import read_state
from torchrelay.checkpoint._types import DataFile
from torchrelay.checkpoint.engine._engine import described
from torchrelay.checkpoint.format._manifest import Parser, parse
from torchrelay.checkpoint.storage._catalog import open_transaction
from torchrelay.checkpoint.storage._local import LocalTransaction
from torchrelay.deferred import deferred_init, is_deferred
from torchrelay.errors import (
    ArgumentError,
    CorruptionError,
    MismatchError,
    PeerLostError,
    StorageError,
    UnsupportedError,
    from_json,
)

FOLDER = Path(__file__).with_name("damaged")


def _made() -> Any:
    spec = importlib.util.spec_from_file_location("checkpoints_make", FOLDER / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MADE = _made()


def _blank() -> dict[str, Any]:
    return {
        "weight": torch.full((6, 10), -1.0),
        "bias": torch.full((5,), -1.0, dtype=torch.float64),
        "step": None,
    }


def _unchanged(state: dict[str, Any]) -> bool:
    blank = _blank()
    return state["step"] is None and all(
        torch.equal(state[key], blank[key]) for key in ("weight", "bias")
    )


def test_the_undamaged_one_loads() -> None:
    state = _blank()
    load(state, FOLDER / "good")
    verify(FOLDER / "good")
    expected = MADE.state()
    assert torch.equal(state["weight"], expected["weight"]) and torch.equal(
        state["bias"], expected["bias"]
    )
    assert state["step"] == 7


@pytest.mark.parametrize("name", MADE.CASES)
def test_a_bad_checkpoint_is_refused_and_nothing_is_changed(name: str) -> None:
    _, kind, message = MADE.CASES[name]
    error = getattr(errors, kind)
    state = _blank()
    with pytest.raises(error, match=message):
        load(state, FOLDER / name)
    assert _unchanged(state)
    if kind == "MismatchError" or name == "unknown-dtype":
        return  # it fits itself
    if name != "value-of-unknown-kind":
        with pytest.raises(error, match=message):
            verify(FOLDER / name)
    metadata_error = name.startswith(
        (
            "manifest",
            "version",
            "path",
            "chunk",
            "bytes",
            "negative",
            "checksums",
            "header-claims",
        )
    )
    if metadata_error:
        with pytest.raises(error, match=message):
            Reader(FOLDER / name).read_metadata()


def test_a_claim_of_terabytes_allocates_nothing() -> None:
    """Where a state or its reader would take the size from the manifest, the file is measured
    first.
    """
    path = FOLDER / "claims-terabytes"

    def made() -> torch.nn.Module:
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(torch.empty(10**12))
        return module

    module = deferred_init(made)
    for read in (
        lambda: load(module, path, strict=False),
        lambda: verify(path),
        lambda: read_state(str(path)),
    ):
        with pytest.raises(CorruptionError, match=f"{MADE.DATA}: the file has 552 bytes, and 4000"):
            read()
    assert is_deferred(module)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_reports_our_errors() -> None:
    import torch.distributed.checkpoint as dcp

    for name in ("data-bit-flipped", "manifest-bit-flipped", "version-newer", "data-missing"):
        _, kind, message = MADE.CASES[name]
        state = _blank()
        with pytest.raises(dcp.CheckpointException, match=message) as caught:
            dcp.load(state, storage_reader=Reader(FOLDER / name))
        ((error, _),) = caught.value.failures.values()
        assert isinstance(error, getattr(errors, kind))
        assert _unchanged(state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_saves_no_value_that_json_cannot_hold(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with pytest.raises(
        dcp.CheckpointException,
        match=r"key: a checkpoint holds tensors and plain values",
    ):
        dcp.save({"key": object()}, storage_writer=Writer(tmp_path / "x"))
    assert not (tmp_path / "x").exists()
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize(
    "value", [object(), {print}, lambda: 0, (torch.ones(1), {print}), memoryview(b"x")]
)
def test_a_value_that_json_cannot_hold_is_named(value: object, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"^outer.inner"):
        save({"outer": {"inner": value}}, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_tensors_that_have_no_place_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="sparse: "):
        save({"sparse": torch.eye(2).to_sparse()}, tmp_path / "x")
    with pytest.raises(UnsupportedError, match="four bits: "):
        save({"four bits": torch.empty(2, dtype=torch.uint4)}, tmp_path / "x")  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match=r"two values of the state have the key 'a.b'"):
        save({"a.b": 1, "a": {"b": 2}}, tmp_path / "x")


def test_two_writers_on_one_path(tmp_path: Path) -> None:
    one, other = (open_transaction(tmp_path / "x", fsync=False) for _ in range(2))
    one.begin()
    with pytest.raises(StorageError, match="another save to this path is in progress") as caught:
        other.begin()
    assert caught.value.errno == errno.EBUSY
    one.discard()
    save({"a": 1}, tmp_path / "x")
    assert sorted(os.listdir(tmp_path)) == ["x"]


def test_a_lock_that_is_held_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the clean-up of a save beside it."""
    other = open_transaction(tmp_path / "x", fsync=False)
    other.begin()
    monkeypatch.setattr(
        "torchrelay.checkpoint.storage._local.time.sleep", lambda _: other.discard()
    )
    save({"a": 1}, tmp_path / "x", fsync=False)
    assert os.listdir(tmp_path) == ["x"]


def test_many_writers_on_one_path_leave_one_checkpoint(tmp_path: Path) -> None:
    """Savers in threads: each commits or is refused, and what is there is whole at every moment."""
    committed: list[int] = []
    refused: list[Exception] = []
    save({"n": -1}, tmp_path / "x", fsync=False)

    def run(number: int) -> None:
        for _ in range(10):
            try:
                save({"n": number, "t": torch.full((100,), number)}, tmp_path / "x", fsync=False)
                committed.append(number)
            except StorageError as error:
                refused.append(error)
            assert latest(tmp_path).endswith("/x")
            state: dict[str, Any] = {"n": None}
            load(state, tmp_path / "x")
            assert state["n"] in range(-1, 4)

    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            run(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert committed and all("in progress" in str(error) for error in refused)
    assert sorted(os.listdir(tmp_path)) == ["x"]
    verify(tmp_path / "x")


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``/dev/full`` refuses every byte, as a full disk does."""
    save({"t": torch.ones(1000)}, tmp_path / "step", fsync=False)

    real_open = os.open

    def full(path: Any, flags: int, mode: int = 0o777, **kwargs: Any) -> int:
        if str(path).endswith(".safetensors"):
            return real_open("/dev/full", os.O_WRONLY)
        return real_open(path, flags, mode, **kwargs)

    monkeypatch.setattr("torchrelay.checkpoint.storage._local.os.open", full)
    with pytest.raises(
        StorageError, match=r"writing .*data-00000-00000.safetensors.*No space"
    ) as caught:
        save({"t": torch.zeros(1000)}, tmp_path / "step")
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == ["step"]
    state = {"t": torch.zeros(1000)}
    load(state, latest(tmp_path))
    assert bool(state["t"].all())


def test_a_manifest_that_cannot_be_written_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write = os.pwrite

    def full(fd: int, data: memoryview, offset: int) -> int:
        if bytes(data[:2]) == b'{"':
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, data, offset)

    gc.collect()  # readers of other tests, which close their files then
    opened = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("torchrelay.checkpoint.storage._local.os.pwrite", full)
    with pytest.raises(StorageError, match=r"manifest.json at byte 0: No space.*free some space"):
        save({"t": torch.zeros(10)}, tmp_path / "step")
    assert len(os.listdir("/proc/self/fd")) == opened
    assert not os.listdir(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:  # root writes anywhere; the file system of /proc refuses even root
        target = Path("/proc/step")
    else:
        tmp_path.chmod(0o500)
        target = tmp_path / "step"
    with pytest.raises(StorageError, match=f"beginning to save {target}"):
        save({"a": 1}, target)
    tmp_path.chmod(0o700)


def test_what_is_not_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").write_text("mine")
    for name, message in (("file", "not a folder"), ("folder", "not a TorchRelay checkpoint")):
        with pytest.raises(StorageError, match=message):
            save({"a": 1}, tmp_path / name)
        with pytest.raises((StorageError, CorruptionError)):
            load({"a": 1}, tmp_path / name)
    assert (tmp_path / "folder" / "notes").read_text() == "mine"
    with pytest.raises(StorageError, match="no checkpoint here"):
        load({"a": 1}, tmp_path / "nowhere")
    with pytest.raises(StorageError, match="no committed checkpoint"):
        latest(tmp_path)
    with pytest.raises(ArgumentError, match="empty"):
        save({"a": 1}, "")


def test_kinds_and_keys_that_do_not_fit(tmp_path: Path) -> None:
    save({"a": torch.ones(2), "b": 1}, tmp_path / "x")
    with pytest.raises(MismatchError, match="'a' is a tensor in the checkpoint and a value here"):
        load({"a": 1}, tmp_path / "x")
    with pytest.raises(MismatchError, match="'b' is a value in the checkpoint and a tensor here"):
        load({"b": torch.ones(1)}, tmp_path / "x")
    with pytest.raises(MismatchError, match="lacks 'c', which the state has"):
        load({"a": torch.ones(2), "c": 1}, tmp_path / "x")
    state: dict[str, Any] = {"a": torch.zeros(2), "c": 1}
    load(state, tmp_path / "x", strict=False)
    assert state["c"] == 1 and bool(state["a"].all())
    for arguments in ({"threads": 0}, {"verify": "all"}, {"max_buffer_bytes": 0}):
        with pytest.raises(ArgumentError):
            load({"b": 1}, tmp_path / "x", **arguments)
    for refused in (lambda: save({"b": 1}, tmp_path / "x-1", keep=0), lambda: Writer(keep=0)):
        with pytest.raises(ArgumentError, match="keep: last must be at least 1, not 0"):
            refused()


def test_a_lost_folder_for_saving_is_an_error(tmp_path: Path) -> None:
    transaction = open_transaction(tmp_path / "x", fsync=False)
    assert isinstance(transaction, LocalTransaction)
    transaction.begin()
    shutil.rmtree(tmp_path / ".x.torchrelay-saving")
    with pytest.raises(StorageError, match="all ranks share"):
        transaction.create("data-00000-00000.safetensors")
    transaction.discard()


def test_a_file_that_is_given_up_frees_its_space(tmp_path: Path) -> None:
    """So that a full disk has room for the note that says so."""
    transaction = open_transaction(tmp_path / "x", fsync=False)
    transaction.begin()
    sink = transaction.create(MADE.DATA)
    sink.write(0, memoryview(bytes(10_000)))
    sink.abort()
    assert (tmp_path / ".x.torchrelay-saving" / MADE.DATA).stat().st_size == 0
    transaction.discard()


def test_a_reader_that_is_dropped_leaves_no_file_open() -> None:
    gc.collect()
    gc.disable()  # readers of other tests may be in cycles
    try:
        opened = len(os.listdir("/proc/self/fd"))
        reader = Reader(FOLDER / "good")
        reader.read_metadata()
        assert len(os.listdir("/proc/self/fd")) > opened
        del reader
        assert len(os.listdir("/proc/self/fd")) == opened
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["manifest.json", MADE.DATA, "model.safetensors", ".metadata"])
def test_a_fifo_does_not_hang(tmp_path: Path, name: str) -> None:
    shutil.copytree(FOLDER / "good", tmp_path / "x")
    if name not in ("manifest.json", MADE.DATA):
        for path in (tmp_path / "x").iterdir():
            path.unlink()
    (tmp_path / "x" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "x" / name)
    with pytest.raises(CorruptionError, match=f"{name}: not a regular file"):
        load(_blank(), tmp_path / "x")
    if name == "manifest.json":
        with pytest.raises(StorageError, match="no committed checkpoint"):
            latest(tmp_path)


def test_dimensions_without_end_are_refused_at_once() -> None:
    chunk = {"offsets": [0] * 2000, "sizes": [1] * 2000, "file": "f", "bytes": [0, 4], "crc32c": ""}
    for shape in ([1] * 2000, [1]):
        record = {"dtype": "float32", "shape": shape, "chunks": [chunk, chunk]}
        with pytest.raises(CorruptionError, match=r"'w' has .*2000 dimensions, more than 64"):
            Parser("x").tensors({"w": record}, {"f": DataFile(8, 0, 0)}, 1)


def test_a_key_that_occurs_twice_among_many_is_found() -> None:
    keys = [f'"{i}":0' for i in range(300_000)]
    with pytest.raises(CorruptionError, match="the key '299999' occurs twice"):
        parse(f"{{{','.join([*keys, keys[-1]])}}}".encode(), "x")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_value_outside_the_folder_of_dcp_is_not_read(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"value": "theirs"}, checkpoint_id=tmp_path / "x")
    metadata = dcp.FileSystemReader(tmp_path / "x").read_metadata()
    (info,) = metadata.storage_data.values()
    (tmp_path / "x" / info.relative_path).rename(tmp_path / "outside")
    for place in (str(tmp_path / "outside"), "../outside"):
        info.relative_path = place
        (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CorruptionError, match=f"'{place}' is not a file inside"):
            load({"value": None}, tmp_path / "x")


def test_an_error_names_its_rank_once() -> None:
    error: Exception = from_json(described(StorageError("rank 0: the disk is full"), 0))
    assert str(from_json(described(error, 0))) == "rank 0: the disk is full"
    error = from_json(described(KeyError("x"), 3))
    assert isinstance(error, PeerLostError) and error.ranks == (3,) and "rank 3: " in str(error)

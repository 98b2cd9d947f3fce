"""Checkpoints on an S3-compatible server: what object stores do differently from memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from s3 import s3_bucket
from torchrelay.checkpoint import async_save, latest, load, save, verify
from torchrelay.checkpoint.engine._background import saver
from torchrelay.checkpoint.engine._engine import Save, SaveOptions
from torchrelay.checkpoint.storage._catalog import open_transaction
from torchrelay.checkpoint.storage._remote import RemoteTransaction, _RemoteSink
from torchrelay.errors import CorruptionError, StorageError
from torchrelay.world import World

if TYPE_CHECKING:
    from ranks import RunProcesses

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("s3fs", reason="needs s3fs")
pytest.importorskip("moto.server", reason="needs moto, flask and flask-cors")

_PART_BYTES = 5 << 20  # the smallest part of an upload that S3 accepts


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a bucket on a server of its own, with uploads in small parts."""
    monkeypatch.setitem(fsspec.config.conf, "s3", {"default_block_size": _PART_BYTES})
    with s3_bucket(monkeypatch) as url:
        yield url


def _values(step: int) -> dict[str, Any]:
    """More than two parts of an upload."""
    numbers = torch.arange(3 * _PART_BYTES // 8, dtype=torch.float32)
    return {"w": numbers + step, "t": torch.arange(12.0).reshape(3, 4).t() * step, "step": step}


def _check(path: str, step: int) -> None:
    verify(path)
    state: dict[str, Any] = {
        key: torch.zeros_like(value) for key, value in _values(0).items() if key != "step"
    }
    state["step"] = None
    load(state, path)
    assert state["step"] == step
    assert all(torch.equal(state[key], _values(step)[key]) for key in ("w", "t"))


def test_saves_loads_and_failures(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = fsspec.filesystem("s3")
    for step in range(3):
        save(_values(step), f"{bucket}/run/step-{step}", keep=2)
    assert sorted(Path(path).name for path in fs.ls("bucket/run", detail=False)) == [
        "step-1",
        "step-2",
    ]
    assert latest(f"{bucket}/run") == f"{bucket}/run/step-2"
    _check(f"{bucket}/run/step-2", 2)
    with pytest.raises(StorageError, match="an object store cannot replace"):
        save(_values(9), f"{bucket}/run/step-2")

    # The writer process has no more than the environment to find the server by.
    assert (
        async_save(_values(3), f"{bucket}/run/step-3", keep=2).result(100) == f"{bucket}/run/step-3"
    )
    _check(latest(f"{bucket}/run"), 3)
    names = {path.rpartition("/")[2] for path in fs.ls("bucket/run/step-3", detail=False)}
    assert names == {"data-00000-00000.safetensors", "manifest.json"}

    # A save that was interrupted has no manifest; the next save to its URL removes what it left.
    fs.pipe_file("bucket/run/step-4/torchrelay-saving.json", b"0123")
    fs.pipe_file("bucket/run/step-4/data-00009-00000.safetensors", b"half")
    fs.invalidate_cache()
    assert latest(f"{bucket}/run") == f"{bucket}/run/step-3"
    save(_values(4), f"{bucket}/run/step-4")
    assert len(fs.ls("bucket/run/step-4", detail=False, refresh=True)) == 2

    content = bytearray(fs.cat_file("bucket/run/step-4/data-00000-00000.safetensors"))
    content[-5] ^= 1
    fs.pipe_file("bucket/run/step-4/data-00000-00000.safetensors", bytes(content))
    state = _values(0)
    with pytest.raises(CorruptionError, match="is damaged between bytes"):
        load(state, f"{bucket}/run/step-4")
    assert torch.equal(state["w"], _values(0)["w"])

    # A server that cannot be reached.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    fs.clear_instance_cache()
    with pytest.raises(StorageError, match="s3://bucket/run"):
        latest(f"{bucket}/run")


@pytest.fixture(params=["s3", "memory"])
def store(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty folder in an object store."""
    if request.param == "s3":
        yield f"{request.getfixturevalue('bucket')}/team"
    else:
        yield "memory://team"
        fsspec.filesystem("memory").rm("/team", recursive=True)


def _contents(url: str) -> dict[str, bytes]:
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return {path.removeprefix(root): fs.cat_file(path) for path in fs.find(root)}


def _put(url: str, content: bytes = b"theirs") -> None:
    fs, path = fsspec.core.url_to_fs(url)
    fs.pipe_file(path, content)


def test_objects_of_others_are_left_alone(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"step": 0, "w": torch.ones(5)}
    foreign = (
        "exp/data-00000-00000.safetensors",
        "exp/part-00000.json",
        "exp/step-1/manifest.json",
        "exp/step-1/part-1/part-00000.json",
        "exp/step-7/part-00000.json",
        "other/manifest.json",
        "other/torchrelay-saving.json",
        "step-9",
        "best/notes.txt",
    )
    for name in foreign:
        _put(f"{store}/{name}")
    _put(f"{store}/exp/empty/manifest.json", b"")
    before = _contents(store)
    for name in ("exp", "exp/empty", "exp/step-1", "exp/step-7", "other", "step-9", "best"):
        for write in (save, async_save):
            with pytest.raises(StorageError, match=rf"/{name}: there (is|are)"):
                write(small, f"{store}/{name}")
    for step in (2, 3):
        save(small, f"{store}/exp/step-{step}", keep=1)
        if step == 2:
            _put(f"{store}/exp/step-2/config.json")
    added = {name: data for name, data in _contents(store).items() if name not in before}
    assert {name.rpartition("/")[0] for name in added if name != "/exp/step-2/config.json"} == {
        "/exp/step-3"
    }
    assert added["/exp/step-2/config.json"] == b"theirs"
    assert {name: _contents(store)[name] for name in before} == before
    assert latest(f"{store}/exp") == f"{store}/exp/step-3"

    # A save that fails removes its own objects only; one that was overtaken removes nothing.
    failing, overtaken = (open_transaction(f"{store}/exp/step-{step}") for step in (4, 5))
    for transaction in (failing, overtaken):
        transaction.begin()
        transaction.open_note("torchrelay-part-00001.json")(b"{}")
    _put(f"{store}/exp/step-4/notes.txt")
    failing.discard()
    _put(f"{store}/exp/step-5/torchrelay-saving.json", b"of a later save")
    overtaken.discard()
    found = _contents(store)
    assert {name for name in found if "/step-4/" in name} == {"/exp/step-4/notes.txt"}
    assert {name for name in found if "/step-5/" in name} == {
        "/exp/step-5/torchrelay-part-00001.json",
        "/exp/step-5/torchrelay-saving.json",
    }


def test_a_removal_that_is_interrupted_is_finished_by_the_next_one(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"step": 0, "w": torch.ones(5)}
    save(small, f"{store}/step-1")
    fs = fsspec.core.url_to_fs(store)[0]
    real_rm = fs.rm_file

    def killed(path: str) -> None:
        if path.endswith(".safetensors"):
            raise OSError("interrupted")
        real_rm(path)

    with monkeypatch.context() as patched:
        patched.setattr(fs, "rm_file", killed)
        with pytest.raises(StorageError, match="interrupted"):
            save(small, f"{store}/step-2", keep=1)
    assert latest(store) == f"{store}/step-2"
    assert [name for name in _contents(store) if "/step-1/" in name]
    save(small, f"{store}/step-3", keep=1)
    assert {name.split("/")[1] for name in _contents(store)} == {"step-3"}


def test_a_manifest_that_arrives_without_an_answer(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not known whether the checkpoint is committed, so its data stay."""
    fs = fsspec.core.url_to_fs(store)[0]
    put = fs.pipe_file

    def unanswered(path: str, content: bytes) -> None:
        put(path, content)
        if path.endswith("manifest.json"):
            raise OSError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(fs, "pipe_file", unanswered)
        with pytest.raises(StorageError, match="no answer"):
            save({"w": torch.ones(5)}, f"{store}/step-1")
    assert verify(f"{store}/step-1")
    save({"w": torch.ones(5)}, f"{store}/step-2", keep=1)
    assert {name.split("/")[1] for name in _contents(store)} == {"step-2"}


def test_an_upload_ends_before_the_next_one_begins(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []

    def logged(name: str) -> None:
        call = getattr(_RemoteSink, name)

        def logging(self: Any, *args: Any) -> None:
            if (self._where, name) not in calls[-1:]:
                calls.append((self._where, name))
            call(self, *args)

        monkeypatch.setattr(_RemoteSink, name, logging)

    logged("write")
    logged("close")
    monkeypatch.setattr(RemoteTransaction, "max_file_bytes", 400)
    save({f"w{i}": torch.full((100,), float(i)) for i in range(3)}, f"{store}/step-1", threads=1)
    assert verify(f"{store}/step-1")
    assert [name for _, name in calls] == ["write", "close"] * 3

    # One that has ended is not given up when another fails.
    calls.clear()

    def full(self: Any, offset: int, data: memoryview) -> None:
        raise StorageError("the store is full")

    logged("abort")
    write = _RemoteSink.write
    monkeypatch.setattr(
        _RemoteSink,
        "write",
        lambda self, *args: (full if "00001.safe" in self._where else write)(self, *args),
    )
    with pytest.raises(StorageError, match="the store is full"):
        save({f"w{i}": torch.ones(100) for i in range(2)}, f"{store}/step-2", threads=1)
    gc.collect()  # the destructor of a file that was given up uploads nothing
    assert {name.split("/")[1] for name in _contents(store)} == {"step-1"}


def test_a_failure_is_not_hidden_by_those_of_the_clean_up(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = _RemoteSink.write

    def unreachable(*args: Any) -> Any:
        raise StorageError("the store is unreachable")

    def full(self: _RemoteSink, offset: int, data: memoryview) -> None:
        write(self, offset, data)
        patched.setattr(RemoteTransaction, "is_marked", unreachable)
        raise StorageError("the store is full")

    with monkeypatch.context() as patched:
        patched.setattr("s3fs.core.S3File.discard", unreachable)
        patched.setattr(_RemoteSink, "write", full)
        with pytest.raises(StorageError, match="the store is full"):
            save({"w": torch.ones(5)}, f"{bucket}/run/step-1")
        gc.collect()  # the destructor of a file that was given up uploads nothing
    assert [*_contents(f"{bucket}/run")] == ["/step-1/torchrelay-saving.json"]
    save({"w": torch.ones(5)}, f"{bucket}/run/step-1")
    assert verify(f"{bucket}/run/step-1")


def _save_often(world: World, url: str, saves: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=world.connect(), rank=world.rank, world_size=world.size)
    for step in range(saves):
        state = {f"w{world.rank}": torch.full((10,), float(step)), "step": step}
        async_save(state, f"{url}/step-{step}", keep=2).result(200)
    saver.close()


@pytest.mark.timeout(300)
def test_asynchronous_saves_of_two_ranks(bucket: str, run_processes: RunProcesses) -> None:
    """The coordinator removes the parts' notes as soon as it has committed."""
    environ = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    results = run_processes(
        _save_often, 2, timeout_s=250, environ=environ, url=f"{bucket}/run", saves=6
    )
    assert all(result.ok for result in results), [result.error for result in results]
    verify(latest(f"{bucket}/run"))
    assert len(fsspec.filesystem("s3").ls("bucket/run", refresh=True)) == 2


def test_a_marker_that_goes_away_between_two_looks(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Save(f"{store}/step-1", SaveOptions())
    save_id = saving.transaction.begin()
    assert saving.is_committed(save_id) is None
    assert saving.is_committed("of another save") is False
    fs, root = fsspec.core.url_to_fs(f"{store}/step-1")
    exists = fs.exists

    def removed_after(path: str, **options: Any) -> bool:
        found = bool(exists(path, **options))
        if found:
            fs.rm_file(path)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(fs, "exists", removed_after)
        assert saving.is_committed(save_id) is None  # one look, or none
    fs.rm_file(f"{root}/torchrelay-saving.json")
    assert saving.is_committed(save_id) is False
    saving.transaction.discard()


def test_the_newest_is_found_without_a_request_per_object(
    monkeypatch: pytest.MonkeyPatch, bucket: str
) -> None:
    fs = fsspec.filesystem("s3")
    for step in range(3):
        save({"step": step}, f"{bucket}/run/step-{step}")
    for number in range(50):
        fs.pipe_file(f"bucket/run/metrics-{number}.json", b"")
    requests: list[str] = []
    call = type(fs)._call_s3

    async def counted(self: Any, method: str, *args: Any, **options: Any) -> Any:
        requests.append(method)
        return await call(self, method, *args, **options)

    monkeypatch.setattr(type(fs), "_call_s3", counted)
    assert latest(f"{bucket}/run") == f"{bucket}/run/step-2"
    # The first lines of three manifests, at once, and then one whole one.
    assert requests.count("get_object") == 4 and len(requests) < 10, requests

"""What is written: plain safetensors files that others read, a manifest that gives back what went
in.
"""

from __future__ import annotations

import gc
import json
import math
import os
import pickle
import random
import resource
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from torchrelay import _native
from torchrelay.checkpoint import Reader, latest, load, save, verify
from torchrelay.checkpoint._types import DTYPES
from torchrelay.checkpoint.engine._engine import Save, SaveOptions
from torchrelay.checkpoint.storage._local import LocalFolder
from torchrelay.deferred import deferred_init, is_deferred
from torchrelay.errors import ArgumentError, CorruptionError, MismatchError, StorageError


def _crc32c_by_definition(data: bytes) -> int:
    """The remainder of polynomial division, bit by bit (RFC 3720, appendix B.4)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_crc32c_is_that_of_the_definition() -> None:
    assert _native.crc32c(b"123456789") == 0xE3069283
    data = random.Random(0).randbytes(40_000)
    # Below, at and above the length at which three streams are interleaved; at odd addresses.
    for start, size in ((0, 0), (1, 1), (3, 7), (1, 4096), (5, 12_287), (0, 12_288), (7, 30_011)):
        part = data[start : start + size]
        assert _native.crc32c(memoryview(data)[start : start + size]) == _crc32c_by_definition(part)


def test_crc32c_takes_pieces() -> None:
    data = os.urandom(70_001)
    assert _native.crc32c(data[1000:], _native.crc32c(data[:1000])) == _native.crc32c(data)
    blocks = _native.crc32c_blocks(data, 65_536)
    assert blocks == b"".join(
        _native.crc32c(part).to_bytes(4, "little") for part in (data[:65_536], data[65_536:])
    )


def test_safetensors_reads_what_we_write_at_aligned_addresses(tmp_path: Path) -> None:
    state = {
        "odd": torch.arange(7, dtype=torch.uint8),
        "f32": torch.randn(3, 5),
        "strided": torch.randn(4, 6).t(),
        "c64": torch.randn(3, dtype=torch.complex64),
        "c128": torch.randn(3, dtype=torch.complex128),
        "__metadata__": torch.ones(2),
        "__padding__.0": torch.ones(3),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    }
    save(state, tmp_path / "x")
    found = safetensors.torch.load_file(tmp_path / "x" / "data-00000-00000.safetensors")
    for key in ("odd", "f32", "strided", "c64"):
        assert torch.equal(found[key], state[key])
    assert torch.equal(torch.view_as_complex(found["c128"]), state["c128"])
    manifest = json.loads((tmp_path / "x" / "manifest.json").read_text())
    for entry in manifest["tensors"].values():
        assert entry["chunks"][0]["bytes"][0] % 64 == 0
    again = {key: torch.zeros_like(value) for key, value in state.items()}
    load(again, tmp_path / "x")
    assert all(torch.equal(again[key], state[key]) for key in state)


def test_many_small_tensors_share_reads_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [*range(1300), 0, 5_000_000]
    state = {f"layer.{i}": torch.arange(size, dtype=torch.int16) for i, size in enumerate(sizes)}
    state["turned"] = torch.arange(600.0).reshape(20, 30).t()
    calls: list[str] = []

    def count(name: str) -> None:
        transfer = getattr(os, name)

        def counted(*arguments: Any) -> Any:
            calls.append(name)
            return transfer(*arguments)

        monkeypatch.setattr(f"torchrelay.checkpoint.storage._local.os.{name}", counted)

    count("pwrite")
    count("preadv")
    save(state, tmp_path / "x", fsync=False)
    found = {key: torch.zeros_like(value) for key, value in state.items()}
    load(found, tmp_path / "x")
    assert len(calls) < 40
    assert all(torch.equal(found[key], value) for key, value in state.items())
    verify(tmp_path / "x")

    manifest = json.loads((tmp_path / "x" / "manifest.json").read_text())
    start, _ = manifest["tensors"]["layer.700"]["chunks"][0]["bytes"]
    data = tmp_path / "x" / "data-00000-00000.safetensors"
    content = bytearray(data.read_bytes())
    content[start + 3] ^= 1
    data.write_bytes(content)
    where = f"tensor 'layer.700' is damaged between bytes {start} and {start + 1400}"
    for read in (lambda: load(found, tmp_path / "x"), lambda: verify(tmp_path / "x")):
        with pytest.raises(CorruptionError, match=where):
            read()


def test_ranges_of_memory_are_copied_and_checksummed() -> None:
    source = np.arange(1000, dtype=np.uint8)
    target = np.zeros(1000, np.uint8)
    starts, sizes = np.array([0, 990, 500], np.uint64), np.array([100, 10, 0], np.uint64)
    to, of = (starts + np.uint64(memory.ctypes.data) for memory in (target, source))
    _native.copy_memory(to, of, sizes)
    assert np.array_equal(np.flatnonzero(target != source), np.flatnonzero(source[100:990]) + 100)
    expected = [_native.crc32c(source[:100]), _native.crc32c(source[990:]), 0]
    assert np.frombuffer(_native.crc32c_of_memory(of, sizes), "<u4").tolist() == expected
    with pytest.raises(ValueError, match="one length"):
        _native.copy_memory(to, of, sizes[:2])
    with pytest.raises(ValueError, match="one length"):
        _native.crc32c_of_memory(of, sizes[:2])


def test_a_file_that_ends_while_it_is_verified_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(2500))
    with closing(LocalFolder(str(tmp_path))) as folder:
        starts, sizes = np.array([0, 1000, 2000], np.uint64), np.array([1000, 1000, 500], np.uint64)
        whole = folder.checksums("data", starts, sizes)
        assert whole == _native.crc32c_blocks(bytes(2500), 1000)
        with pytest.raises(CorruptionError, match="data: the file ends at byte 2500, 700 bytes"):
            folder.checksums("data", starts + np.uint64(700), sizes)


def _random_bits(name: str, *shape: int) -> torch.Tensor:
    dtype = DTYPES[name]
    data = random.Random(1).randbytes(math.prod(shape) * dtype.itemsize)
    if name == "bool":
        data = bytes(byte & 1 for byte in data)
    raw = torch.tensor(list(data), dtype=torch.uint8)
    return raw.view(getattr(torch, name)).reshape(shape)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_keeps_its_bits(name: str, tmp_path: Path) -> None:
    """Any bits, NaNs among them; contiguous, transposed and 0-dimensional."""
    state = {
        "whole": _random_bits(name, 6, 10),
        "transposed": _random_bits(name, 3, 7).t(),
        "scalar": _random_bits(name, 1).reshape(()),
        "empty": _random_bits(name, 0, 4),
    }
    save(state, tmp_path / "x", fsync=False)
    found = {key: torch.empty_like(value) for key, value in state.items()}
    load(found, tmp_path / "x")
    for key, value in state.items():
        assert found[key].dtype is value.dtype and found[key].shape == value.shape
        if value.numel():
            assert _bits(found[key]) == _bits(value), key

    # The safetensors package agrees on the type and finds the same bytes.
    data = (tmp_path / "x" / "data-00000-00000.safetensors").read_bytes()
    stored = dict(safetensors.deserialize(data))["whole"]
    assert bytes(stored["data"]) == _bits(state["whole"])
    shapes = {"complex32": [6, 10, 2], "complex128": [6, 10, 2], "float4_e2m1fn_x2": [6, 20]}
    assert stored["shape"] == shapes.get(name, [6, 10])
    if name not in ("complex32", "complex128"):
        found = safetensors.torch.load_file(tmp_path / "x" / "data-00000-00000.safetensors")
        for key in ("whole", "transposed"):
            assert found[key].dtype is state[key].dtype and _bits(found[key]) == _bits(state[key])


def test_a_slice_reads_its_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chunk that holds a whole tensor, a reader of some rows reads these rows."""
    whole = torch.randn(64, 1000)
    save({"weight": whole}, tmp_path / "x")
    read: list[int] = []
    real_read = LocalFolder.read

    def counted(self: LocalFolder, name: str, offset: int, into: memoryview) -> None:
        if name.endswith(".safetensors"):
            read.append(len(into))
        real_read(self, name, offset, into)

    monkeypatch.setattr(LocalFolder, "read", counted)
    target = deferred_init(torch.nn.Linear, 1000, 64, bias=False)
    load(target, tmp_path / "x", shard=lambda name, tensor: (slice(16, 20),), verify="none")
    assert torch.equal(target.weight, whole[16:20])
    assert sum(read) == 4 * 1000 * 4


@pytest.mark.parametrize(
    ("name", "limit_bytes"),
    [("format._manifest.MAX_MANIFEST_BYTES", 1000), ("engine._written.MAX_HEADER_BYTES", 2000)],
)
def test_what_no_reader_would_take_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, limit_bytes: int
) -> None:
    monkeypatch.setattr(f"torchrelay.checkpoint.{name}", limit_bytes, raising=False)
    with pytest.raises(ArgumentError, match=f"more than the {limit_bytes} that readers take"):
        save({f"w{i}": torch.ones(1) for i in range(100)}, tmp_path / "x")
    with pytest.raises(ArgumentError, match=r"^w: .*at most 64 dimensions, and this one has 65"):
        save({"w": torch.ones((1,) * 65)}, tmp_path / "x")
    assert not os.listdir(tmp_path)


def test_a_file_has_so_many_chunks_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrelay.checkpoint.engine._engine._MAX_FILE_CHUNKS", 30, raising=False)
    state = {f"w{i}": torch.full((2,), float(i)) for i in range(100)}
    save(state, tmp_path / "x", fsync=False)
    assert len(os.listdir(tmp_path / "x")) == 4 + 1
    found = {key: torch.zeros(2) for key in state}
    load(found, tmp_path / "x")
    assert all(torch.equal(found[key], state[key]) for key in state)


def test_more_files_than_a_process_may_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrelay.checkpoint.storage._local._MAX_OPEN_FILES", 5, raising=False)
    gc.collect()  # readers of other tests, which close their files then
    opened = [int(name) for name in os.listdir("/proc/self/fd")]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(opened) + 50
    state = {f"w{i}": torch.full((2,), float(i)) for i in range(limit)}
    for key, value in state.items():
        safetensors.torch.save_file({key: value}, tmp_path / f"data-{key}.safetensors")
    found = {key: torch.zeros(2) for key in state}
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        verify(tmp_path)
        load(found, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(torch.equal(found[key], state[key]) for key in state)
    assert len(os.listdir("/proc/self/fd")) == len(opened)


def test_safetensors_files_of_others_are_read(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(4, 4), "b": torch.ones(3, dtype=torch.bfloat16)}
    (tmp_path / "sharded").mkdir()
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    safetensors.torch.save_file({"a": tensors["a"]}, tmp_path / "sharded" / "model-1.safetensors")
    safetensors.torch.save_file({"b": tensors["b"]}, tmp_path / "sharded" / "model-2.safetensors")
    for path in (tmp_path / "model.safetensors", tmp_path / "sharded"):
        found = {key: torch.zeros_like(value) for key, value in tensors.items()}
        load(found, path)
        assert all(torch.equal(found[key], tensors[key]) for key in tensors)
        verify(path)
    assert not verify(tmp_path / "sharded")  # it has no checksums
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[:-1])
    with pytest.raises(CorruptionError, match="cut short"):
        load(found, tmp_path / "cut.safetensors")


def test_of_a_snapshot_with_several_sets_of_weights_one_is_read(tmp_path: Path) -> None:
    def loaded(index: str | None = None, **files: float) -> float:
        folder.mkdir()
        for name, value in files.items():
            path = folder / f"{name.replace('_', '.')}.safetensors"
            safetensors.torch.save_file({"w": torch.full((3,), value)}, path)
        if index is not None:
            (folder / "model.safetensors.index.json").write_text(index)
        found = {"w": torch.zeros(3)}
        try:
            load(found, folder)
            if "not-here" not in (index or ""):
                verify(folder)
        finally:
            shutil.rmtree(folder)
        return float(found["w"][0])

    folder = tmp_path / "snapshot"
    assert loaded(model=1.0, model_fp16=2.0) == 1.0
    index = json.dumps({"metadata": {}, "weight_map": {"w": "part.safetensors"}})
    assert loaded(index, consolidated=1.0, part=2.0) == 2.0
    assert loaded(index, model=1.0, part=2.0) == 1.0  # as transformers chooses
    with pytest.raises(CorruptionError, match=r"index\.json: none of the files that it lists"):
        loaded(index, other=1.0)
    index = json.dumps({"weight_map": {"w": "part.safetensors", "v": "not-here.safetensors"}})
    assert loaded(index, part=2.0) == 2.0
    for damaged in ("{}", "[]", '{"weight_map": {"w": []}}', '{"weight_map": 1}', "{"):
        with pytest.raises(CorruptionError, match=r"index\.json: the index is damaged"):
            loaded(damaged, part=2.0)


def test_files_of_different_tensors_are_one_state(tmp_path: Path) -> None:
    for name in ("model", "head"):
        safetensors.torch.save_file({name: torch.ones(3)}, tmp_path / f"{name}.safetensors")
    found = {"model": torch.zeros(3), "head": torch.zeros(3)}
    load(found, tmp_path)
    assert all(tensor.eq(1).all() for tensor in found.values())


def test_padding_is_that_of_our_files_only(tmp_path: Path) -> None:
    tensors = {"__padding__.0": torch.ones(3, dtype=torch.uint8), "__padding__x": torch.ones(4)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    found = {key: torch.zeros_like(value) for key, value in tensors.items()}
    load(found, tmp_path / "model.safetensors")
    assert all(torch.equal(found[key], tensors[key]) for key in tensors)

    state = {"a": torch.ones(3), "b": torch.ones(5), "c": torch.ones(7)}
    save(state, tmp_path / "x", fsync=False)
    single = tmp_path / "x" / "data-00000-00000.safetensors"
    missing, unexpected = load({key: torch.zeros_like(state[key]) for key in state}, single)
    assert not missing and not unexpected
    assert verify(tmp_path / "x")
    with safetensors.safe_open(single, "pt") as file:  # others see it as a tensor
        (first, *_) = [key for key in file.keys() if key.startswith("__padding__")]  # noqa: SIM118
    content = bytearray(single.read_bytes())
    header = int.from_bytes(content[:8], "little")
    start = 8 + header + json.loads(content[8 : 8 + header])[first]["data_offsets"][0]
    content[start + 1] = 1
    single.write_bytes(content)
    with pytest.raises(CorruptionError, match=rf"the padding between bytes {start} and \d+ is da"):
        verify(tmp_path / "x")


def test_paths_of_bytes_and_of_other_types(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path / "x")
    save({"a": 1}, path)
    state = {"a": 0}
    load(state, path)
    assert verify(path) and state["a"] == 1
    assert latest(os.fsencode(tmp_path)) == str(tmp_path / "x")
    for call in (lambda: save({"a": 1}, 7), lambda: load({"a": 1}, None), lambda: latest([])):  # type: ignore[arg-type, call-overload]
        with pytest.raises(ArgumentError, match="the path of a checkpoint is a string or a path"):
            call()
    for call in (lambda: save({"a": 1}, "a\0b"), lambda: load({"a": 1}, "a\0b")):
        with pytest.raises(ArgumentError, match="null character"):
            call()


def test_tied_tensors_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(100, 100, bias=False), torch.nn.Linear(100, 100, bias=False)
    )
    model[1].weight = model[0].weight
    save(model, tmp_path / "x")
    assert sum(f.stat().st_size for f in (tmp_path / "x").glob("*.safetensors")) < 1.2 * 40_000
    expected = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.zero_()
    load(model, tmp_path / "x")
    assert torch.equal(model[1].weight, expected) and model[1].weight is model[0].weight


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tied_tensors_that_differ_in_the_checkpoint_have_the_last_value(tmp_path: Path) -> None:
    """As ``load_state_dict()`` leaves them, in whatever order they lie in the files."""
    import torch.distributed.checkpoint as dcp

    from torchrelay.checkpoint import Reader

    save({"0.weight": torch.zeros(300, 300), "1.weight": torch.ones(300, 300)}, tmp_path / "x")
    tied = torch.empty(300, 300)
    for first, second, value in (("0", "1", 1.0), ("1", "0", 0.0)):
        state = {f"{first}.weight": tied, f"{second}.weight": tied.detach()}
        assert load(state, tmp_path / "x", threads=1) == ([], [])
        assert torch.equal(tied, torch.full((300, 300), value))

    # DCP sorts the keys.
    save({"1.weight": torch.ones(300, 300), "0.weight": torch.zeros(300, 300)}, tmp_path / "y")
    for name in ("x", "y"):
        tied.fill_(-1)
        dcp.load(state, storage_reader=Reader(tmp_path / name, threads=1))
        assert bool((tied == 1).all())

    def made() -> Any:
        model: Any = torch.nn.Sequential(*(torch.nn.Linear(300, 300, bias=False) for _ in "ab"))
        model[0].weight = model[1].weight
        return model

    model = deferred_init(made)
    assert load(model, tmp_path / "x") == ([], [])
    assert model[0].weight is model[1].weight and bool((model[1].weight == 1).all())


def test_a_module_and_its_optimizer(tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(5, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        return model, optimizer

    model, optimizer = made()
    save({"model": model, "optimizer": optimizer, "epoch": 3}, tmp_path / "x")
    other, its_optimizer = made()
    its_optimizer.param_groups[0]["lr"] = 9.0
    state: dict[str, Any] = {"model": other, "optimizer": its_optimizer, "epoch": 0}
    load(state, tmp_path / "x")
    assert state["epoch"] == 3 and its_optimizer.param_groups[0]["lr"] == 0.1
    expected = [model.state_dict(), optimizer.state_dict()["state"]]
    found = [other.state_dict(), its_optimizer.state_dict()["state"]]
    for one, two in zip(expected, found, strict=True):
        assert str(one) == str(two)
    fresh = torch.optim.AdamW(other.parameters())
    load({"model": other, "optimizer": fresh, "epoch": 0}, tmp_path / "x")
    assert str(fresh.state_dict()["state"]) == str(optimizer.state_dict()["state"])


def _net() -> torch.nn.Module:
    net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
    net[0].register_buffer("scratch", torch.full((3,), 2.0), persistent=False)
    return net


def test_a_deferred_module_is_read_and_only_the_rest_initialised(tmp_path: Path) -> None:
    source = _net()
    save({"model": source, "other": 1}, tmp_path / "x")
    target = deferred_init(_net)
    draws = torch.random.get_rng_state()
    load(target, latest(tmp_path), prefix="model.")
    assert not is_deferred(target)
    assert torch.equal(draws, torch.random.get_rng_state())
    for key, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[key], value)
    assert target[0].scratch.tolist() == [2.0] * 3  # type: ignore[index]

    # What the file lacks is what an eager model of the same seed has.
    save(
        {k: v for k, v in source.state_dict().items() if not k.startswith("2.")}, tmp_path / "part"
    )
    torch.manual_seed(5)
    eager = _net()
    torch.manual_seed(5)
    deferred = deferred_init(_net)
    with pytest.raises(MismatchError, match=r"lacks '2.weight'.*initialize_missing=True"):
        load(deferred, tmp_path / "part")
    assert is_deferred(deferred[0].weight)  # type: ignore[index]
    found = load(deferred, tmp_path / "part", initialize_missing=True)
    assert found == (["2.weight", "2.bias"], [])
    assert torch.equal(deferred[2].weight, eager[2].weight)  # type: ignore[index]
    assert torch.equal(deferred[0].weight, source[0].weight)  # type: ignore[index]


def test_a_deferred_module_takes_a_slice_of_each_tensor(tmp_path: Path) -> None:
    source = _net()
    save(source, tmp_path / "x")
    target = deferred_init(_net)

    def rows(name: str, tensor: torch.Tensor) -> tuple[slice, ...] | None:
        return (slice(1, 2),) if name.endswith("weight") and tensor.dim() == 2 else None

    load(target, tmp_path / "x", shard=rows)
    assert torch.equal(target[0].weight, source[0].weight[1:2])  # type: ignore[index]
    assert torch.equal(target[1].weight, source[1].weight)  # type: ignore[index]


def test_a_damaged_checkpoint_leaves_a_deferred_module_deferred(tmp_path: Path) -> None:
    save(_net(), tmp_path / "x")
    path = tmp_path / "x" / "data-00000-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    target = deferred_init(_net)
    with pytest.raises(CorruptionError):
        load(target, tmp_path / "x")
    assert is_deferred(target)


def test_latest_and_keep(tmp_path: Path) -> None:
    (tmp_path / "step-9").mkdir()  # never committed
    for step in (1, 10, 2, 3):
        save({"step": step}, tmp_path / f"step-{step}", keep=2, fsync=False)
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3", "step-9"]
    assert latest(tmp_path) == str(tmp_path / "step-3")  # the last committed, whatever its number
    (tmp_path / "step-3" / "manifest.json").unlink()
    assert latest(tmp_path) == str(tmp_path / "step-2")


def test_progress_and_replacement(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    state = {"a": torch.ones(10**6), "b": torch.ones(100, 100).t()}
    save(state, tmp_path / "x", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (4_040_000, 4_040_000)
    seen.clear()
    save({"a": torch.zeros(10)}, tmp_path / "x", progress=True, checksum=False)
    found = {"a": torch.ones(10)}
    with pytest.warns(UserWarning, match="saved with checksum=False") as caught:
        load(found, tmp_path / "x", progress=lambda done, total: seen.append((done, total)))
    assert caught[0].filename == __file__
    assert not verify(tmp_path / "x")
    load(found, tmp_path / "x", verify="header")
    assert seen[-1] == (40, 40) and not found["a"].any()
    assert sorted(os.listdir(tmp_path)) == ["x"]
    assert sorted(os.listdir(tmp_path / "x")) == ["data-00000-00000.safetensors", "manifest.json"]


def test_an_fsspec_url(tmp_path: Path) -> None:
    import fsspec  # type: ignore[import-untyped]

    state: dict[str, Any] = {
        "a": torch.randn(1000, 300),
        "c": torch.ones(3, dtype=torch.uint8),
        "b": [1, (2,)],
    }
    for step in range(3):
        save({**state, "step": step}, f"memory://bucket/run/step-{step}", keep=2)
    fs = fsspec.filesystem("memory")
    assert sorted(Path(p).name for p in fs.ls("/bucket/run", detail=False)) == ["step-1", "step-2"]
    path = latest("memory://bucket/run")
    assert path == "memory://bucket/run/step-2"
    verify(path)
    found: dict[str, Any] = {
        "a": torch.zeros(1000, 300),
        "c": torch.zeros(3, dtype=torch.uint8),
        "b": None,
        "step": None,
    }
    load(found, path)
    assert torch.equal(found["a"], state["a"]) and found["b"] == [1, (2,)] and found["step"] == 2
    with pytest.raises(StorageError, match="an object store cannot replace"):
        save(state, path)
    data = "/bucket/run/step-2/data-00000-00000.safetensors"
    content = bytearray(fs.cat_file(data))
    content[-5] ^= 1
    fs.pipe_file(data, bytes(content))
    with pytest.raises(CorruptionError, match="is damaged between bytes"):
        load(found, path)
    fs.rm("/bucket", recursive=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_checkpoint_id_and_keep(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from torchrelay.checkpoint import Reader, Writer

    writer = Writer(keep=1)
    for step in range(2):
        dcp.save(
            {"w": torch.full((3,), step)},
            storage_writer=writer,
            checkpoint_id=tmp_path / f"step-{step}",
        )
    assert os.listdir(tmp_path) == ["step-1"]
    state = {"w": torch.zeros(3, dtype=torch.int64)}
    dcp.load(state, storage_reader=Reader(), checkpoint_id=tmp_path / "step-1")
    assert state["w"].tolist() == [1, 1, 1]
    with pytest.raises(dcp.CheckpointException, match="has no path"):
        dcp.save({"w": 1}, storage_writer=Writer())
    with pytest.raises(dcp.CheckpointException, match="tensor 'w' is int64"):
        dcp.load({"w": torch.zeros(3)}, storage_reader=Reader(tmp_path / "step-1"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_rank_that_wrote_elsewhere_is_refused(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from torchrelay.checkpoint import Writer

    class Elsewhere(Writer):
        def write_data(self, plan: Any, planner: Any) -> Any:
            written = super().write_data(plan, planner)
            (tmp_path / ".x.torchrelay-saving" / "data-00000-00000.safetensors").unlink()
            return written

    with pytest.raises(dcp.CheckpointException, match="on a file system that all ranks share"):
        dcp.save({"w": torch.ones(3)}, storage_writer=Elsewhere(tmp_path / "x"))
    assert not list(tmp_path.iterdir())


def test_a_rank_that_finds_another_save_is_refused(tmp_path: Path) -> None:
    saving = Save(tmp_path / "x", SaveOptions())
    save_id = saving.transaction.begin()
    saving.check_shared(save_id)
    with pytest.raises(StorageError, match="on storage that they share"):
        saving.check_shared("of another save")
    with pytest.raises(StorageError, match="on storage that they share"):
        Save(tmp_path / "y", SaveOptions()).check_shared(save_id)
    saving.transaction.discard()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_of_dcp_are_read_and_their_pickles_not_run(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from torchrelay.checkpoint import Reader

    whole = torch.arange(40.0).reshape(8, 5)
    state: dict[str, Any] = {
        "model": {
            "w": torch.randn(50, 30),
            "half": torch.randn(7).bfloat16(),
            "view": whole[3:6],
            "turned": whole.t(),
        },
        "step": torch.tensor(3),
        "values": [1, "two"],
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    for read in (
        lambda found: load(found, tmp_path / "dcp"),
        lambda found: dcp.load(found, storage_reader=Reader(tmp_path / "dcp")),
    ):
        found: dict[str, Any] = {
            "model": {key: torch.zeros_like(value) for key, value in state["model"].items()},
            "step": torch.tensor(0),
            "values": None,
        }
        read(found)
        assert all(torch.equal(found["model"][key], state["model"][key]) for key in state["model"])
        assert int(found["step"]) == 3 and found["values"] == [1, "two"]

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "harm"),)

    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(
        CorruptionError, match=r"not the metadata of a DCP checkpoint \(it asks for posix.mkdir"
    ):
        load(found, tmp_path / "dcp")
    assert not (tmp_path / "harm").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_may_be_links_as_in_the_cache_of_a_hub(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import load as load_by_dcp

    state: dict[str, Any] = {"w": torch.randn(40, 30), "step": 7}
    save(state, tmp_path / "made" / "step-7", fsync=False)
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "0f3a"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate((tmp_path / "made" / "step-7").iterdir()):
        path.rename(blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    (snapshot / "README.md").write_text("beside it")
    (tmp_path / "link").symlink_to(snapshot)
    for path in (snapshot, snapshot.parent, tmp_path / "link"):
        found: dict[str, Any] = {"w": torch.zeros(40, 30), "step": 0}
        load(found, path)
        assert torch.equal(found["w"], state["w"]) and found["step"] == 7
    assert latest(snapshot.parent) == str(snapshot) and verify(snapshot)
    load_by_dcp({"w": torch.zeros(40, 30)}, storage_reader=Reader(snapshot))
    with pytest.raises(StorageError, match=r"README\.md.* is not part of it"):
        save(state, snapshot)
    (snapshot / "README.md").unlink()
    save({"step": 8}, snapshot, fsync=False)  # replaces the links, not what they point to
    assert len(list(blobs.iterdir())) == 2 and not any(map(Path.is_symlink, snapshot.iterdir()))

"""Checkpoints on an S3-compatible server: what object stores do differently from memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrelay.checkpoint import async_save, latest, load, save, verify
from torchrelay.checkpoint._async import _state
from torchrelay.errors import CorruptionError, StorageError

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("s3fs", reason="needs s3fs")
moto_server = pytest.importorskip("moto.server", reason="needs moto, flask and flask-cors")

_PART_BYTES = 5 << 20  # the smallest part of an upload that S3 accepts


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a bucket on a server of its own, which child processes find by the environment."""
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"default_block_size": _PART_BYTES})
    fs = fsspec.filesystem("s3")
    fs.mkdir("bucket")
    yield "s3://bucket"
    _state.close()
    fs.clear_instance_cache()
    server.stop()


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
    fs.pipe_file("bucket/run/step-4/saving.json", b"0123")
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

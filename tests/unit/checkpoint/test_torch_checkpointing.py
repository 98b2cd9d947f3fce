"""The storage for torch_checkpointing: what is damaged is not loaded."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torch_checkpointing", reason="needs torch_checkpointing")

from torch_checkpointing import CheckpointManager

from torchrelay.checkpoint.torch_checkpointing import VerifiedStorageConfig
from torchrelay.errors import CorruptionError


@pytest.fixture
def manager() -> Any:
    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = VerifiedStorageConfig()
    with_storage = CheckpointManager(config)
    yield with_storage
    with_storage.close()


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".crc32c"]


def test_a_damaged_or_short_file_is_not_loaded(manager: Any, tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.arange(300_000.0), "step": 7}
    for name in ("whole", "damaged", "short"):
        manager.save(str(tmp_path / name), {"app": state})
    found = manager.load(str(tmp_path / "whole"), {"app": None})["app"]
    assert found["step"] == 7 and torch.equal(found["w"], state["w"])
    (largest, *_) = sorted(_files(tmp_path / "damaged"), key=lambda path: -path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    short = tmp_path / "short" / largest.relative_to(tmp_path / "damaged")
    short.write_bytes(short.read_bytes()[:-64])
    for name in ("damaged", "short"):
        with pytest.raises(CorruptionError, match=largest.name):
            manager.load(str(tmp_path / name), {"app": None})


def test_what_has_no_checksums_is_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = VerifiedStorageConfig().create_storage()
    storage.write(tmp_path / "a", b"abc")
    storage.rename(tmp_path / "a", tmp_path / "b")
    assert storage.read(tmp_path / "b") == b"abc" and storage.ls(tmp_path) == ["b"]
    assert not caplog.records
    (tmp_path / "c").write_bytes(b"xyz")
    with caplog.at_level(logging.WARNING):
        assert storage.read(tmp_path / "c") == b"xyz"
    assert "c is not verified" in caplog.text
    storage.delete(tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]

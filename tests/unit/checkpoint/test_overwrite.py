"""Loads with ``overwrite=True`` verify what they read while they read it: every damage is found,
and nothing is read twice.
"""

from __future__ import annotations

import re
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrelay._boxes import Box
from torchrelay.checkpoint import load, save
from torchrelay.checkpoint.engine._read import ChunkReader, ReadOptions, segments_of
from torchrelay.deferred import deferred_init
from torchrelay.errors import CorruptionError

_SIZES = {"large": 5_000_001, "block": 1 << 18, "medium": 300_000, "a": 7, "b": 1000, "c": 33}


def _state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {key: torch.randn(size, generator=generator) for key, size in _SIZES.items()}


def _blank() -> dict[str, Any]:
    return {key: torch.zeros(size) for key, size in _SIZES.items()}


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 16]))


def _place(folder: Path, tensor: torch.Tensor) -> tuple[Path, int]:
    """Return the file that holds the bytes of a tensor, and where they begin."""
    (path,) = folder.glob("*.safetensors")
    return path, path.read_bytes().index(bytes(tensor.view(torch.uint8).numpy()))


def _bytes_read() -> int:
    found = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("key", _SIZES)
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_damage_is_found_while_reading(key: str, place: float, tmp_path: Path) -> None:
    state = _state()
    save(state, tmp_path / "x", fsync=False)
    path, start = _place(tmp_path / "x", state[key])
    load(found := _blank(), tmp_path / "x", overwrite=True)
    assert all(torch.equal(found[name], value) for name, value in state.items())
    _flip(path, start + int(place * (state[key].nbytes - 1)))
    with pytest.raises(CorruptionError, match=f"tensor '{key}' is damaged between bytes"):
        load(_blank(), tmp_path / "x", overwrite=True)
    # What lies between the tensors that are read may be damaged.
    others = {name: value for name, value in _blank().items() if name != key}
    load(others, tmp_path / "x", overwrite=True)
    assert all(torch.equal(value, state[name]) for name, value in others.items())


def test_a_part_is_verified_with_the_whole_blocks_that_it_has_bytes_of(tmp_path: Path) -> None:
    value = torch.arange(10_000_000.0).reshape(10_000, 1000)
    save({"weight": value}, tmp_path / "x", fsync=False)
    path, start = _place(tmp_path / "x", value)
    first, last = 300, 9_500  # rows that begin and end within a block
    target = torch.zeros(last - first, 1000)

    def read() -> None:
        with closing(ChunkReader.open(tmp_path / "x", ReadOptions())) as reader:
            box = Box((first, 0), (last - first, 1000))
            (segment,) = segments_of("weight", reader.manifest.tensors["weight"], box)
            reader.fill([(segment, target)], verify=True)

    before = _bytes_read()
    read()
    assert torch.equal(target, value[first:last])
    assert _bytes_read() - before < target.nbytes + (3 << 20)
    for at, is_read in ((1 << 20, True), (38_500_000, True), (39_000_000, False)):
        _flip(path, start + at)
        with pytest.raises(CorruptionError) if is_read else nullcontext():
            read()
        _flip(path, start + at)


def test_what_is_read_in_parts_is_verified_too(tmp_path: Path) -> None:
    """Tensors that are not contiguous are verified before they are read."""
    value = torch.arange(3_000_000.0).reshape(3000, 1000)
    save({"weight": value}, tmp_path / "x", fsync=False)
    path, start = _place(tmp_path / "x", value)
    target = torch.zeros(1000, 3000).t()
    load({"weight": target}, tmp_path / "x", overwrite=True)
    assert torch.equal(target, value)
    _flip(path, start + 4_000_000)
    module = deferred_init(torch.nn.Linear, 1000, 3000, bias=False)
    for state in ({"weight": target}, module):
        with pytest.raises(CorruptionError, match="tensor 'weight' is damaged"):
            load(state, tmp_path / "x", overwrite=True)


def test_everything_is_read_once(tmp_path: Path) -> None:
    save(_state(), tmp_path / "x", fsync=False)
    size_bytes = 4 * sum(_SIZES.values())
    read = []
    for overwrite in (True, False):
        before = _bytes_read()
        load(_blank(), tmp_path / "x", overwrite=overwrite)
        read.append(_bytes_read() - before)
    assert size_bytes <= read[0] < 1.1 * size_bytes < 2 * size_bytes <= read[1]

"""The versions of modules' classes, by which they convert older states: as with ``torch.save``."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrelay.checkpoint import async_save, load, save
from torchrelay.checkpoint._tools import convert, read_state
from torchrelay.deferred import deferred_init


class _Old(torch.nn.Linear):
    """The class of before."""

    def __init__(self) -> None:
        super().__init__(3, 3)


class _New(torch.nn.Linear):
    """Has a weight ten times as large, another name for the bias, and a buffer more."""

    _version = 2

    def __init__(self) -> None:
        super().__init__(3, 3, bias=False)
        self.shift = torch.nn.Parameter(torch.rand(3))
        self.register_buffer("seen", torch.tensor(5))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 2) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 10
            state[f"{prefix}shift"] = state.pop(f"{prefix}bias")
            state[f"{prefix}seen"] = torch.tensor(1)
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def _model(kind: type[torch.nn.Module]) -> torch.nn.Sequential:
    block = torch.nn.Sequential(kind(), torch.nn.BatchNorm1d(3), torch.nn.ReLU())
    return torch.nn.Sequential(block, kind(), torch.nn.Linear(3, 1))


def _by_torch(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def _bits(module: torch.nn.Module) -> dict[str, list[Any]]:
    return {name: value.tolist() for name, value in module.state_dict().items()}


@pytest.fixture
def saved() -> torch.nn.Sequential:
    return _model(_Old)


@pytest.fixture
def expected(saved: torch.nn.Sequential) -> dict[str, list[Any]]:
    found = _model(_New)
    found.load_state_dict(_by_torch(saved.state_dict()))
    return _bits(found)


@pytest.mark.parametrize("form", ["module", "state dict", "asynchronous"])
def test_a_class_converts_what_an_older_one_saved(
    form: str, saved: Any, expected: Any, tmp_path: Path
) -> None:
    state = {"model": saved.state_dict() if form == "state dict" else saved}
    if form == "asynchronous":
        async_save(state, tmp_path / "c", fsync=False).result(60)
    else:
        save(state, tmp_path / "c", fsync=False)
    for found in (_model(_New), deferred_init(_model, _New)):
        assert load({"model": found}, tmp_path / "c") == ([], [])
        assert _bits(found) == expected
    load({"model": saved}, tmp_path / "c")  # nothing is converted for the class itself
    inner = _model(_New)[0]
    load(inner, tmp_path / "c", prefix="model.0.")  # of a part of what was saved
    assert _bits(inner) == {
        name.removeprefix("0."): value for name, value in expected.items() if name[0] == "0"
    }


def test_a_state_dict_gets_the_versions_of_what_it_is_filled_with(tmp_path: Path) -> None:
    saved: Any = torch.nn.Linear(3, 3)
    save({"nets": [saved.state_dict()]}, tmp_path / "c", fsync=False)
    scaling: Any = type("Scaling", (torch.nn.Linear,), {"_version": 3})
    state = scaling(3, 3).state_dict()
    load({"nets": [state]}, tmp_path / "c")
    assert dict(state._metadata) == dict(saved.state_dict()._metadata)


def test_versions_and_tuples_by_a_file_of_torch(saved: Any, expected: Any, tmp_path: Path) -> None:
    values = [(torch.ones(1), (torch.zeros(1), 3)), OrderedDict(b=torch.ones(1), a=Counter("aab"))]
    torch.save({"model": saved.state_dict(), "values": values}, tmp_path / "file.pt")
    convert(str(tmp_path / "file.pt"), str(tmp_path / "ours"), "torchrelay", 1 << 30)
    convert(str(tmp_path / "ours"), str(tmp_path / "again"), "torchrelay", 1 << 30)
    assert convert(str(tmp_path / "again"), str(tmp_path / "back.pt"), "torch", 1 << 30) == []
    found, back = _model(_New), torch.load(tmp_path / "back.pt")
    load({"model": found}, tmp_path / "again")
    assert _bits(found) == expected
    found = _model(_New)
    found.load_state_dict(back["model"])
    assert _bits(found) == expected
    ours = read_state(str(tmp_path / "ours"))
    assert str(back["values"]) == str(values) == str(ours["values"])
    for to in ("dcp", "safetensors"):
        left_out = convert(str(tmp_path / "ours"), str(tmp_path / to), to, 1 << 30)
        assert not any("metadata" in key for key in left_out)


def test_a_checkpoint_without_versions_is_of_the_present_ones(tmp_path: Path) -> None:
    present = _model(_New)
    save({"model": dict(present.state_dict())}, tmp_path / "c", fsync=False)
    found = _model(_New)
    load({"model": found}, tmp_path / "c")
    assert _bits(found) == _bits(present)


def test_torchs_own_classes_convert(tmp_path: Path) -> None:
    """Batch norms counted no batches before version 2."""
    state: Any = torch.nn.Sequential(torch.nn.BatchNorm1d(3)).state_dict()
    del state["0.num_batches_tracked"]
    state._metadata["0"]["version"] = 1
    save({"model": state}, tmp_path / "c", fsync=False)
    expected = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    expected.load_state_dict(_by_torch(state))
    for make in (lambda make: make(), deferred_init):
        found: Any = make(lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(3)))
        assert load({"model": found}, tmp_path / "c") == ([], [])
        assert _bits(found) == _bits(expected)

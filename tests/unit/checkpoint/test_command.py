"""``torchrelay checkpoint``: every format to every other and back, and what it prints."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.testing._internal.two_tensor import TwoTensor
from typer.testing import CliRunner

from torchrelay.checkpoint import load, save
from torchrelay.checkpoint._tools import FORMATS, read_state
from torchrelay.checkpoint.state._state import flatten
from torchrelay.cli import app
from torchrelay.errors import ArgumentError, CorruptionError, StorageError


def _run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


def _trained() -> dict[str, Any]:
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 2}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_there_and_back_by_every_format(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = _trained()
    save(state, tmp_path / "start")
    chain = [("dcp", "dcp"), ("torchrelay", "ours"), ("torch", "file.pt"), ("torchrelay", "end")]
    source = tmp_path / "start"
    for to, name in chain:
        result = _run("convert", source, tmp_path / name, "--to", to)
        assert result.exit_code == 0, result.output
        source = tmp_path / name
    first, last = (flatten(read_state(str(tmp_path / name))) for name in ("start", "end"))
    assert first.keys() == last.keys()
    for key, (_, value) in first.items():
        is_tensor = isinstance(value, torch.Tensor)
        assert torch.equal(value, last[key].value) if is_tensor else value == last[key].value

    # Others read what we converted.
    again = torch.load(tmp_path / "file.pt", weights_only=True)
    assert torch.equal(again["model"]["weight"], state["model"]["weight"])
    assert again["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    found = {"model": {key: torch.zeros_like(value) for key, value in state["model"].items()}}
    dcp.load(found, checkpoint_id=tmp_path / "dcp")
    assert torch.equal(found["model"]["weight"], state["model"]["weight"])
    assert read_state(str(tmp_path / "start"))["optimizer"]["state"].keys() == {0, 1}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_wrappers_there_and_back_by_every_format(tmp_path: Path) -> None:
    two = TwoTensor(torch.ones(3), torch.full((3,), 2.0))
    save({"model": {"two": two, "list": [two]}}, tmp_path / "start")
    source = tmp_path / "start"
    for number, to in enumerate(("torchrelay", "dcp", "torchrelay", "torch", "torchrelay")):
        result = _run("convert", source, tmp_path / f"{number}", "--to", to)
        assert result.exit_code == 0, result.output
        source = tmp_path / f"{number}"
    result = _run("convert", source, tmp_path / "end", "--prefix", "model.")
    assert result.exit_code == 0, result.output
    found = TwoTensor(torch.zeros(3), torch.zeros(3))
    assert load({"two": found, "list": [two]}, tmp_path / "end") == ([], [])
    assert (found.a.tolist(), found.b.tolist()) == ([1.0] * 3, [2.0] * 3)


# Keys of dictionaries that torch.load does not read by default, as which DCP's strings come back.
KEYS: dict[str, Any] = {
    "a number of NumPy": np.int64(3),
    "a truth value of NumPy": np.bool_(True),
    "a frozen set": frozenset({1}),
    "a path": Path("a"),
    "bytes": b"",
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", KEYS)
def test_keys_that_are_no_strings_in_every_format(kind: str, tmp_path: Path) -> None:
    key = KEYS[kind]
    state = {"inner": {key: torch.ones(2)}, "values": ({key: 3},)}
    save(state, tmp_path / "ours", fsync=False)
    torch.save(state, tmp_path / "of_torch.pt")
    for source in ("ours", "of_torch.pt"):
        for to in FORMATS:
            target = tmp_path / f"{source}-{to}"
            result = _run("convert", tmp_path / source, target, "--to", to)
            if to == "torch":
                assert isinstance(result.exception, ArgumentError)
                assert f"the key {key!r}" in str(result.exception) and not target.exists()
                continue
            assert result.exit_code == 0, result.output
            (found,) = flatten(
                read_state(str(target))["inner"] if to != "safetensors" else read_state(str(target))
            ).values()
            assert torch.equal(found.value, torch.ones(2))
            if to != "safetensors":
                name = key if to == "torchrelay" else str(key)
                assert found.path == (name,) and type(found.path[0]) is type(name)
                assert read_state(str(target))["values"] == state["values"]


def test_safetensors_with_an_index(tmp_path: Path) -> None:
    state = {f"layer.{i}": torch.full((100, 10), float(i)) for i in range(5)}
    save(state, tmp_path / "ours")
    assert (
        _run("convert", tmp_path / "ours", tmp_path / "one", "--to", "safetensors").exit_code == 0
    )
    assert (
        safetensors.torch.load_file(tmp_path / "one" / "model.safetensors").keys() == state.keys()
    )
    result = _run(
        "convert",
        tmp_path / "ours",
        tmp_path / "many",
        "--to",
        "safetensors",
        "--max-file-gb",
        "9e-6",
    )
    assert result.exit_code == 0, result.output
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert (
        index["weight_map"].keys() == state.keys() and len(set(index["weight_map"].values())) == 3
    )
    found = {key: torch.zeros(100, 10) for key in state}
    load(found, tmp_path / "many")
    assert all(torch.equal(found[key], state[key]) for key in state)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex128])
def test_what_safetensors_cannot_hold_is_refused_first(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.save({"a": torch.ones(2), "z": torch.zeros(2, dtype=dtype)}, tmp_path / "x.pt")
    result = _run("convert", tmp_path / "x.pt", tmp_path / "hf", "--to", "safetensors")
    assert isinstance(result.exception, ArgumentError)
    assert f"z: safetensors files hold no tensors of {dtype}" in str(result.exception)
    assert not (tmp_path / "hf").exists()


def test_names_are_printed_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["[red]w", "[/v]", ":fire:"]
    monkeypatch.chdir(tmp_path)
    save(dict.fromkeys(names, 1), "[x]", fsync=False)
    result = _run("inspect", "[x]")
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in (*names, "[x]"))


def test_inspect_and_verify(tmp_path: Path) -> None:
    state = {"w": torch.ones(4, 3), "step": 7}
    save(state, tmp_path / "a")
    save(state, tmp_path / "b")
    found = json.loads(_run("inspect", tmp_path / "a", "--json").output)
    assert found["tensors"] == [
        {"key": "w", "dtype": "float32", "shape": [4, 3], "chunks": 1, "size_bytes": 48}
    ]
    assert found["objects"] == {"step": 7} and found["world_size"] == 1
    shown = _run("inspect", tmp_path / "a").output
    assert "float32" in shown and "saved by 1 rank" in shown
    assert "whole" in _run("verify", tmp_path / "a").output

    path = tmp_path / "a" / "data-00000-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert isinstance(_run("verify", tmp_path / "a").exception, CorruptionError)
    assert isinstance(_run("convert", tmp_path / "a", tmp_path / "x").exception, CorruptionError)
    assert isinstance(_run("inspect", tmp_path / "none").exception, StorageError)
    for arguments in (("--to", "zip"), ("--max-file-gb", "0")):
        assert isinstance(
            _run("convert", tmp_path / "b", tmp_path / "x", *arguments).exception, ArgumentError
        )
    result = _run("convert", tmp_path / "b", tmp_path / "hf", "--to", "safetensors")
    assert result.exit_code == 0 and "left out 1 values that are not tensors: step" in result.output


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_parts_of_a_training_checkpoint(tmp_path: Path) -> None:
    state = _trained()
    save(state, tmp_path / "ours", fsync=False)
    tensors = state["model"]
    target = tmp_path / "model"
    options = ("--to", "safetensors", "--prefix", "model.")
    result = _run("convert", tmp_path / "ours", target, *options)
    assert result.exit_code == 0, result.output
    found = safetensors.torch.load_file(target / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensors[key]) for key in tensors)
    result = _run("convert", tmp_path / "ours", tmp_path / "all", "--to", "safetensors")
    assert "left out 13 values that are not tensors: optimizer.param_groups.0.lr" in result.output
    found = safetensors.torch.load_file(tmp_path / "all" / "model.safetensors")
    assert "optimizer.state.0.exp_avg" in found and "model.weight" in found

    # The whole prefix need not be a level of the state; a file of torch.save has any name.
    torch.save({**tensors, "module.weight": tensors["weight"]}, tmp_path / "weights")
    for to in ("torch", "torchrelay", "dcp"):
        target = tmp_path / to
        result = _run("convert", tmp_path / "weights", target, "--to", to, "--prefix", "mod")
        assert result.exit_code == 0, result.output
        assert torch.equal(read_state(str(target))["ule.weight"], tensors["weight"])
    torch.save(tensors, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert read_state(str(tmp_path / "old.ckpt")).keys() == tensors.keys()
    tied = {"a": tensors["weight"], "b": tensors["weight"]}
    torch.save(tied, tmp_path / "tied.bin")
    result = _run("convert", tmp_path / "tied.bin", tmp_path / "tied", "--to", "safetensors")
    assert result.exit_code == 0, result.output
    result = _run("convert", tmp_path / "ours", tmp_path / "none", "--prefix", "modle.")
    assert isinstance(result.exception, ArgumentError) and "no key begins with 'modle.'" in str(
        result.exception
    )
    (tmp_path / "text.pt").write_text("not a checkpoint of any kind")
    assert isinstance(
        _run("convert", tmp_path / "text.pt", tmp_path / "none").exception, CorruptionError
    )


def test_a_folder_of_checkpoints_and_a_file_of_torch_name_what_to_do(tmp_path: Path) -> None:
    for step in (1, 2):
        save({"weight": torch.ones(2)}, tmp_path / "ckpt" / f"step-{step}")
    for command in ("inspect", "verify"):
        error = _run(command, tmp_path / "ckpt").exception
        assert isinstance(error, StorageError)
        assert str(error).endswith(f"the newest is {tmp_path / 'ckpt' / 'step-2'}")

    model = torch.nn.Linear(2, 2)
    torch.save(model.state_dict(), tmp_path / "m.pt")
    with pytest.raises(CorruptionError, match=r"torch\.save.*checkpoint convert .*m\.pt FOLDER"):
        load(torch.nn.Linear(2, 2), tmp_path / "m.pt")
    assert _run("convert", tmp_path / "m.pt", tmp_path / "m", "--to", "torchrelay").exit_code == 0
    other = torch.nn.Linear(2, 2)
    load(other, tmp_path / "m")
    assert torch.equal(other.weight, model.weight)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
# Of DCP's writer, whose finalizer fails; Python says so from 3.13 on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("to", FORMATS)
def test_what_cannot_be_written_is_one_sentence_and_leaves_nothing(to: str, tmp_path: Path) -> None:
    save({"weight": torch.ones(1 << 15)}, tmp_path / "ours")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, unlimited[1]))
    try:
        error = _run("convert", tmp_path / "ours", tmp_path / "other", "--to", to).exception
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert isinstance(error, StorageError) and "File too large" in str(error)
    assert not (tmp_path / "other").exists()


def test_convert_saves_in_one_process_of_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"weight": torch.ones(2)}, tmp_path / "ours")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = _run("convert", tmp_path / "ours", tmp_path / "again")
    assert result.exit_code == 0, result.output


def test_a_key_without_space_loses_its_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = "model.layers.{}.self_attention.query_key_value.projection.weight"
    save({layer.format(number): torch.ones(2) for number in range(2)}, tmp_path / "one")
    monkeypatch.setenv("COLUMNS", "70")
    lines = _run("inspect", tmp_path / "one").stdout.splitlines()
    shown = [line.split("│")[1].strip() for line in lines if "float32" in line or "F32" in line]
    assert len(shown) == 2
    assert all(re.fullmatch(r"model\..*….*\.weight", one) for one in shown), shown


def test_a_name_without_space_is_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "experiment-with-a-name-that-is-longer-than-its-column-step-100"
    save({"weight": torch.ones(2)}, tmp_path / name)
    monkeypatch.setenv("COLUMNS", "70")
    lines = _run("ls", tmp_path).stdout.splitlines()
    assert "".join(line.split("│")[1].strip() for line in lines if "│" in line) == name

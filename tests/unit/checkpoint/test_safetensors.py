"""Headers of safetensors files: a dtype that is not known does not damage the rest of a file."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from torchrelay import _native
from torchrelay.checkpoint import Reader, load, save, verify
from torchrelay.cli import app
from torchrelay.errors import CorruptionError, TorchRelayError, UnsupportedError

# Of the format, but not of torch; one that no version has; one of half a byte more than torch has.
UNKNOWN = {
    "F6_E2M3": ([4], 3),
    "F6_E3M2": ([2, 4], 6),
    "I4": ([6], 3),
    "F2_NEW": ([8, 2], 4),
    "F4": ([2, 3], 3),
}


def _write(path: Path, code: str) -> None:
    """Write a file of a tensor ``w`` and one of an unknown dtype."""
    shape, size_bytes = UNKNOWN[code]
    header = {
        "w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        "odd": {"dtype": code, "shape": shape, "data_offsets": [16, 16 + size_bytes]},
    }
    text = json.dumps(header).encode()
    data = torch.ones(4).numpy().tobytes() + bytes(size_bytes)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _convert(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["checkpoint", "convert", *map(str, arguments)])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("code", UNKNOWN)
def test_only_a_wanted_tensor_of_an_unknown_dtype_is_refused(code: str, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    file = tmp_path / "model.safetensors"
    _write(file, code)
    named = rf"model\.safetensors|{re.escape(str(tmp_path))}.*'odd' has the dtype {code}, which"
    for path in (tmp_path, file):
        state = {"w": torch.zeros(4)}
        assert load(state, path) == ([], ["odd"])
        assert state["w"].tolist() == [1.0] * 4
        dcp.load({"w": torch.zeros(4)}, storage_reader=Reader(path))
        assert not verify(path)
        wanted: dict[str, Any] = {"odd": torch.zeros(UNKNOWN[code][0], dtype=torch.uint8)}
        with pytest.raises(UnsupportedError, match=named):
            load(wanted, path)
        with pytest.raises(CheckpointException, match="dtype") as caught:
            dcp.load(wanted, storage_reader=Reader(path))
        failures = caught.value.failures.values()
        assert [type(failure[0]) for failure in failures] == [UnsupportedError]

    shown = CliRunner().invoke(app, ["checkpoint", "inspect", "--json", str(file)])
    found = {one["key"]: one for one in json.loads(shown.output)["tensors"]}
    assert (found["odd"]["dtype"], found["odd"]["shape"]) == (code, UNKNOWN[code][0])
    assert isinstance(_convert(file, tmp_path / "all").exception, UnsupportedError)
    assert _convert(file, tmp_path / "part", "--prefix", "w").exit_code == 0


def test_a_dtype_of_a_newer_version_is_refused_only_where_it_is_wanted(tmp_path: Path) -> None:
    state = {"w": torch.ones(4), "odd": torch.ones(3)}
    save(state, tmp_path / "x", fsync=False)
    path = tmp_path / "x" / "manifest.json"
    body, _ = path.read_bytes().rsplit(b",\n", 1)
    text = body.decode().replace('"odd":{"dtype":"float32"', '"odd":{"dtype":"float31"')
    body = text.encode()
    path.write_bytes(body + f',\n"crc32c":"{_native.crc32c(body):08x}"}}\n'.encode())
    load({"w": torch.zeros(4)}, tmp_path / "x")
    assert verify(tmp_path / "x")
    with pytest.raises(UnsupportedError, match="'odd' has the dtype float31, which"):
        load({"odd": torch.zeros(3)}, tmp_path / "x")


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float4_e2m1fn_x2])
def test_small_floats_are_read_as_safetensors_reads_them(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    scale = torch.arange(6, dtype=torch.uint8).reshape(2, 3).view(dtype)
    safetensors.torch.save_file({"scale": scale}, tmp_path / "model.safetensors")
    state = {"scale": torch.empty(2, 3, dtype=dtype)}
    load(state, tmp_path)
    assert torch.equal(state["scale"].view(torch.uint8), scale.view(torch.uint8))
    result = _convert(tmp_path, tmp_path / "again", "--to", "safetensors")
    assert result.exit_code == 0, result.output
    (again,) = safetensors.torch.load_file(tmp_path / "again" / "model.safetensors").values()
    assert again.dtype is dtype and again.shape == scale.shape
    for other in (torch.uint8, torch.float32):
        with pytest.raises(TorchRelayError, match=f"'scale' is {str(dtype).split('.')[1]} of"):
            load({"scale": torch.zeros(2, 3, dtype=other)}, tmp_path)


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(CorruptionError, match=r"model\.safetensors: a pointer.*git lfs pull"):
        load({"a": torch.zeros(2)}, tmp_path)

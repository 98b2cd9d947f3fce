"""Tensors as the Open Inference Protocol writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from torchrelay.errors import ArgumentError, CapacityError
from torchrelay.switching.http._client import _entries
from torchrelay.switching.models import _tensors
from torchrelay.switching.models._tensors import TensorEntry, decode, encode, split_body


def sent(x: torch.Tensor) -> torch.Tensor:
    """Return what a client receives."""
    entries, raw = encode({"x": x}, binary=True)
    return decode(_entries(json.dumps({"outputs": entries}).encode()), memoryview(raw[0]))["x"]


def test_a_view_of_one_element_travels_in_binary() -> None:
    assert torch.equal(sent(torch.full((1, 5), 7.0)[:, 0]), torch.tensor([7.0]))


def test_a_negative_view_travels_in_binary() -> None:
    assert torch.equal(sent(torch.tensor([1 + 2j]).conj().imag), torch.tensor([-2.0]))


@pytest.mark.parametrize("shape", [[0, 1 << 70], [0, 1 << 40, 1 << 40], [1 << 62, 64]])
@pytest.mark.parametrize("content", [{"data": []}, {"binary_data_size": 0}])
def test_sizes_that_torch_cannot_hold_are_refused(shape: list[int], content: Any) -> None:
    entry = TensorEntry("x", "FP32", shape, **content)
    with pytest.raises(ArgumentError, match=r"input 'x' has the shape .*product at most"):
        decode([entry], memoryview(b""))


def test_what_is_too_large_for_json_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_tensors, "_JSON_BYTES", 100)
    monkeypatch.setattr(_tensors, "_JSON_VALUES", 9)
    with pytest.raises(CapacityError, match=r"the JSON takes 101 bytes.* in binary"):
        split_body(b" " * 101, None)
    assert bytes(split_body(b"{}" + b" " * 200, "2")[0]) == b"{}"
    with pytest.raises(CapacityError, match=r"'x' has 10 values.*parameter binary_data"):
        encode({"x": torch.ones(10)}, binary=False)
    assert len(encode({"x": torch.ones(10)}, binary=True)[1][0]) == 40

"""Checkpoints of tensors on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchrelay.checkpoint import async_save, load, save

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_state_on_the_gpu_is_saved_and_loaded(tmp_path: Path) -> None:
    state = {"w": torch.randn(1000, 300, device="cuda"), "t": torch.randn(64, 32, device="cuda").T}
    save(state, tmp_path / "whole")
    found = {key: torch.zeros_like(value) for key, value in state.items()}
    load(found, tmp_path / "whole")
    assert all(torch.equal(found[key], value) for key, value in state.items())


def test_an_asynchronous_save_has_the_values_of_its_call(tmp_path: Path) -> None:
    state = {"w": torch.randn(1 << 20, device="cuda")}
    for step in range(3):  # the second and third reuse page-locked memory
        wanted = state["w"].clone()
        saving = async_save(state, tmp_path / f"step-{step}")
        state["w"].add_(1)  # what was copied does not change
        saving.result()
        found = {"w": torch.zeros_like(wanted)}
        load(found, tmp_path / f"step-{step}")
        assert torch.equal(found["w"], wanted)

"""Checkpoints of tensors on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchrelay.checkpoint import async_save, load, save

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

_BUSY_CYCLES = 10**9  # of the GPU, about half a second


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


def test_a_save_waits_for_the_stream_of_its_caller(tmp_path: Path) -> None:
    """Which the threads that copy are not in by themselves."""
    state = {f"w{i}": torch.zeros(1 << 19, device="cuda") for i in range(4)}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(_BUSY_CYCLES)
        for value in state.values():
            value.fill_(1)
        save(state, tmp_path / "x", fsync=False)
    found = {key: torch.zeros(1 << 19) for key in state}
    load(found, tmp_path / "x")
    assert all(bool(value.all()) for value in found.values())


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_load_is_in_the_stream_of_its_caller(tmp_path: Path, is_transposed: bool) -> None:
    """What is under way there comes before it, and what follows there after it."""
    save({f"w{i}": torch.ones(512, 1024) for i in range(4)}, tmp_path / "x", fsync=False)
    shape = (1024, 512) if is_transposed else (512, 1024)
    state = {f"w{i}": torch.zeros(shape, device="cuda") for i in range(4)}
    if is_transposed:
        state = {key: value.t() for key, value in state.items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(_BUSY_CYCLES)
        for value in state.values():
            value.fill_(-1)
        load(state, tmp_path / "x")
        sums = [float(value.sum()) for value in state.values()]
    assert sums == [512 * 1024.0] * 4

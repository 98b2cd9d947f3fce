"""Staging memory is reused, page-locked once, and unlocked before it is released."""

from __future__ import annotations

import logging

import pytest

from torchrelay.checkpoint.engine._background import Staging


class _Runtime:
    """CUDA's runtime, as far as page-locking goes."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.locked: dict[int, int] = {}
        self.calls = 0

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        assert (address not in self.locked, flags) == (True, 0)
        self.calls += 1
        if not self.code:
            self.locked[address] = size_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_memory_is_locked_once_and_unlocked_when_it_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = _Runtime()
    monkeypatch.setattr("torch.cuda.cudart", lambda: runtime)
    staging = Staging()
    staging.reserve(1 << 20, locked=False)
    assert staging.is_new and not runtime.locked
    fd = staging.fd
    staging.reserve(1000, locked=True)  # the same segment, now page-locked
    staging.reserve(1 << 20, locked=True)
    assert staging.fd == fd
    assert list(runtime.locked.values()) == [1 << 20]
    staging.reserve(1 << 21, locked=True)
    assert list(runtime.locked.values()) == [1 << 21]
    assert runtime.calls == 2
    staging.close()
    assert not runtime.locked


def test_memory_that_cannot_be_locked_is_used_and_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.cudart", lambda: _Runtime(code=2))
    staging = Staging()
    with caplog.at_level(logging.WARNING):
        staging.reserve(4096, locked=True)
    assert "4096 bytes, cannot be page-locked (CUDA error 2)" in caplog.text
    staging.close()


def test_nothing_to_stage_takes_no_memory() -> None:
    staging = Staging()
    staging.reserve(0, locked=False)
    assert not staging.is_new
    staging.close()

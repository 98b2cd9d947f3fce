"""Fake tensors in caches and globals are materialized with the module."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
from torch import nn

from torchrelay.deferred import deferred_init, is_deferred, materialize_module, materialize_tensor

TABLES: dict[str, torch.Tensor] = {}


@functools.lru_cache(maxsize=4)
def angles(count: int) -> torch.Tensor:
    return torch.arange(count).float() * 0.1


@functools.cache
def waves(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return angles(count).sin(), angles(count).cos()


class Rotary(nn.Module):
    shared: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        if "noise" not in TABLES:
            TABLES["noise"] = torch.rand(4)
        if Rotary.shared is None:
            Rotary.shared = torch.ones(2)
        self.register_buffer("sin", waves(6)[0] + 1)
        self.weight = nn.Parameter(torch.rand(6))


def test_what_caches_hold_is_materialized(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(5)
    noise = torch.rand(4)
    torch.manual_seed(5)
    module = deferred_init(Rotary)
    other = deferred_init(nn.Linear, 2, 2)
    assert is_deferred(angles(6)) and is_deferred(TABLES["noise"])
    with caplog.at_level(logging.WARNING, "torchrelay"):
        materialize_module(module)
    assert torch.equal(TABLES["noise"], noise)
    assert Rotary.shared is not None and not is_deferred(Rotary.shared)
    assert torch.equal(angles(6), torch.arange(6).float() * 0.1)
    assert torch.equal(waves(6)[1], angles(6).cos())
    assert "test_escapes.waves" in caplog.text and "TABLES" in caplog.text
    assert not is_deferred(Rotary())
    assert is_deferred(other)


class Keeper:
    """An object that is no module."""


class Hidden(nn.Module):
    """Tensors where materialize_module() does not look, and a layer that only a cycle keeps."""

    def __init__(self) -> None:
        super().__init__()
        scale = torch.rand(3)
        teacher = nn.Linear(2, 5)
        self.scaled = lambda x: teacher(x) * scale
        self.keeper = Keeper()
        self.keeper.noise = torch.rand(7)  # type: ignore[attr-defined]
        self.layer = nn.Linear(11, 11)
        self.layer.me = [self.layer]  # type: ignore[assignment]
        self.layer = nn.Linear(2, 2)


def test_what_others_keep_is_listed(caplog: pytest.LogCaptureFixture) -> None:
    outside: list[torch.Tensor] = []

    def build() -> nn.Module:
        outside.append(torch.rand(13))
        return Hidden()

    module = deferred_init(build)
    with caplog.at_level(logging.WARNING, "torchrelay"):
        materialize_module(module)
    assert not is_deferred(module) and "5 tensors" in caplog.text
    for shape in ("(3,)", "(5, 2)", "(7,)", "(13,)"):
        assert shape in caplog.text, shape
    assert "(11," not in caplog.text
    caplog.clear()
    materialize_module(module)
    assert torch.equal(materialize_tensor(outside[0]), outside[0]) and not caplog.text

"""Fake tensors in caches and globals are materialized with the module."""

from __future__ import annotations

import collections
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchrelay.deferred import (
    deferred_init,
    fake,
    is_deferred,
    materialize_module,
    materialize_tensor,
)
from torchrelay.deferred._materialization import init_without_escapes
from torchrelay.errors import UnsupportedError

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


class _Slots:
    __slots__ = ("table",)

    table: torch.Tensor


_GLOBAL: dict[str, Any] = {}
_LOCAL = threading.local()


@functools.lru_cache
def _cached(size: int) -> torch.Tensor:
    return torch.sin(torch.arange(float(size)))


def _in_slots() -> Any:
    holder = _Slots()
    holder.table = torch.rand(4)
    return holder


def _in_closure() -> Callable[[], torch.Tensor]:
    table = torch.rand(4)
    return lambda: table


def _in_objects() -> Any:
    array = np.empty(1, dtype=object)
    array[0] = torch.rand(4)
    return array


_KEEPERS: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]] = {
    "a global": (
        lambda: _GLOBAL.update(table=torch.rand(4)),
        lambda _: _GLOBAL.pop("table"),
    ),
    "lru_cache": (lambda: len(_cached(4)), lambda _: _cached(4)),
    "an attribute of a thread": (
        lambda: setattr(_LOCAL, "table", torch.rand(4)),
        lambda _: _LOCAL.table,
    ),
    "a deque": (lambda: collections.deque([torch.rand(4)]), lambda kept: kept[0]),
    "slots": (_in_slots, lambda kept: kept.table),
    "a closure": (_in_closure, lambda kept: kept()),
    "an array of objects": (_in_objects, lambda kept: kept[0]),
    "a dictionary of dictionaries": (
        lambda: {"a": {"b": {"c": {"d": {"e": torch.rand(4)}}}}},
        lambda kept: kept["a"]["b"]["c"]["d"]["e"],
    ),
}


class _Keeper(nn.Module):
    def __init__(self, keep: Callable[[], Any], fails: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.kept = keep()
        if fails:
            torch.zeros(3).to_sparse()


@pytest.mark.parametrize("name", _KEEPERS)
@pytest.mark.parametrize("fails", [False, True])
def test_what_is_kept_elsewhere_is_materialized_at_once(name: str, fails: bool) -> None:
    keep, find = _KEEPERS[name]
    torch.manual_seed(2)
    eager = _Keeper(keep)
    expected = find(eager.kept).clone()
    _cached.cache_clear()
    outside: list[Any] = []

    def kept() -> Any:
        outside.append(keep())
        return outside[-1]

    torch.manual_seed(2)
    if fails:
        with pytest.raises(UnsupportedError):
            init_without_escapes(lambda: _Keeper(kept, fails=True))
        found = find(outside[0])
    else:
        module, count = init_without_escapes(lambda: _Keeper(kept))
        assert count == 1
        assert is_deferred(module)
        found = find(module.kept)
    assert not fake.is_fake(found)
    assert torch.equal(found, expected)
    _cached.cache_clear()


def test_what_is_in_the_module_stays_deferred() -> None:
    module, count = init_without_escapes(lambda: nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2)))
    assert count == 0
    assert is_deferred(module)

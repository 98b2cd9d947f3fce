"""Profiles of forward passes: the layers of a model, and when each is used."""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from torchrelay.switching._layout import Layout, named_tensors

__all__ = ["Layer", "Profile", "ProfileCache", "prepare", "profile_module"]

_REPEATS = 3


@dataclass(frozen=True)
class Layer:
    """One layer: the storages first used between two module calls, and the time between them."""

    storages: tuple[int, ...]
    compute_s: float


@dataclass(frozen=True)
class Profile:
    """A model's layers in the order of execution."""

    layers: tuple[Layer, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Profile:
        return cls(
            tuple(
                Layer(tuple(map(int, one["storages"])), float(one["compute_s"]))
                for one in value["layers"]
            )
        )


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records for each storage the module call before its first use.

    In an arena all tensors share one torch storage, so storages are identified by address.
    """

    def __init__(self, spans: Sequence[tuple[int, int, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.call = 0
        self.first: dict[int, int] = {}
        self._spans = spans
        self._starts = [start for start, _, _ in spans]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in tree_iter((args, kwargs or {})):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel():
                place = bisect_right(self._starts, value.data_ptr()) - 1
                if place >= 0 and value.data_ptr() < self._spans[place][1]:
                    self.first.setdefault(self._spans[place][2], self.call)
        return func(*args, **(kwargs or {}))


def prepare() -> None:
    """Import what torch imports when the first dispatch mode is entered; that takes seconds."""
    with _Uses(()):
        torch.zeros(1)


def profile_module(
    module: torch.nn.Module,
    layout: Layout,
    run: Callable[[], object],
    synchronize: Callable[[], None],
) -> Profile:
    """Run the bound `module` by `run` once traced and a few times timed.

    Args:
        synchronize: waits for the device; a no-op on the CPU.
    """
    paths = {id(submodule): path for path, submodule in module.named_modules()}
    calls, first = _trace(module, layout, run, paths)
    times = [_time(module, run, synchronize, len(calls)) for _ in range(_REPEATS)]
    compute = [sorted(one)[len(one) // 2] for one in zip(*times, strict=True)]
    called = {path: index for index, path in reversed(list(enumerate(calls)))}
    for spec in layout.tensors:  # what was not seen in use: with its module's call, or first
        owners = [called.get(path.rpartition(".")[0], 0) for path in spec.paths]
        first.setdefault(spec.storage, min(owners))
    users: dict[int, list[int]] = {}
    for storage, call in sorted(first.items()):
        users.setdefault(call, []).append(storage)
    layers = [Layer(tuple(users.get(i, ())), compute[i]) for i in range(len(calls))]
    return Profile(tuple(_joined(layers)))


def _trace(
    module: torch.nn.Module, layout: Layout, run: Callable[[], object], paths: dict[int, str]
) -> tuple[list[str], dict[int, int]]:
    """Run once and return the modules in the order of their calls, and each storage's first
    call.
    """
    calls: list[str] = []
    spans = _storage_spans(module, layout)
    uses = _Uses(spans)

    def entered(submodule: torch.nn.Module, _: Any) -> None:
        uses.call = len(calls)
        calls.append(paths[id(submodule)])

    handles = [one.register_forward_pre_hook(entered, prepend=True) for one in module.modules()]
    try:
        with uses:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return calls, uses.first


def _storage_spans(module: torch.nn.Module, layout: Layout) -> list[tuple[int, int, int]]:
    """Return (first address, end address, storage) of each storage, sorted."""
    tensors = dict(named_tensors(module))
    spans: dict[int, tuple[int, int, int]] = {}
    for spec in layout.tensors:
        tensor = tensors[spec.paths[0]]
        start = tensor.data_ptr() - spec.offset * tensor.dtype.itemsize
        if layout.storages[spec.storage]:
            spans[spec.storage] = (start, start + layout.storages[spec.storage], spec.storage)
    return sorted(spans.values())


def _time(
    module: torch.nn.Module, run: Callable[[], object], synchronize: Callable[[], None], count: int
) -> list[float]:
    """Return the seconds between one module call and the next; a repeat that calls others is cut to
    `count`.
    """
    starts: list[float] = []

    def entered(_: torch.nn.Module, __: Any) -> None:
        synchronize()
        starts.append(time.perf_counter())

    handles = [one.register_forward_pre_hook(entered, prepend=True) for one in module.modules()]
    try:
        run()
        synchronize()
    finally:
        for handle in handles:
            handle.remove()
    starts.append(time.perf_counter())
    spans = [end - start for start, end in pairwise(starts)]
    return (spans + [0.0] * count)[:count]


def _joined(layers: list[Layer]) -> list[Layer]:
    """Add the time of layers without storages to the one before."""
    joined: list[Layer] = []
    for layer in layers:
        if joined and not layer.storages:
            last = joined[-1]
            joined[-1] = Layer(last.storages, last.compute_s + layer.compute_s)
        else:
            joined.append(layer)
    return joined


class ProfileCache:
    """Profiles in files, by a digest of what was profiled where. A model whose file is damaged is
    profiled again.
    """

    def __init__(self, folder: str) -> None:
        """`folder` may be "": nothing is kept then."""
        self._folder = Path(folder) if folder else None

    def load(self, key: str) -> Profile | None:
        if self._folder is None:
            return None
        try:
            return Profile.from_json(json.loads((self._folder / f"{key}.json").read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, key: str, profile: Profile) -> None:
        """Write the profile; a folder that cannot be written costs a profile at each start, no
        more.
        """
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary = self._folder / f"{key}.{os.getpid()}.tmp"
            temporary.write_text(json.dumps(profile.to_json()))
            temporary.replace(self._folder / f"{key}.json")
        except OSError:
            return

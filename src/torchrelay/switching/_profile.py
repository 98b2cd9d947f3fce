"""Profiles of forward passes: the layers of a model, and when each is used."""

from __future__ import annotations

import contextlib
import json
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from torchrelay.switching._layout import Layout, named_tensors

__all__ = [
    "Layer",
    "Profile",
    "load_profile",
    "prepare",
    "profile_module",
    "save_profile",
]

_REPEATS = 3


class Layer(NamedTuple):
    """One layer: the storages first used between two module calls, and the time between them."""

    storages: tuple[int, ...]
    compute_s: float


Profile = tuple[Layer, ...]  # in the order of execution


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records for each storage the module call before its first use.

    In an arena all tensors share one torch storage, so storages are identified by address.
    """

    def __init__(self, spans: Sequence[tuple[int, int, int]], calls: Sequence[str]) -> None:
        """`calls` grows by a path with each module call."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.first: dict[int, int] = {}
        self._calls = calls
        self._spans = spans
        self._starts = [start for start, _, _ in spans]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in tree_iter((args, kwargs or {})):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel():
                place = bisect_right(self._starts, value.data_ptr()) - 1
                if place >= 0 and value.data_ptr() < self._spans[place][1]:
                    self.first.setdefault(self._spans[place][2], len(self._calls) - 1)
        return func(*args, **(kwargs or {}))


def prepare() -> None:
    """Import what torch imports when the first dispatch mode is entered; that takes seconds."""
    with _Uses((), ()):
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
    paths = {submodule: path for path, submodule in module.named_modules()}
    calls: list[str] = []
    uses = _Uses(_storage_spans(module, layout), calls)
    with _on_calls(module, lambda submodule: calls.append(paths[submodule])), uses:
        run()
    times = [_time(module, run, synchronize, len(calls)) for _ in range(_REPEATS)]
    compute = [sorted(one)[len(one) // 2] for one in zip(*times, strict=True)]
    called = {path: index for index, path in reversed(list(enumerate(calls)))}
    for spec in layout.tensors:  # what was not seen in use: with its module's call, or first
        owners = [called.get(path.rpartition(".")[0], 0) for path in spec.paths]
        uses.first.setdefault(spec.storage, min(owners))
    layers: list[Layer] = []
    for call, seconds in enumerate(compute):
        storages = tuple(sorted(one for one, first in uses.first.items() if first == call))
        if layers and not storages:  # its time counts to the layer before
            layers[-1] = Layer(layers[-1].storages, layers[-1].compute_s + seconds)
        else:
            layers.append(Layer(storages, seconds))
    return tuple(layers)


@contextlib.contextmanager
def _on_calls(
    module: torch.nn.Module, entered: Callable[[torch.nn.Module], object]
) -> Iterator[None]:
    """Call `entered` before each call of a submodule."""
    handles = [
        one.register_forward_pre_hook(lambda called, _: entered(called) and None, prepend=True)
        for one in module.modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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

    def entered(_: torch.nn.Module) -> None:
        synchronize()
        starts.append(time.perf_counter())

    with _on_calls(module, entered):
        run()
        synchronize()
    starts.append(time.perf_counter())
    spans = [end - start for start, end in pairwise(starts)]
    return (spans + [0.0] * count)[:count]


def load_profile(file: Path | None) -> Profile | None:
    """Return the profile in `file`; None without one, or if it is damaged."""
    try:
        layers = json.loads(file.read_text()) if file is not None else None
        if not isinstance(layers, list):
            return None
        return tuple(Layer(tuple(map(int, one)), float(seconds)) for one, seconds in layers)
    except (OSError, ValueError, TypeError):
        return None


def save_profile(file: Path | None, profile: Profile) -> None:
    """Write the profile; a folder that cannot be written costs a profile at each start, no more."""
    if file is None:
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(profile))
        temporary.replace(file)

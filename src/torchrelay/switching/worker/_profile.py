"""Profiles of forward passes: the layers of a model, and when each is used."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from torchrelay.switching.worker._binding import Arrivals, Binding

__all__ = ["Layer", "Output", "Profile", "load_profile", "profile_module", "save_profile"]

_REPEATS = 3
_MAX_FILE_BYTES = 16 << 20
_MAX_S = 1e6  # of a forward pass, in a file
_LONG_S = 1.0  # a forward pass that takes longer is timed once


class Layer(NamedTuple):
    """One layer: the storages first used between two module calls, and the time between them while
    operators may wait.
    """

    storages: tuple[int, ...]
    compute_s: float


class Output(NamedTuple):
    """What a forward pass returned: a tensor's name, dtype and number of dimensions."""

    name: str
    dtype: str
    dimensions: int


class Profile(NamedTuple):
    """The layers of a model in the order of execution, and how long its forward pass takes when no
    operator has to wait, and its outputs; no layers if it runs whole in any case.
    """

    layers: tuple[Layer, ...] = ()
    whole_s: float = 0.0
    outputs: tuple[Output, ...] = ()


def profile_module(
    binding: Binding, run: Callable[[], object], synchronize: Callable[[], None]
) -> Profile:
    """Run the module of `binding`, all of which is bound, by `run` once traced and, with operators
    that may wait and without, a few times timed.

    Args:
        synchronize: waits for the device; a no-op on the CPU.
    """
    module, layout = binding.module, binding.grouped.layout
    paths = {submodule: path for path, submodule in module.named_modules()}
    calls: list[str] = []
    first: dict[int, int] = {}  # the module call before a storage is first used

    def traced() -> None:
        try:
            run()
        finally:
            synchronize()  # before the memory goes

    with _on_calls(module, lambda called: calls.append(paths[called])):
        start = time.perf_counter()
        binding.trace(traced, lambda storage: first.setdefault(storage, len(calls) - 1))
        traced_s = time.perf_counter() - start
    repeats = range(1 if traced_s > _LONG_S else _REPEATS)
    whole_s = statistics.median([_seconds(run, synchronize) for _ in repeats])
    with Arrivals(binding, lambda _: None):
        times = [_time(module, run, synchronize, len(calls)) for _ in repeats]
        waiting_s = statistics.median([_seconds(run, synchronize) for _ in repeats])
    compute = [statistics.median(one) for one in zip(*times, strict=True)]
    # Waiting for the device at each call takes time, too, that a run does not take.
    scale = waiting_s / sum(compute)
    called = {path: index for index, path in reversed(list(enumerate(calls)))}
    for spec in layout.tensors:  # what was not used: with its module's call, or first
        owners = [called.get(path.rpartition(".")[0], 0) for path in spec.paths]
        first.setdefault(spec.storage, min(owners))
    layers: list[Layer] = []
    for call, seconds in enumerate(compute):
        storages = tuple(sorted(one for one, use in first.items() if use == call))
        if layers and not storages:  # its time counts to the layer before
            layers[-1] = Layer(layers[-1].storages, layers[-1].compute_s + scale * seconds)
        else:
            layers.append(Layer(storages, scale * seconds))
    return Profile(tuple(layers), whole_s)


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


def _seconds(run: Callable[[], object], synchronize: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def load_profile(file: Path | None, storages: int) -> Profile | None:
    """Return the profile in `file` of a model of so many `storages`; None without one, or if it is
    damaged in whatever way.
    """
    try:
        return None if file is None else _parsed(file, storages)
    except Exception:  # a cache ends nothing; what is wrong in it costs a profile
        return None


def _parsed(file: Path, storages: int) -> Profile | None:
    # A pipe of that name would block.
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            return None
        kept = json.loads(opened.read(_MAX_FILE_BYTES))
    layers = tuple(Layer(tuple(map(int, one)), float(s)) for one, s in kept["layers"])
    outputs = [Output(str(name), str(dtype), int(n)) for name, dtype, n in kept["outputs"]]
    profile = Profile(layers, float(kept["whole_s"]), tuple(outputs))
    times = [profile.whole_s, *(layer.compute_s for layer in layers)]
    found = sorted(storage for layer in layers for storage in layer.storages)
    is_whole = not layers or found == list(range(storages))
    return profile if is_whole and all(0 <= one <= _MAX_S for one in times) else None


def save_profile(file: Path | None, profile: Profile) -> None:
    """Write the profile; a folder that cannot be written costs a profile at each start, no more."""
    if file is None:
        return
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(profile._asdict()))
        temporary.replace(file)
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            temporary.unlink(missing_ok=True)

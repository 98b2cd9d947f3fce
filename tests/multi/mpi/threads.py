"""Torch for ranks that are threads: forward mode for each of them, and no deadlock of its own; and
what gathers their values.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from torchrelay.mpi import Communicator

__all__ = ["gather", "prepare_threads", "start_rank"]


class _Rank(threading.local):
    transport: Any = None  # beside that of the tests


_rank = _Rank()


def start_rank(comm: Communicator) -> None:
    """Let this thread :func:`gather` with the other ranks of ``comm``."""
    _rank.transport = comm.transport.duplicate()


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks that are threads; of a process that has none, its own."""
    if _rank.transport is None:
        return [value]
    found: list[Any] = []
    (meeting,) = _rank.transport._meet(value, found.extend)
    while not meeting.Test():
        pass  # it sleeps until a rank passes something
    return found


class _Depth(threading.local):
    dual = -1  # torch's level
    jvp = 0


_depth = _Depth()


class _Level(int):
    """Torch's level 0 in threads that have entered it, and else none."""

    def __lt__(self, other: int) -> bool:
        return _depth.dual < other

    def __ge__(self, other: int) -> bool:
        return _depth.dual >= other


class _Nesting:
    """How many ``torch.func.jvp`` a thread is in."""

    def __iadd__(self, other: int) -> _Nesting:
        _depth.jvp += other
        return self

    def __isub__(self, other: int) -> _Nesting:
        _depth.jvp -= other
        return self

    def __eq__(self, other: object) -> bool:
        return _depth.jvp == other

    __hash__ = None  # type: ignore[assignment]


_generator = threading.RLock()


def _one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with _generator:
            return function(*args)

    return call


def prepare_threads() -> None:
    """Let threads differentiate in forward mode, and recompute checkpoints. Idempotent.

    A checkpoint saves the generator's state: torch takes the generator's lock with the GIL held,
    and where garbage is collected meanwhile, releases the GIL with the lock held. The thread that
    takes the GIL then may wait for the lock forever.
    """
    if not hasattr(torch.get_rng_state, "__wrapped__"):
        for name in ("get_rng_state", "set_rng_state"):
            locked = _one_at_a_time(getattr(torch, name))
            setattr(torch, name, locked)
            setattr(torch.random, name, locked)
    _use_forward_mode_per_thread()


def _use_forward_mode_per_thread() -> None:
    """Let threads enter forward mode independently, though torch's is one of the process.

    Its only level is entered once, and never left; tangents belong to tensors, which threads do not
    share.
    """
    modes: Any = forward_ad
    if isinstance(modes._current_level, _Level):
        return
    level = torch._C._enter_dual_level()
    modes._current_level = _Level(level)

    def enter() -> int:
        if _depth.dual >= 0:
            raise RuntimeError("Nested forward mode AD is not supported at the moment")
        _depth.dual = 0
        return 0

    def leave(*, level: int | None = None) -> None:
        _depth.dual = -1

    modes.enter_dual_level, modes.exit_dual_level = enter, leave
    transforms: Any = eager_transforms
    transforms.JVP_NESTING = _Nesting()

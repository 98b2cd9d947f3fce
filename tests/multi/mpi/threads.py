"""Ranks as threads of a test: with torch's forward mode for each of them, and their own errors."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

__all__ = ["use_forward_mode_per_thread"]


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


def use_forward_mode_per_thread() -> None:
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

"""What fake tensors and sessions call in the modules that are built on them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

__all__ = ["Hooks", "hooks"]


class _Thread(threading.local):
    """Attributes:
    lives: those of the fake tensors that are made in this thread are appended to it, unless it is None.
    """

    lives: list[Any] | None = None


class Hooks:
    """Filled in by :mod:`._dispatch` and :mod:`._callers` when they are imported.

    Attributes:
        fake: the class of fake tensors.
        thread: what concerns one thread.
        dispatch: carries out an operation: ``dispatch(func, args, kwargs)``.
        recording: whether this thread is inside deferred_init.
        value: the values of a deferred tensor.
        is_meta: what a fake tensor says to the function in ``frame`` that reads ``is_meta``.
    """

    fake: type[torch.Tensor]
    dispatch: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    recording: Callable[[], bool]
    value: Callable[[Any], torch.Tensor]
    is_meta: Callable[[Any, FrameType], bool]

    def __init__(self) -> None:
        self.thread = _Thread()


hooks = Hooks()

"""The calls that fake tensors and sessions make into modules above them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

__all__ = ["Hooks", "hooks"]


class _Thread(threading.local):
    """State of one thread.

    Attributes:
        lives: collects a weak reference to the life of each fake tensor made; None: not collected.
    """

    lives: list[Any] | None = None


class Hooks:
    """Functions that :func:`Hooks.install` sets once, when ``torchrelay.deferred`` is imported.

    Attributes:
        thread: state of the calling thread.
    """

    fake: type[torch.Tensor]
    dispatch: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    recording: Callable[[], bool]
    value: Callable[[Any], torch.Tensor]
    is_meta: Callable[[Any, FrameType], bool]

    def __init__(self) -> None:
        self.thread = _Thread()

    def install(
        self,
        *,
        fake: type[torch.Tensor],
        dispatch: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
        recording: Callable[[], bool],
        value: Callable[[Any], torch.Tensor],
        is_meta: Callable[[Any, FrameType], bool],
    ) -> None:
        """Connect fake tensors to the modules that implement their operations.

        Args:
            fake: the class of fake tensors.
            dispatch: executes an operation: ``dispatch(func, args, kwargs)``.
            recording: returns whether this thread is inside ``deferred_init``.
            value: returns the values of a deferred tensor.
            is_meta: returns the ``is_meta`` of a fake tensor for the function in ``frame``.
        """
        self.fake, self.dispatch, self.recording = fake, dispatch, recording
        self.value, self.is_meta = value, is_meta


hooks = Hooks()

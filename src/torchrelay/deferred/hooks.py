"""What fake tensors and sessions call in the modules that are built on them."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

__all__ = ["Hooks", "hooks"]


class Hooks:
    """Filled in by :mod:`.dispatch` and :mod:`.callers` when they are imported.

    Attributes:
        dispatch: carries out an operation: ``dispatch(func, args, kwargs)``.
        recording: whether this thread is inside deferred_init.
        value: the values of a deferred tensor.
        is_meta: what a fake tensor says to the function in ``frame`` that reads ``is_meta``.
    """

    dispatch: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    recording: Callable[[], bool]
    value: Callable[[Any], torch.Tensor]
    is_meta: Callable[[Any, FrameType], bool]


hooks = Hooks()

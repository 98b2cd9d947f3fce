"""Modes of this thread: dispatch, autograd, autocast, default dtype, profilers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils import _python_dispatch

__all__ = [
    "disabled_torch_function",
    "dispatches_itself",
    "fake_mode_active",
    "fake_mode_key",
    "is_plain",
    "lowest_mode",
    "plain_torch",
    "profiling",
    "recorded_modes",
    "span",
    "watched",
]


# For a tensor subclass that leaves torch functions alone and only wants dispatch.
disabled_torch_function = torch._C._disabled_torch_function_impl
# The slot of a dispatch mode that may be called for absent devices.
fake_mode_key = torch._C._TorchDispatchModeKey.FAKE


def fake_mode_active() -> bool:
    """Whether some fake tensor mode is on in this thread."""
    return torch._C._get_dispatch_mode(fake_mode_key) is not None


_modes: Any = torch._C._len_torch_dispatch_stack
_pre_dispatch_modes: Any = torch._ops._mode_stack_state_for_pre_dispatch.count
_inference_mode: Any = torch._C._InferenceMode
_below_autograd: Any = torch._C._AutoDispatchBelowAutograd
_autocast_enabled: Any = torch._C._is_any_autocast_enabled
_without_autocast: Any = torch._C._DisableAutocast


def is_plain() -> bool:
    """Whether operations on tensors without gradients do what their name says: no dispatch mode,
    no inference mode, no autocast.
    """
    return not (
        _modes()
        or _pre_dispatch_modes()
        or torch.is_inference_mode_enabled()
        or _autocast_enabled()
    )


class plain_torch:  # noqa: N801
    """No dispatch mode, no autograd, no autocast: operations do what their name says.

    This and the next are classes, because replays enter them for each operation: ``contextmanager``
    and torch's own contexts cost many times as much.
    """

    __slots__ = ("_autocast", "_grad", "_inference", "_modes")

    def __enter__(self) -> None:
        self._modes: Any = None
        self._autocast: Any = None
        if _modes() or _pre_dispatch_modes():
            self._modes = _python_dispatch._disable_current_modes()
            self._modes.__enter__()
        if _autocast_enabled():
            self._autocast = _without_autocast()
            self._autocast.__enter__()
        self._grad = torch.is_grad_enabled()
        self._inference = _inference_mode(False)
        self._inference.__enter__()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        self._inference.__exit__(None, None, None)
        torch._C._set_grad_enabled(self._grad)
        if self._autocast is not None:
            self._autocast.__exit__(None, None, None)
        if self._modes is not None:
            self._modes.__exit__(None, None, None)


class recorded_modes:  # noqa: N801
    """Within :class:`plain_torch`: this default dtype, and kernels that ask whether gradients are
    enabled see ``grad``. There is no autograd.
    """

    __slots__ = ("_before", "_below", "_dtype", "_grad")

    def __init__(self, dtype: torch.dtype, grad: bool) -> None:
        self._dtype = dtype
        self._grad = grad

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        if self._before is not self._dtype:
            torch.set_default_dtype(self._dtype)
        if self._grad:
            self._below = _below_autograd()
            self._below.__enter__()
            torch._C._set_grad_enabled(True)

    def __exit__(self, *error: object) -> None:
        if self._grad:
            torch._C._set_grad_enabled(False)
            self._below.__exit__(None, None, None)
        if self._before is not self._dtype:
            torch.set_default_dtype(self._before)


# Whether a profiler records this thread.
profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
_NO_SPAN = nullcontext()


def span(name: str) -> AbstractContextManager[Any]:
    """Return a context that a running profiler shows under ``name``. It costs almost nothing if
    no profiler runs.
    """
    return torch.profiler.record_function(name) if profiling() else _NO_SPAN


def watched() -> bool:
    """Whether a profiler or a dispatch mode looks at this thread's operators."""
    return profiling() or _modes() > 0


def dispatches_itself(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is of a subclass that handles operators itself, such as DTensor."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


@contextmanager
def lowest_mode(mode: Any) -> Iterator[None]:
    """Activate ``mode`` below every dispatch mode that is active now: it sees operators last."""
    above = [_python_dispatch._pop_mode() for _ in range(_modes())]
    for each in (mode, *reversed(above)):
        _python_dispatch._push_mode(each)
    try:
        yield
    finally:
        for _ in range(len(above) + 1):
            _python_dispatch._pop_mode()
        for each in reversed(above):
            _python_dispatch._push_mode(each)

"""Deferred initialisation: build a module without its memory, and give it its values later."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

import torchrelay.deferred.dispatch  # noqa: F401  (carries out the operations)
from torchrelay.deferred import session as sessions
from torchrelay.deferred.recording import end_states
from torchrelay.deferred.replay import Replay
from torchrelay.deferred.tensor import FakeTensor, become
from torchrelay.errors import ArgumentError, DeferredError

__all__ = ["deferred_init", "is_deferred", "materialize_module", "materialize_tensor"]

P = ParamSpec("P")
R = TypeVar("R")


def deferred_init(fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What ``fn(*args, **kwargs)`` returns, with every tensor made inside deferred.

    Args:
        fn: a module class, or any function that makes tensors or modules.
        args, kwargs: for ``fn``.
    """
    session = sessions.Session(deferred=True)
    try:
        with sessions.enter(session):
            result = fn(*args, **kwargs)
    except BaseException:
        session.close(None)
        raise
    session.close(end_states())
    return result


def is_deferred(value: torch.Tensor | torch.nn.Module) -> bool:
    """Whether ``value``, a tensor or any tensor of a module, waits to be materialized.

    Raises:
        ArgumentError: ``value`` is neither tensor nor module.
    """
    if isinstance(value, torch.Tensor):
        return isinstance(value, FakeTensor) and value._region.storage.deferred
    if isinstance(value, torch.nn.Module):
        return any(
            is_deferred(tensor) for module in value.modules() for tensor in _own_tensors(module).values()
        )
    raise ArgumentError(f"is_deferred() takes a tensor or a module, not {type(value).__name__}.")


def _own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    both = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def materialize_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with its values; the same object, of its class. A real tensor is returned as it is.

    Raises:
        DeferredError: ``tensor`` is fake but was not made by :func:`deferred_init`.
    """
    return _materialize(tensor, Replay())


def _materialize(tensor: torch.Tensor, replay: Replay) -> torch.Tensor:
    if not isinstance(tensor, FakeTensor):
        return tensor
    if not is_deferred(tensor):
        raise DeferredError(
            f"This fake tensor was made by fake_mode(), so nothing is known of its values: {tensor!r}. "
            "Only tensors made inside deferred_init() can be materialized."
        )
    return become(tensor, replay.tensor(tensor._region))


def materialize_module(
    module: torch.nn.Module,
    *,
    buffers_only: bool = False,
    check_fn: Callable[[torch.nn.Module], bool] | None = None,
) -> None:
    """Gives the deferred parameters and buffers of ``module`` their values, children first.

    Args:
        buffers_only: leave parameters deferred.
        check_fn: called with each submodule; if False, that module's own tensors are left as they are.
    """
    replay = Replay()
    for submodule in reversed(list(module.modules())):
        if check_fn is not None and not check_fn(submodule):
            continue
        tensors = submodule._buffers if buffers_only else _own_tensors(submodule)
        for tensor in tensors.values():
            if tensor is not None:
                _materialize(tensor, replay)

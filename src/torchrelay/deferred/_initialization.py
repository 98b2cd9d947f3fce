"""Deferred initialisation: build a module without memory, for later materialisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from torchrelay import _torch
from torchrelay.deferred._dispatch import enter
from torchrelay.deferred._modules import note_escapes, own_tensors
from torchrelay.deferred._recording import FakeSession
from torchrelay.deferred._tensor import FakeTensor, created
from torchrelay.errors import ArgumentError

__all__ = ["deferred_init", "is_deferred"]

P = ParamSpec("P")
R = TypeVar("R")


def deferred_init(fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call ``fn(*args, **kwargs)`` with deferred tensors: recorded, without memory or values.

    Afterwards generators are in the state in which eager execution would have left them.

    Args:
        fn: a module class, or any function that creates tensors or modules.
        *args: passed to ``fn``.
        **kwargs: passed to ``fn``.

    Returns:
        The result of ``fn``.

    Raises:
        ArgumentError: ``fn`` is not callable, or is a module that exists already.
        DeferredError: ``fn`` needs memory of a deferred tensor. Generators are reset.
        UnsupportedError: ``fn`` does something that cannot be recorded. Generators are reset.
    """
    if isinstance(fn, torch.nn.Module) or not callable(fn):
        raise ArgumentError(
            "deferred_init needs a class or a function, e.g. deferred_init(nn.Linear, 10, 20), not "
            f"an object of type {type(fn).__name__}"
        )
    session = FakeSession(deferred=True)
    outer, created.lives = created.lives, []
    try:
        with enter(session):
            result = fn(*args, **kwargs)
        note_escapes(created.lives, result)
    except BaseException:
        session.close(done=False)
        note_escapes(created.lives, None)
        raise
    finally:
        created.lives = outer
    session.close(done=True)
    return result


def is_deferred(value: torch.Tensor | torch.nn.Module) -> bool:
    """Return whether ``value``, or any tensor in it, is not materialised yet.

    Args:
        value: a tensor or a module.

    Raises:
        ArgumentError: it is neither.
    """
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return False  # the rest would take longer than all else of a load
    if isinstance(value, torch.Tensor):
        return any(
            isinstance(one, FakeTensor) and one._region.storage.deferred
            for one in _torch.inner_tensors(value)
        )
    if isinstance(value, torch.nn.Module):
        return any(
            is_deferred(tensor)
            for module in value.modules()
            for tensor in own_tensors(module).values()
        )
    raise ArgumentError(f"is_deferred() takes a tensor or a module, not {type(value).__name__}.")

"""Communications whose result replaces the values of a tensor.

A tensor that autograd allows to change in place becomes the result, including its history. A leaf
that requires grad keeps its history, and the result is a new tensor with its new values. The values
to which the leaf's gradient belongs are lost, so a gradient that reaches it on another path is an
error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from torchrelay import _torch
from torchrelay.errors import GraphError
from torchrelay.mpi._dtypes import check_tensor
from torchrelay.mpi._record import Call, record

__all__ = ["can_overwrite", "overwrite"]


def overwrite(
    in_place: Call | None, copying: Call | Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """Run ``in_place`` on ``x`` if its memory and history allow it, else ``copying``."""
    check_tensor(x)
    run: Callable[[Tensor], Tensor] = copying if callable(copying) else lambda t: record(copying, t)
    if is_compiling():
        return x.copy_(run(x))
    if in_place is None or not can_overwrite(x):
        if _is_used_leaf(x):
            return _overwrite_leaf(run, x)
        return x.copy_(run(x))
    y = record(in_place, x)
    if y is x and not torch.is_grad_enabled():
        torch.autograd.graph.increment_version(x)
    return y


def _is_used_leaf(x: Tensor) -> bool:
    return (
        x.requires_grad and x.is_leaf and torch.is_grad_enabled() and not _torch.transforms_active()
    )


def can_overwrite(x: Tensor) -> bool:
    """Return whether MPI can write into the memory, and autograd can replace the history."""
    return (
        not (_torch.transforms_active() or _torch.forward_mode_active() or _is_used_leaf(x))
        and x.device.type == "cpu"
        and x.is_contiguous()
        and not (x.is_conj() or x.is_neg())
        and not (x._is_view() and torch.is_grad_enabled())
    )


def _overwrite_leaf(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    source = _mark(x)
    node: Any = source.grad_fn
    guard = weakref.ref(node.guard)
    y = run(source)
    with torch.no_grad():
        x.copy_(y)
    register: Any = x.register_hook
    handle = register(lambda grad: _check(guard(), grad))
    weakref.finalize(node.guard, handle.remove)
    return y


class _Guard:
    """Knows the one cotangent that may reach an overwritten leaf."""

    def __init__(self) -> None:
        self.expected: Tensor | None = None
        self.task = -1
        self.is_over = False


def _check(guard: _Guard | None, grad: Tensor) -> None:
    if guard is None or guard.is_over:
        return
    expected, guard.expected = guard.expected, None
    if expected is not None:
        guard.is_over = not _torch.backward_keeps_graph()
    if (
        expected is None
        or guard.task != _torch.backward_id()
        or grad.data_ptr() != expected.data_ptr()
    ):
        raise GraphError(
            f"a tensor of shape {tuple(grad.shape)} was overwritten by an MPI function and also "
            "used otherwise, so its gradient has no meaning: use the function's result instead, or "
            "give it a clone of the tensor"
        )


class _Mark(torch.autograd.Function):
    """The identity; marks the leaf's cotangent that comes from the result."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.guard = _Guard()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        guard: _Guard = ctx.guard
        guard.expected, guard.task = grad, _torch.backward_id()
        return grad


_mark: Any = _Mark.apply

"""Communications whose result replaces the values of a tensor.

A tensor that autograd allows to change in place becomes the result, including its history. A leaf
that requires grad keeps its history, and the result is a new tensor with its new values. The values
to which the leaf's gradient belongs are lost, so a gradient that reaches it on another path is an
error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.compiler import is_compiling

from torchrelay import _torch
from torchrelay.errors import GraphError
from torchrelay.mpi._dtypes import check_tensor
from torchrelay.mpi._memory import check_memory
from torchrelay.mpi._record import Call, record

__all__ = ["can_overwrite", "overwrite"]


def overwrite(call: Call, x: Tensor, copying: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Run ``call`` in the memory of ``x`` if it and its history allow that, else copy the result.

    If ``copying`` is given, its result is copied.
    """
    check_tensor(x)
    run = copying or partial(record, call)
    if is_compiling():
        return x.copy_(run(x))
    check_memory(x)
    if copying is not None or not can_overwrite(x):
        if _is_used_leaf(x):
            return _overwrite_leaf(run, x)
        return x.copy_(run(x))
    call.overwrites = True
    y = record(call, x)
    if y is x and not (torch.is_grad_enabled() and call.differentiable(x)):
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
    guard, source = _Guard(), x.view_as(x)
    source.register_hook(guard.expect)  # type: ignore[no-untyped-call]
    y = run(source)
    with torch.no_grad():
        x.copy_(y)
    found = weakref.ref(guard)
    # before hooks of the leaf's owner, which may replace the cotangent
    handle = _torch.first_hook(x, lambda grad: _check(found(), grad))
    weakref.finalize(guard, handle.remove)
    return y


class _Guard:
    """Knows the one cotangent that may reach an overwritten leaf. Lives as long as the graph."""

    is_over = False
    expected: tuple[int, Tensor] | None = None  # the backward pass, and the cotangent

    def expect(self, grad: Tensor) -> None:
        self.expected = (_torch.backward_id(), grad)


def _check(guard: _Guard | None, grad: Tensor) -> None:
    if guard is None or guard.is_over:
        return
    expected, guard.expected = guard.expected, None
    guard.is_over = expected is not None and not _torch.backward_keeps_graph()
    if (
        expected is None
        or expected[0] != _torch.backward_id()
        or expected[1].data_ptr() != grad.data_ptr()
    ):
        raise GraphError(
            f"a tensor of shape {tuple(grad.shape)} was overwritten by an MPI function and also "
            "used otherwise, so its gradient has no meaning: use the function's result instead, or "
            "give it a clone of the tensor"
        )

"""Gradients as tests read them."""

from __future__ import annotations

from torch import Tensor


def grad_of(x: Tensor) -> Tensor:
    """Return ``x.grad``, which must be there."""
    assert x.grad is not None
    return x.grad

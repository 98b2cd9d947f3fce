"""Initialisers recorded as one operation, because their control flow depends on values."""

from __future__ import annotations

from typing import Any

import torch

from torchrelay import _torch
from torchrelay.deferred._operators import Operator, define

__all__ = ["constant", "is_plain_normal", "trunc_normal"]

# No normal number that the CPU generator makes is further from the mean than this many standard
# deviations:
# it takes the logarithm of a number of 24 bits (53 for float64), the smallest of which gives 5.8
# (8.6).
_FARTHEST = {torch.float64: 9.0}
_FARTHEST_ELSE = 6.0


def trunc_normal(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, *, generator: Any = None
) -> torch.Tensor:
    """Call ``nn.init.trunc_normal_``, which redraws until no number is outside ``[a, b]``."""
    return _torch.trunc_normal(tensor, mean, std, a, b, generator)


def is_plain_normal(dtype: torch.dtype, mean: float, std: float, a: float, b: float) -> bool:
    """Return whether no number can fall outside ``[a, b]``, so that nothing is redrawn."""
    reach = _FARTHEST.get(dtype, _FARTHEST_ELSE) * std
    return a < mean - reach and mean + reach < b


def constant(value: torch.Tensor) -> torch.Tensor:
    """Return values that were known when recorded: ``torch.tensor([1, 2])``."""
    return value


define(constant, Operator(name="torchrelay::constant", creates=True))
define(
    trunc_normal,
    Operator(
        name="torchrelay::trunc_normal",
        fills=True,
        draws=True,
        with_generator=trunc_normal,
        written=(0,),
    ),
)

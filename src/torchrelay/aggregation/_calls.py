"""c10d's two ways to call a group: with an options object, as its functions do, or with plain arguments."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

__all__ = ["one_or_more", "reduction", "rooted", "timed"]


def one_or_more(tensors: Any) -> Any:
    """A list of tensors, whether one or several were given."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def is_options(given: Any) -> bool:
    """Whether ``given`` is one of c10d's options objects, which have nothing else in common."""
    return hasattr(given, "timeout")


def timed(fresh: Any, given: Any, timeout: timedelta | None) -> Any:
    """``given`` if it is an options object, else ``fresh`` with the timeout: either of the last two arguments."""
    if is_options(given):
        return given
    limit = given if isinstance(given, timedelta) else timeout
    if limit is not None:
        fresh.timeout = limit
    return fresh


def reduction(fresh: Any, given: Any, op: Any, timeout: timedelta | None) -> Any:
    """The same, where ``given`` may be a reduction."""
    if is_options(given):
        return given
    chosen = given if op is None and not isinstance(given, timedelta) else op
    if chosen is not None:
        fresh.reduceOp = chosen
    return timed(fresh, given, timeout)


def rooted(fresh: Any, given: Any, op: Any, timeout: timedelta | None) -> Any:
    """The same, where ``given`` may be the root."""
    if is_options(given):
        return given
    fresh.rootRank = 0 if given is None else given
    if op is not None:
        fresh.reduceOp = op
    return timed(fresh, None, timeout)

"""Counts of the collectives that a rank has begun, to diagnose one that does not end.

Collectives match by the order in which they begin. A rank that waits long in one reports its number
and terms; a rank that has begun a different one under that number knows that they never match.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["History", "Place"]

REMEMBERED = 64  # collectives back from the last one


class Place(NamedTuple):
    """A collective in progress.

    Attributes:
        number: its count on its communicator.
        has_met: whether the ranks exchange its terms before data moves.
        terms: what must be equal on all ranks.
        communicator: its name.
    """

    history: History
    number: int
    has_met: bool
    terms: str
    communicator: str


class History:
    """The collectives of one MPI communicator."""

    __slots__ = ("_met", "count", "dtype", "shape")

    def __init__(self) -> None:
        self.count = 0
        self.dtype = torch.uint8  # of what the last one was given
        self.shape: tuple[int, ...] = ()
        self._met: deque[int] = deque(maxlen=REMEMBERED)

    def begin(self, x: Tensor) -> None:
        """Count a new collective on ``x``."""
        self.count += 1
        self.dtype, self.shape = x.dtype, x.shape

    def meet(self) -> None:
        """Note that the ranks exchange their terms before data moves in the last collective."""
        self._met.append(self.count)

    def example(self) -> Tensor:
        """Return a tensor without memory like the argument of the last collective."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def place(self, number: int, terms: str, communicator: str) -> Place:
        return Place(self, number, number in self._met, terms, communicator)

    def differs(self, number: int, has_met: bool, terms: str, mine: Place | None) -> str | None:
        """Return this rank's collective ``number``, if it cannot match one of these ``terms``.

        ``mine`` is the collective in which this rank waits. None: they match, or it is unknown.
        """
        if mine is not None and mine.history is self and mine.number == number:
            return None if mine.terms == terms else mine.terms
        is_over = self.count - REMEMBERED < number <= self.count
        if is_over and has_met and number not in self._met:
            return "another one, on less than 64 KiB, which has completed"
        return None

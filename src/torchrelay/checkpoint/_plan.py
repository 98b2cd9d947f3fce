"""Who writes what: pure functions over what each rank knows. Imports no torch.

A chunk that several ranks hold (its *holders*) is written by one of them. Every holder has the same list of
chunks that the same holders share, so each deals the list out for itself and all come to the same result:
nothing is gathered, and the work is linear in the rank's own chunks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Held", "deal"]

T = TypeVar("T")


@dataclass(frozen=True)
class Held(Generic[T]):
    """A chunk that ``holders`` (ranks, ascending) have, with a ``name`` that is the same on each of them."""

    name: tuple[Hashable, ...]
    size_bytes: int
    holders: tuple[int, ...]
    item: T


def deal(chunks: Sequence[Held[T]], rank: int) -> list[T]:
    """The items that ``rank`` writes: of each set of holders' chunks, the largest first, to whoever has least."""
    by_holders: dict[tuple[int, ...], list[Held[T]]] = defaultdict(list)
    for chunk in chunks:
        by_holders[chunk.holders].append(chunk)
    mine: list[T] = []
    for holders, shared in by_holders.items():
        if len(holders) == 1:
            mine += [chunk.item for chunk in shared]
            continue
        loads = dict.fromkeys(holders, 0)
        for chunk in sorted(shared, key=lambda chunk: (-chunk.size_bytes, repr(chunk.name))):
            writer = min(holders, key=lambda holder: (loads[holder], holder))
            loads[writer] += chunk.size_bytes
            if writer == rank:
                mine.append(chunk.item)
    return mine

"""Distribution of writing and verification over ranks, and what planning has in common: pure
functions. Imports no torch.

A chunk that several ranks hold (its *holders*) is written by one of them. Every holder has the same
list of chunks that the same holders share, so each deals the list out for itself and all come to
the same result: nothing is gathered, and the work is linear in the rank's own chunks.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Held", "deal", "deal_blocks", "no_collection"]

_RUN_BLOCKS = 16  # successive blocks that one rank verifies


class Held(NamedTuple):
    """A chunk that ``holders`` (ranks, ascending) have, with a ``name`` that is the same on each of
    them.
    """

    name: tuple[Hashable, ...]
    size_bytes: int
    holders: tuple[int, ...]
    item: Any


def deal(chunks: Sequence[Held], rank: int) -> list[Any]:
    """Return the items that ``rank`` writes.

    The chunks of each set of holders are dealt largest first, to the rank that has least.
    """
    by_holders: dict[tuple[int, ...], list[Held]] = defaultdict(list)
    for chunk in chunks:
        by_holders[chunk.holders].append(chunk)
    mine: list[Any] = []
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


def deal_blocks(touched: NDArray[np.bool_], rank: int) -> NDArray[np.bool_]:
    """Return the blocks that ``rank`` verifies: each block that ranks read is verified by one of
    them, in runs.

    Args:
        touched: ``(ranks, blocks)``, whether a rank reads a block.
        rank: a row of ``touched``.
    """
    ranks, blocks = touched.shape
    columns = np.arange(blocks)
    # Row i: the rank that is asked as the i-th whether it reads the block.
    asked = (columns // _RUN_BLOCKS + np.arange(ranks)[:, None]) % ranks
    first = touched[asked, columns].argmax(axis=0)
    mine: NDArray[np.bool_] = touched[rank] & (asked[first, columns] == rank)
    return mine


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the garbage collector, which would visit every object of the process again and again.

    Planning makes many objects, and none with cycles. Also a decorator.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

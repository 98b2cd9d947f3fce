"""The CPU generator's state blob, and moving it forward without drawing.

The blob of ``torch.Generator.get_state()`` is, in 64-bit words: the seed; ``left`` and ``seeded``
in one; the index of the next word; the 624 words of the twister's state; and what normal draws keep
for the next call.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from torchrelay import _native

__all__ = ["BLOCK_WORDS", "jump"]

BLOCK_WORDS = 624
_LEFT, _NEXT, _STATE, _NORMAL = 1, 2, slice(3, 627), 630
_LOW = np.int64(0xFFFFFFFF)


def jump(state: torch.Tensor, words: int) -> torch.Tensor:
    """The blob of a CPU generator that has drawn ``words`` more 32-bit words than ``state``. About
    1 ms.
    """
    moved = state.clone()
    blob = moved.numpy().view(np.int64)
    # A generator that was just seeded has used up a block that it never gave out.
    fresh = int(blob[_LEFT] & _LOW) == 1 and int(blob[_NEXT]) == 0
    used = (BLOCK_WORDS if fresh else int(blob[_NEXT])) + words
    if words == 0:
        return moved
    blocks = (used - 1) // BLOCK_WORDS
    used -= blocks * BLOCK_WORDS
    if blocks:
        block = blob[_STATE].astype(np.uint32)
        _native.twister_jump(block, _polynomial(blocks * BLOCK_WORDS - 1))
        blob[_STATE] = block
    blob[_NEXT] = used
    blob[_LEFT] = (blob[_LEFT] & ~_LOW) | (BLOCK_WORDS - used + 1)
    return moved


@lru_cache(maxsize=256)
def _polynomial(distance: int) -> bytes:
    return _native.twister_polynomial(distance)

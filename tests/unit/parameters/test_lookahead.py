"""How far ahead a loader announces when it finds out itself."""

from __future__ import annotations

import torch

from torchrelay.parameters import IntentLoader, Table
from torchrelay.parameters._intents import CALM_STEPS, LARGEST_LOOKAHEAD, REMEMBERED_STEPS


def test_it_shrinks_while_every_key_is_here() -> None:
    with Table.create(10, 2) as table:
        loader = IntentLoader([torch.arange(10)] * 4 * CALM_STEPS, lambda batch: batch, table=table)
        seen = [loader.lookahead for _ in loader]
    assert seen[0] == 4
    assert seen[-1] == 2
    assert sorted(seen, reverse=True) == seen


def test_it_grows_when_keys_come_late_and_remembers_what_was_too_short() -> None:
    loader: IntentLoader[torch.Tensor] = IntentLoader([], lambda batch: batch)

    def steps(count: int, too_late: bool) -> int:
        for _ in range(count):
            loader._adapt(too_late)
        return loader.lookahead

    assert steps(2, True) == 16
    assert steps(CALM_STEPS, False) == 12
    assert steps(CALM_STEPS, False) == 9
    assert steps(REMEMBERED_STEPS // 2, False) == 9, "8 was too short"
    assert steps(REMEMBERED_STEPS, False) < 8
    assert steps(20, True) == LARGEST_LOOKAHEAD
    assert steps(CALM_STEPS, False) == LARGEST_LOOKAHEAD, "which was too short"

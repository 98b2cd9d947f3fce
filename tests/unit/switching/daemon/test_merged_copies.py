"""Copies of a group: every byte to its place, in as few copies as the order of the store allows."""

from __future__ import annotations

import random

import torch

import switching_models as models
from torchrelay.switching import ModelStore
from torchrelay.switching.daemon._served import merged_copies
from torchrelay.switching.models._layout import Grouped

TOKENS = torch.arange(24).reshape(2, 12)


def test_every_storage_arrives_whatever_the_planner() -> None:
    draws = random.Random(5)
    with ModelStore() as store:
        model = store.add("mixed", models.mixed, inputs={"tokens": TOKENS})
        for shuffled in (False, True) * 10:
            order = list(range(len(model.layout.storages)))
            if shuffled:
                draws.shuffle(order)
            cuts = sorted(draws.sample(range(1, len(order)), draws.randint(0, 4)))
            bounds = list(zip((0, *cuts), (*cuts, len(order)), strict=True))
            grouped = Grouped(model.layout, tuple(tuple(order[a:b]) for a, b in bounds))
            for group, size_bytes in enumerate(grouped.sizes):
                arena = torch.full((size_bytes,), 0xAA, dtype=torch.uint8)
                copies = merged_copies(model, grouped, group)
                for copy in copies:
                    arena.narrow(0, copy.offset_bytes, copy.source.numel()).copy_(copy.source)
                for storage, offset in grouped.places(group):
                    found = arena[offset : offset + model.layout.storages[storage]]
                    assert torch.equal(found, model.storage(storage))
                assert shuffled or len(copies) == 1

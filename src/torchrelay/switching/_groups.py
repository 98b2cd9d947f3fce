"""A model's storages in groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torchrelay.switching._contract import align
from torchrelay.switching._layout import Layout
from torchrelay.switching._planner import Costs, best_grouping
from torchrelay.switching._profile import Profile

__all__ = ["Grouped"]


@dataclass(frozen=True)
class Grouped:
    """The groups of a model, in the order in which they are copied."""

    layout: Layout
    groups: tuple[tuple[int, ...], ...]  # storages
    predicted_s: float = 0.0

    @classmethod
    def one_group(cls, layout: Layout) -> Grouped:
        """Return one group for the whole model."""
        return cls(layout, (tuple(range(len(layout.storages))),))

    @classmethod
    def of_profile(
        cls, layout: Layout, profile: Profile, costs: Costs, policy: str = "best"
    ) -> Grouped:
        """Group the profiled layers: as the planner decides ("best"), into "one" group, or each on
        its own ("layer").
        """
        layers = [layer for layer in profile.layers if layer.storages]
        if not layers or policy == "one":
            return cls.one_group(layout)
        sizes = [sum(align(layout.storages[one]) for one in layer.storages) for layer in layers]
        times = [layer.compute_s for layer in layers]
        best = best_grouping(sizes, times, costs)
        ranges = (
            [range(i, i + 1) for i in range(len(layers))] if policy == "layer" else best.groups()
        )
        groups = tuple(
            tuple(storage for layer in one for storage in layers[layer].storages) for one in ranges
        )
        return cls(layout, groups, best.time_s)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The bytes that each group takes in an arena."""
        storages = self.layout.storages
        return tuple(sum(align(storages[one]) for one in group) for group in self.groups)

    @cached_property
    def group_of(self) -> dict[int, int]:
        """The group of each storage."""
        return {storage: index for index, group in enumerate(self.groups) for storage in group}

    def places(self, group: int) -> list[tuple[int, int]]:
        """Return (storage, offset in bytes from the start of the group) for the storages of
        `group`.
        """
        places, offset = [], 0
        for storage in self.groups[group]:
            places.append((storage, offset))
            offset += align(self.layout.storages[storage])
        return places

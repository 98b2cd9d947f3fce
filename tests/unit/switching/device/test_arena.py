"""Placement and eviction keep the arena's promises whatever is asked of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torchrelay.errors import CapacityError
from torchrelay.switching.device._arena import Arena

UNIT = 512


def fill(arena: Arena, model: str, sizes: list[int], *, priority: int = 0) -> None:
    placement = arena.reserve(model, sizes, priority=priority)
    assert placement is not None
    for group in placement.missing:
        arena.mark_ready(model, group)
    arena.release(model)


def test_the_least_recently_used_model_goes_first() -> None:
    arena = Arena(4 * UNIT)
    fill(arena, "a", [UNIT] * 2)
    fill(arena, "b", [UNIT] * 2)
    fill(arena, "a", [UNIT] * 2)
    placement = arena.reserve("c", [UNIT])
    assert placement is not None and placement.evicted[0][0] == "b" and len(placement.evicted) == 1
    assert arena.is_resident("a", 2) and not arena.is_resident("b", 2)


def test_a_model_that_lost_a_group_misses_only_that_one() -> None:
    arena = Arena(4 * UNIT)
    fill(arena, "a", [UNIT] * 3)
    fill(arena, "b", [UNIT] * 2)
    placement = arena.reserve("a", [UNIT] * 3)
    assert placement is not None and len(placement.missing) == 1


def test_priority_outweighs_recency() -> None:
    arena = Arena(2 * UNIT)
    fill(arena, "important", [UNIT], priority=1)
    fill(arena, "other", [UNIT])
    placement = arena.reserve("new", [UNIT])
    assert placement is not None and placement.evicted == (("other", 0),)


def test_pinned_models_stay_and_the_caller_can_try_again() -> None:
    arena = Arena(2 * UNIT)
    assert arena.reserve("a", [2 * UNIT]) is not None
    before = arena.blocks()
    assert arena.reserve("b", [UNIT]) is None and arena.blocks() == before
    arena.release("a")
    assert arena.reserve("b", [UNIT]) is not None


def test_own_groups_in_the_way_are_placed_anew() -> None:
    arena = Arena(4 * UNIT)
    fill(arena, "x", [UNIT])
    fill(arena, "a", [UNIT, 2 * UNIT])
    arena.evict("x")
    fill(arena, "y", [2 * UNIT, UNIT])  # takes two of a's three units
    placement = arena.reserve("a", [UNIT, 3 * UNIT])
    assert (
        placement is not None
        and sum(b.size_bytes for b in arena.blocks() if b.model == "a") == 4 * UNIT
    )


def test_what_is_left_of_others_never_keeps_a_fitting_model_out() -> None:
    arena = Arena(10 * UNIT)
    fill(arena, "a", [2 * UNIT])
    fill(arena, "b", [3 * UNIT])
    # The cheapest run for the large group leaves a's two units in front, too few for the small one.
    placement = arena.reserve("c", [7 * UNIT, 3 * UNIT])
    assert placement is not None and sorted(placement.evicted) == [("a", 0), ("b", 0)]


def test_groups_never_filled_are_given_back() -> None:
    arena = Arena(4 * UNIT)
    placement = arena.reserve("a", [UNIT, UNIT])
    assert placement is not None
    arena.mark_ready("a", 0)
    arena.release("a")
    again = arena.reserve("a", [UNIT, UNIT])
    assert again is not None and again.missing == (1,)


def test_a_model_larger_than_the_arena_is_refused() -> None:
    with pytest.raises(CapacityError, match="larger arena"):
        Arena(UNIT).reserve("a", [UNIT, 1])


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5 * UNIT), min_size=1, max_size=5), min_size=1, max_size=12)
)
def test_what_fits_is_placed_when_nothing_is_pinned(models: list[list[int]]) -> None:
    arena = Arena(10 * UNIT)
    for index, sizes in enumerate(models):
        if sum(-(-size // UNIT) for size in sizes) <= 10:
            fill(arena, f"model{index % 4}.{len(sizes)}", sizes)
            assert arena.is_resident(f"model{index % 4}.{len(sizes)}", len(sizes))
            arena.evict(f"model{index % 4}.{len(sizes)}")


class ArenaMachine(RuleBasedStateMachine):
    """Random reserves and releases of models with fixed sizes."""

    @initialize(
        sizes=st.lists(
            st.lists(st.integers(1, 9 * UNIT), min_size=1, max_size=4), min_size=2, max_size=6
        )
    )
    def start(self, sizes: list[list[int]]) -> None:
        self.arena = Arena(12 * UNIT)
        self.sizes = {f"m{i}": one for i, one in enumerate(sizes)}
        self.pinned: dict[str, list[tuple[int, ...]]] = {name: [] for name in self.sizes}

    @rule(data=st.data(), fills=st.booleans())
    def reserve(self, data: st.DataObject, fills: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.sizes)))
        needed = sum(-(-size // UNIT) * UNIT for size in self.sizes[name])
        if needed > self.arena.size_bytes:
            with pytest.raises(CapacityError):
                self.arena.reserve(name, self.sizes[name])
            return
        placement = self.arena.reserve(name, self.sizes[name])
        if placement is None:
            assert any(self.pinned.values()), "only pins may keep a fitting model out"
            return
        self.pinned[name].append(placement.offsets)
        if fills:
            for group in placement.missing:
                self.arena.mark_ready(name, group)

    @precondition(lambda self: any(self.pinned.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, pins in self.pinned.items() if pins)))
        self.pinned[name].pop()
        self.arena.release(name)

    @invariant()
    def blocks_tile_the_arena(self) -> None:
        if not hasattr(self, "arena"):
            return
        blocks = self.arena.blocks()
        assert blocks[0].offset_bytes == 0 and blocks[-1].end_bytes == self.arena.size_bytes
        for one, other in pairwise(blocks):
            assert one.end_bytes == other.offset_bytes and one.size_bytes > 0
            assert one.model or other.model, "free neighbours are joined"
        for name, pins in self.pinned.items():
            for offsets in pins:  # what is pinned has not moved
                found = {b.group: b.offset_bytes for b in blocks if b.model == name}
                assert [found[group] for group in range(len(offsets))] == list(offsets)


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(
    max_examples=40, stateful_step_count=30, derandomize=True, deadline=None
)


def test_models_that_are_kept_lie_side_by_side_and_leave_one_run() -> None:
    arena = Arena(6 * UNIT)
    assert arena.reserve("busy", [UNIT]) is not None
    fill(arena, "other", [UNIT])
    assert not arena.keep("a", 2 * UNIT)  # the busy one is in the way
    arena.release("busy")
    assert arena.keep("a", 2 * UNIT) and arena.keep("b", UNIT)
    assert {one for one, _ in arena.dropped} == {"busy", "other"}
    assert arena.reserve("c", [4 * UNIT]) is None
    placement = arena.reserve("c", [3 * UNIT])  # all that is left
    assert placement is not None and placement.offsets == (3 * UNIT,)
    arena.release("c")
    for name in "ab":
        arena.mark_ready(name, 0)
    arena.unkeep()
    arena.evict("a")
    assert arena.keep("b", UNIT) and not arena.is_resident("b", 1)  # it has moved
    assert [one.model for one in arena.blocks()][:2] == ["b", ""]
    assert arena.keep("b", UNIT) is False  # it is pinned already

"""Geometry and dealing: for random layouts every element is read exactly once, and written by one
rank.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay._boxes import Box, contiguous_runs, intersection, tiling_fault
from torchrelay.checkpoint._types import DTYPES, Chunk, TensorEntry
from torchrelay.checkpoint.engine._read import (
    ChunkSlice,
    _parts,
    _pieces,
    _span,
    deal_blocks,
    segments_of,
)
from torchrelay.checkpoint.plan._plan import PlannedChunk, deal

_property = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes that cover it once: cuts in each dimension, some boxes cut again."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=4)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 8)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.sizes[dim]))
        first, second = list(box.sizes), list(box.sizes)
        first[dim], second[dim] = cut, box.sizes[dim] - cut
        offsets = list(box.offsets)
        offsets[dim] += cut
        boxes += [Box(box.offsets, tuple(first)), Box(tuple(offsets), tuple(second))]
    return shape, [box for box in boxes if box.numel]


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Box(
        offsets,
        tuple(draw(st.integers(1, size - a)) for a, size in zip(offsets, shape, strict=True)),
    )


@_property
@given(st.data())
def test_every_element_is_read_exactly_once(data: st.DataObject) -> None:
    shape, boxes = data.draw(tilings())
    assert tiling_fault(shape, boxes) is None
    wanted = data.draw(boxes_in(shape))
    chunks = tuple(Chunk(box, "f", 0, 4 * box.numel) for box in boxes)
    entry = TensorEntry(DTYPES["float32"], shape, chunks)
    count = torch.zeros(shape, dtype=torch.int64)
    for segment in segments_of("k", entry, wanted):
        assert intersection(segment.inner, segment.chunk.box) == segment.inner
        for part in _parts(segment, data.draw(st.integers(4, 200))):
            count[part.within(Box.whole(shape))] += 1
    expected = torch.zeros(shape, dtype=torch.int64)
    expected[wanted.within(Box.whole(shape))] = 1
    assert torch.equal(count, expected)


@_property
@given(st.data())
def test_a_part_is_where_the_storage_has_it(data: st.DataObject) -> None:
    shape, boxes = data.draw(tilings())
    outer = data.draw(st.sampled_from(boxes))
    inner = data.draw(boxes_in(outer.sizes))
    inner = Box(
        tuple(a + b for a, b in zip(inner.offsets, outer.offsets, strict=True)), inner.sizes
    )
    whole = torch.arange(math.prod(shape)).reshape(shape)
    order = data.draw(st.permutations(range(len(shape))))  # dimensions, the slowest first
    stored = whole[outer.within(Box.whole(shape))].permute(order)
    stored = stored.clone(memory_format=torch.contiguous_format)
    in_order = [stored.stride(order.index(dim)) for dim in range(len(shape))]
    stored = stored.reshape(-1)
    is_row_major = order == sorted(order)
    first, run, strides = contiguous_runs(inner, outer, None if is_row_major else in_order)
    assert torch.equal(
        stored.as_strided(inner.sizes, strides, first), whole[inner.within(Box.whole(shape))]
    )
    flat = whole[inner.within(Box.whole(shape))].reshape(-1, run)
    positions = {int(value): index for index, value in enumerate(stored)}
    for row in flat:
        begin = positions[int(row[0])]
        assert stored[begin : begin + run].tolist() == row.tolist()
    segment = ChunkSlice(
        "k",
        TensorEntry(DTYPES["int64"], shape, ()),
        Chunk(outer, "f", 0, 8 * outer.numel, strides=strides),
        inner,
    )
    start, end = _span(segment.entry, segment.chunk, inner)
    assert start == 8 * first and end <= 8 * stored.numel()


@_property
@given(st.data())
def test_an_intersection_has_the_elements_that_both_boxes_have(data: st.DataObject) -> None:
    shape = data.draw(tilings())[0]
    one, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))

    def elements(box: Box | None) -> set[tuple[int, ...]]:
        if box is None:
            return set()
        ranges = (range(a, a + size) for a, size in zip(*box, strict=True))
        return {*itertools.product(*ranges)}

    assert elements(intersection(one, other)) == elements(one) & elements(other)


@_property
@given(st.data())
def test_boxes_tile_exactly_if_every_element_is_covered_once(data: st.DataObject) -> None:
    """Tilings with one box lost, doubled or replaced by another are told from whole ones."""
    shape, boxes = data.draw(tilings())
    victim = data.draw(st.integers(0, len(boxes) - 1))
    change = data.draw(st.sampled_from(["none", "lost", "doubled", "replaced"]))
    if change in ("lost", "replaced"):
        boxes.pop(victim)
    if change == "doubled":
        boxes.append(boxes[victim])
    if change == "replaced":
        boxes.append(data.draw(boxes_in(shape)))
    count = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        count[box.within(Box.whole(shape))] += 1
    assert (tiling_fault(shape, data.draw(st.permutations(boxes))) is None) == bool(
        (count == 1).all()
    )


def test_what_does_not_tile_is_named() -> None:
    half = Box((0, 0), (2, 3))
    assert "3 of 6" in (tiling_fault((2, 3), [Box((0, 0), (1, 3))]) or "")
    assert "overlap at (0, 0)" in (tiling_fault((2, 3), [half, Box((0, 0), (1, 1))]) or "")
    assert "out of range" in (tiling_fault((2, 2), [half]) or "")
    assert "2 dimensions, the tensor 1" in (tiling_fault((6,), [half]) or "")
    assert tiling_fault((0, 4), []) is None
    assert tiling_fault((), [Box((), ())]) is None


@_property
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1000),
            st.sets(st.integers(0, 5), min_size=1).map(lambda s: tuple(sorted(s))),
        ),
        max_size=40,
    )
)
def test_each_chunk_is_written_by_one_of_its_holders(
    shapes: list[tuple[int, tuple[int, ...]]],
) -> None:
    whole = Box((), ())
    chunks = [
        (PlannedChunk((f"k{i}",), DTYPES["uint8"], (), whole, size, i), holders)
        for i, (size, holders) in enumerate(shapes)
    ]
    written: Counter[int] = Counter()
    loads: dict[tuple[int, ...], dict[int, int]] = {}
    for rank in range(6):
        for chunk in deal([one for one in chunks if rank in one[1]], rank):
            i = chunk.block
            assert rank in shapes[i][1]
            written[i] += 1
            loads.setdefault(shapes[i][1], {}).setdefault(rank, 0)
            loads[shapes[i][1]][rank] += shapes[i][0]
    assert written == Counter(range(len(shapes)))
    for holders, by_rank in loads.items():
        largest = max(size for size, of in shapes if of == holders)
        spread = [by_rank.get(rank, 0) for rank in holders]
        assert max(spread) - min(spread) <= largest


@_property
@given(st.lists(st.lists(st.booleans(), min_size=100, max_size=100), min_size=1, max_size=5))
def test_each_block_is_verified_by_one_of_its_readers(rows: list[list[bool]]) -> None:
    touched = np.array(rows)
    verified = np.stack([deal_blocks(touched, rank) for rank in range(len(rows))])
    assert not (verified & ~touched).any()
    assert (verified.sum(axis=0) == touched.any(axis=0)).all()


def test_blocks_that_all_read_are_verified_in_equal_shares() -> None:
    touched = np.ones((3, 480), dtype=np.bool_)
    assert [int(deal_blocks(touched, rank).sum()) for rank in range(3)] == [160, 160, 160]


@_property
@given(
    st.lists(st.tuples(st.integers(0, 1 << 18), st.integers(1, 4000)), max_size=60),
    st.integers(1, 20_000),
)
def test_ranges_are_read_together_only_if_they_are_close(
    ranges: list[tuple[int, int]], limit_bytes: int
) -> None:
    ranges.sort()
    starts, sizes = np.array(ranges, np.uint64).reshape(-1, 2).T
    pieces = list(_pieces(starts, sizes, limit_bytes))
    assert [i for piece in pieces for i in range(piece.start, piece.stop)] == [*range(len(ranges))]
    for piece in pieces:
        together = ranges[piece]
        length = together[-1][0] + together[-1][1] - together[0][0]
        assert len(together) == 1 or length <= limit_bytes
        for (start, size), (following, _) in itertools.pairwise(together):
            assert 0 <= following - start - size <= 64 << 10

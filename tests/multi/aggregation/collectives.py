"""What the tests of c10d's collectives on ``sml`` share: groups, inputs and expected results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import torchrelay.aggregation  # noqa: F401 - registers the backend
from torchrelay import _communicators
from torchrelay.world import World

ReduceOp = dist.ReduceOp
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
ARITHMETIC = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
# In one step, in blocks, and neither a multiple of anything.
SIZES = (1, 300, 9001)


@contextmanager
def groups(world: World) -> Iterator[dist.ProcessGroup]:
    """The default group is ``sml``, with small slots; yields a Gloo group of the same ranks."""
    _communicators._SLOT_BYTES, _communicators._ONE_SHOT_BYTES = 16384, 2048
    dist.init_process_group("sml", store=world.connect(60), rank=world.rank, world_size=world.size)
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()


def make(rank: int, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What ``rank`` holds: small whole numbers, so that sums and products are exact in any
    order.
    """
    generator = torch.Generator().manual_seed(rank * 7919 + 13)
    low = 0 if dtype in (torch.uint8, torch.bool) else -3
    values = torch.randint(
        low,
        2 if dtype is torch.bool else 4,
        (shape,) if isinstance(shape, int) else shape,
        generator=generator,
    )
    if dtype.is_complex:
        return torch.complex(values.double(), values.flip(0).double()).to(dtype)
    return values.to(dtype)


def expected(op: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The reduction in float64 or int64, then rounded once."""
    dtype = tensors[0].dtype
    wide = torch.stack(tensors).to(
        torch.complex128
        if dtype.is_complex
        else torch.float64
        if dtype.is_floating_point
        else torch.int64
    )
    if dtype is torch.bool:
        table = {
            ReduceOp.SUM: "amax",
            ReduceOp.MAX: "amax",
            ReduceOp.BOR: "amax",
            ReduceOp.PRODUCT: "amin",
            ReduceOp.MIN: "amin",
            ReduceOp.BAND: "amin",
        }
        if op == ReduceOp.BXOR:
            return wide.sum(0).remainder(2).bool()
        return getattr(wide, table[op])(0).bool()
    if op == ReduceOp.SUM:
        out = wide.sum(0)
    elif op == ReduceOp.AVG:
        out = wide.sum(0).to(dtype).to(wide.dtype) if dtype in INTS else wide.sum(0)
        out = (
            out / len(tensors)
            if dtype not in INTS
            else torch.div(out, len(tensors), rounding_mode="trunc")
        )
    elif op == ReduceOp.PRODUCT:
        out = wide.prod(0)
    elif op == ReduceOp.MIN:
        out = wide.amin(0)
    elif op == ReduceOp.MAX:
        out = wide.amax(0)
    else:
        out = wide[0]
        function = {
            ReduceOp.BAND: torch.bitwise_and,
            ReduceOp.BOR: torch.bitwise_or,
            ReduceOp.BXOR: torch.bitwise_xor,
        }[op]
        for other in wide[1:]:
            out = function(out, other)
    return out.to(dtype)


DTYPES = (*FLOATS, *INTS, torch.bool, torch.complex64, torch.complex128)
COPIED = (*DTYPES, torch.float8_e4m3fn, torch.uint16)


def ops_of(dtype: torch.dtype) -> tuple[dist.ReduceOp.RedOpType, ...]:
    if dtype.is_complex:
        return (ReduceOp.SUM,)
    if dtype is torch.bool:
        return (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, *BITWISE)
    return ARITHMETIC + (BITWISE if dtype in INTS else ())


def check(got: torch.Tensor, want: torch.Tensor, what: object) -> None:
    # An average is divided in float32, then rounded: bfloat16 may differ from float64's answer by
    # its last bit.
    torch.testing.assert_close(
        got,
        want,
        rtol=1e-2 if want.dtype in (torch.bfloat16, torch.float16) else 1e-6,
        atol=0,
        msg=lambda m: f"{what}: {m}",
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def copied_inputs(world: World, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [make(r, size, torch.uint8).to(dtype) for r in range(world.size)]


GRID = torch.arange(12.0).view(3, 4)
VIEWS = {
    "transposed": GRID.t(),
    "strided": GRID[:, ::2],
    "transposed with one more axis": GRID.t().unsqueeze(1),
    "column": GRID[1:, 1],
}


def like_view(grid: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """The part of ``grid`` that ``view`` is of ``GRID``."""
    return grid.as_strided(view.shape, view.stride(), view.storage_offset())

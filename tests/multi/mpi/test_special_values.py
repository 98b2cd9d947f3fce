"""Every implementation of a reduction gives the same of NaN, infinities, zeros, ties, subnormal
numbers, extreme integers and empty tensors, or refuses it: headers, MPI, process groups, threads,
and gathering where a derivative is wanted.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from multi.mpi.reference import ALL_DTYPES, COMPLEX, FLOATS, REDUCTIONS
from multi.mpi.runner import REAL, THREADS, mpi_test
from torchrelay import mpi
from torchrelay.errors import ArgumentError
from torchrelay.mpi import Communicator

SIZES = (
    0,
    10_000,
)  # at least: one in the headers, where dtypes travel there, and beyond their size
FUNCTIONS = ("Allreduce", "Iallreduce", "Reduce_", "Scan", "Exscan", "Reduce_scatter_block")
LOGICAL = (mpi.MPI_LAND, mpi.MPI_LOR, mpi.MPI_LXOR)
BITWISE = (mpi.MPI_BAND, mpi.MPI_BOR, mpi.MPI_BXOR)
OPS = (*REDUCTIONS, *LOGICAL, *BITWISE)
LOCATIONS = {mpi.MPI_MAXLOC: mpi.MPI_MAX, mpi.MPI_MINLOC: mpi.MPI_MIN}


def added(a: Tensor, b: Tensor) -> Tensor:
    """The sum of each part: torch.add multiplies a complex number by 1, which may give a NaN."""
    return torch.complex(a.real + b.real, a.imag + b.imag) if a.is_complex() else a + b


def product(a: Tensor, b: Tensor) -> Tensor:
    """The product of its parts, without the infinities that C makes of NaNs."""
    if not a.is_complex():
        return a & b if a.dtype is torch.bool else a * b
    real = a.real * b.real - a.imag * b.imag
    return torch.complex(real, a.real * b.imag + a.imag * b.real)


PAIRWISE: dict[mpi.Op, Callable[[Tensor, Tensor], Tensor]] = {
    mpi.MPI_SUM: added,
    mpi.MPI_PROD: product,
    mpi.MPI_MAX: torch.maximum,
    mpi.MPI_MIN: torch.minimum,
    mpi.MPI_LAND: lambda a, b: ((a != 0) & (b != 0)).to(a.dtype),
    mpi.MPI_LOR: lambda a, b: ((a != 0) | (b != 0)).to(a.dtype),
    mpi.MPI_LXOR: lambda a, b: ((a != 0) ^ (b != 0)).to(a.dtype),
    mpi.MPI_BAND: torch.bitwise_and,
    mpi.MPI_BOR: torch.bitwise_or,
    mpi.MPI_BXOR: torch.bitwise_xor,
}


def is_defined(op: mpi.Op, dtype: torch.dtype) -> bool:
    if dtype.is_complex:
        return op in (mpi.MPI_SUM, mpi.MPI_PROD)
    return not (dtype.is_floating_point and op in BITWISE)


def special(op: mpi.Op, dtype: torch.dtype, rank: int) -> Tensor:
    """All pairs of special values on two neighbouring ranks."""
    values: list[complex]
    if dtype is torch.bool:
        values = [False, True]
    elif not (dtype.is_floating_point or dtype.is_complex):
        values = [0, 1, 2, 3, torch.iinfo(dtype).min, torch.iinfo(dtype).max]
    else:
        parts = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -2.0]
        values = [*parts]
        if dtype.is_complex:
            values = [complex(*pair) for pair in itertools.product(parts, parts)]
        elif op not in (mpi.MPI_SUM, mpi.MPI_PROD):  # which torch's threads may flush to zero
            values.append(torch.finfo(dtype).smallest_normal / 4)
    pairs = list(itertools.product(values, values))
    return torch.tensor([pair[rank % 2] for pair in pairs], dtype=dtype)


def plain(x: Tensor, op: mpi.Op) -> Tensor:
    """Equal tensors for equal values: of each NaN a number, and of zeros their sign."""
    if x.is_complex():
        x = torch.view_as_real(x)
    if not x.is_floating_point():
        return x
    signs = torch.where(x == 0, x.signbit(), False)
    if op in (mpi.MPI_MAX, mpi.MPI_MIN):
        signs = torch.zeros_like(signs)  # either zero
    return torch.stack([x.nan_to_num(nan=77.0), signs.to(x.dtype)])


def call(comm: Communicator, name: str, x: Tensor, op: mpi.Op) -> Tensor:
    if name == "Iallreduce":
        return comm.Iallreduce(x, op).Wait()
    if name == "Reduce_":
        return comm.Reduce_(x.clone(), op, 0)
    if name == "Reduce_scatter_block":
        return comm.Reduce_scatter_block(torch.cat([x] * comm.size), op)
    result: Tensor = getattr(comm, name)(x, op)
    return result


def wanted(rank: int, name: str, xs: list[Tensor], op: mpi.Op) -> Tensor:
    nothing = torch.zeros_like(xs[0])
    if name in ("Scan", "Exscan"):
        xs = xs[: rank + (name == "Scan")]
    if not xs or (name == "Reduce_" and rank):
        return nothing
    if op in LOGICAL:
        xs = [(x != 0).to(x.dtype) for x in xs]
    return functools.reduce(PAIRWISE[op], xs)


@mpi_test((1, 2, 3), on=(*REAL, *THREADS), dtype=ALL_DTYPES)
def test_special_values(comm: Communicator, dtype: torch.dtype) -> None:
    modes = (False, True) if dtype in (*FLOATS, *COMPLEX) else (False,)
    ops = [op for op in OPS if is_defined(op, dtype)]
    for name, op, size in itertools.product(FUNCTIONS, ops, SIZES):
        xs = [special(op, dtype, rank) for rank in range(comm.size)]
        xs = [x.repeat(1 + size // len(x)) for x in xs]
        theirs = plain(wanted(comm.rank, name, xs, op), op)
        for is_recorded in modes:  # gathered if it is
            with torch.set_grad_enabled(is_recorded):
                ours = plain(call(comm, name, xs[comm.rank], op).detach(), op)
            assert torch.equal(ours, theirs), (name, op, size, is_recorded, comm.rank)
            mpi.reset()


@mpi_test((1, 2, 3), on=(*REAL, *THREADS))
def test_undefined_operations_are_refused_on_all_ranks(comm: Communicator) -> None:
    for dtype, name, op in itertools.product(ALL_DTYPES, FUNCTIONS, (*OPS, *LOCATIONS)):
        x = torch.ones(2, dtype=dtype)
        only_allreduce = op in LOCATIONS and name != "Allreduce"
        if is_defined(LOCATIONS.get(op, op), dtype) and not only_allreduce:
            continue
        for is_recorded in (False, True):
            with torch.set_grad_enabled(is_recorded), pytest.raises(ArgumentError, match=op.value):
                call(comm, name, x, op)
            mpi.reset()
    assert comm.Allreduce(torch.ones(1), mpi.MPI_SUM) == comm.size
    mpi.reset()


@mpi_test((1, 2, 3), dtype=FLOATS)
def test_locations_of_special_values(comm: Communicator, dtype: torch.dtype) -> None:
    """The lowest rank that holds the extremum, of which a NaN is one."""
    for size, (op, extremum) in itertools.product(SIZES, LOCATIONS.items()):
        xs = [special(extremum, dtype, rank) for rank in range(comm.size)]
        xs = [x.repeat(1 + size // len(x)) for x in xs]
        values = functools.reduce(PAIRWISE[extremum], xs)
        holds = torch.stack([(x == values) | (x.isnan() & values.isnan()) for x in xs])
        found = comm.Allreduce(xs[comm.rank], op)
        assert torch.equal(plain(found.values, extremum), plain(values, extremum))
        assert torch.equal(found.ranks, holds.int().argmax(0))
        mpi.reset()


@mpi_test((1, 2, 3), dtype=ALL_DTYPES)
def test_empty_tensors(comm: Communicator, dtype: torch.dtype) -> None:
    x = torch.empty(0, 2, dtype=dtype)
    for name, op in itertools.product(FUNCTIONS, OPS):
        if is_defined(op, dtype):
            y = call(comm, name, x, op)
            assert y.shape == x.shape and y.dtype == dtype, (name, op)
            mpi.reset()

"""Every implementation of a reduction gives the same of NaN, infinities, zeros, ties, subnormal
numbers and empty tensors: headers, MPI, process groups, and gathering where a derivative is wanted.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from multi.mpi.reference import FLOATS, REDUCTIONS
from multi.mpi.runner import mpi_test
from torchrelay import mpi
from torchrelay.mpi import Communicator

COPIES = (1, 300)  # in the headers, and beyond their size
FUNCTIONS = ("Allreduce", "Iallreduce", "Reduce_", "Scan", "Exscan", "Reduce_scatter_block")
PAIRWISE: dict[mpi.Op, Callable[[Tensor, Tensor], Tensor]] = {
    mpi.MPI_SUM: torch.add,
    mpi.MPI_PROD: torch.mul,
    mpi.MPI_MAX: torch.maximum,
    mpi.MPI_MIN: torch.minimum,
}


def special(op: mpi.Op, dtype: torch.dtype, rank: int) -> Tensor:
    """All pairs of special values on two neighbouring ranks."""
    values = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -2.0]
    if op in (mpi.MPI_MAX, mpi.MPI_MIN):
        values.append(torch.finfo(dtype).smallest_normal / 4)
    pairs = list(itertools.product(values, values))
    return torch.tensor([pair[rank % 2] for pair in pairs], dtype=dtype)


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
    if name in ("Scan", "Exscan"):
        xs = xs[: rank + (name == "Scan")]
    if not xs or (name == "Reduce_" and rank):
        return torch.zeros_like(xs[0]) if xs else torch.zeros(())
    return functools.reduce(PAIRWISE[op], xs).nan_to_num(nan=77.0)


@mpi_test((1, 2, 3), dtype=FLOATS)
def test_special_values(comm: Communicator, dtype: torch.dtype) -> None:
    for name, op, copies in itertools.product(FUNCTIONS, REDUCTIONS, COPIES):
        xs = [special(op, dtype, rank).repeat(copies) for rank in range(comm.size)]
        theirs = wanted(comm.rank, name, xs, op).expand_as(xs[0])
        for is_recorded in (False, True):  # gathered if it is
            with torch.set_grad_enabled(is_recorded):
                ours = call(comm, name, xs[comm.rank], op).detach().nan_to_num(nan=77.0)
            assert torch.equal(ours, theirs), (name, op, copies, is_recorded)
            mpi.reset()


@mpi_test((1, 2, 3), dtype=FLOATS)
def test_locations_of_special_values(comm: Communicator, dtype: torch.dtype) -> None:
    """The lowest rank that holds the extremum, of which a NaN is one."""
    for copies, (op, extremum) in itertools.product(
        COPIES, ((mpi.MPI_MAXLOC, mpi.MPI_MAX), (mpi.MPI_MINLOC, mpi.MPI_MIN))
    ):
        xs = [special(extremum, dtype, rank).repeat(copies) for rank in range(comm.size)]
        values = functools.reduce(PAIRWISE[extremum], xs)
        holds = torch.stack([(x == values) | (x.isnan() & values.isnan()) for x in xs])
        found = comm.Allreduce(xs[comm.rank], op)
        assert torch.equal(found.values.nan_to_num(nan=77.0), values.nan_to_num(nan=77.0))
        assert torch.equal(found.ranks, holds.int().argmax(0))
        mpi.reset()


@mpi_test((1, 2, 3), dtype=(torch.float32, torch.int16, torch.int64, torch.bool))
def test_empty_tensors(comm: Communicator, dtype: torch.dtype) -> None:
    x = torch.empty(0, 2, dtype=dtype)
    for name, op in itertools.product(FUNCTIONS, REDUCTIONS):
        y = call(comm, name, x, op)
        assert y.shape == x.shape and y.dtype == dtype, (name, op)
        mpi.reset()

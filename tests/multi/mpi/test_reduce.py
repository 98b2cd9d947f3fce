"""Reduce_."""

# ruff: noqa: B023 - functions made in a loop are called in the same round of it
from __future__ import annotations

import torch
from torch import Tensor

from multi.mpi.reference import (
    ALL_DTYPES,
    REDUCTIONS,
    SIZES,
    Differentiable,
    check,
    check_arguments,
    derivative_tests,
    inputs,
    ops_of,
)
from multi.mpi.runner import mpi_test
from torchrelay import mpi
from torchrelay.mpi import Communicator
from torchrelay.mpi._settings import changed


@mpi_test(SIZES, dtype=ALL_DTYPES)
def test_values(comm: Communicator, dtype: torch.dtype) -> None:
    given = inputs([(3, 2)] * comm.size, dtype)
    root = comm.size - 1
    for op in ops_of(dtype):

        def model(xs: list[Tensor]) -> list[Tensor]:
            total = REDUCTIONS[op](torch.stack(xs))
            return [total if r == root else torch.zeros_like(total) for r in range(comm.size)]

        check(lambda x: comm.Reduce_(x, op, root), model, given, comm.rank)


@mpi_test(SIZES)
def test_large_counts_go_in_pieces(comm: Communicator) -> None:
    with changed(max_count=3):
        check(
            lambda x: comm.Reduce_(x * 1, mpi.MPI_SUM, 0),
            lambda xs: [torch.stack(xs).sum(0) * (r == 0) for r in range(comm.size)],
            inputs([(5, 4)] * comm.size, torch.float64),
            comm.rank,
        )


FUNCTIONS: dict[str, Differentiable] = {
    "Reduce_": lambda comm, x: comm.Reduce_(x * x, mpi.MPI_SUM, comm.size - 1),
    "Reduce_ PROD": lambda comm, x: comm.Reduce_(x * 1, mpi.MPI_PROD, 0),
    "Reduce_ MIN": lambda comm, x: comm.Reduce_(x * x, mpi.MPI_MIN, comm.size - 1),
}


test_gradient, test_forward_mode, test_complex_gradient, test_second_derivative = derivative_tests(
    FUNCTIONS
)


@mpi_test()
def test_wrong_arguments(comm: Communicator) -> None:
    x = torch.ones(2, 2)
    check_arguments(
        lambda: comm.Reduce_(x, mpi.MPI_SUM, comm.size),
        lambda: comm.Reduce_(x, mpi.MPI_BAND, 0),
        lambda: comm.Reduce_(x.to(torch.complex64), mpi.MPI_MAX, 0),
    )

"""Bcast_."""

# ruff: noqa: B023 - functions made in a loop are called in the same round of it
from __future__ import annotations

import torch

from multi.mpi.reference import (
    ALL_DTYPES,
    SIZES,
    Differentiable,
    check,
    check_arguments,
    copy,
    derivative_tests,
    inputs,
)
from multi.mpi.runner import mpi_test
from torchrelay.mpi import Communicator
from torchrelay.mpi._settings import changed


@mpi_test(SIZES, dtype=ALL_DTYPES)
def test_values(comm: Communicator, dtype: torch.dtype) -> None:
    given = inputs([(3, 2)] * comm.size, dtype)
    for root in range(comm.size):
        check(
            lambda x: comm.Bcast_(x, root),
            lambda xs: [copy(xs[root])] * comm.size,
            given,
            comm.rank,
        )


@mpi_test(SIZES)
def test_large_counts_go_in_pieces(comm: Communicator) -> None:
    given = inputs([(5, 4)] * comm.size, torch.float64)
    with changed(max_count=3):
        check(lambda x: comm.Bcast_(x, 0), lambda xs: [copy(xs[0])] * comm.size, given, comm.rank)


FUNCTIONS: dict[str, Differentiable] = {
    "Bcast_": lambda comm, x: comm.Bcast_(x * x, comm.size - 1),
}


test_gradient, test_forward_mode, test_complex_gradient, test_second_derivative = derivative_tests(
    FUNCTIONS
)


@mpi_test()
def test_wrong_arguments(comm: Communicator) -> None:
    check_arguments(lambda: comm.Bcast_(torch.ones(2, 2), comm.size))

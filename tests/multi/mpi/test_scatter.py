"""Scatter and Iscatter."""

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
    ragged,
)
from multi.mpi.runner import mpi_test
from torchrelay.mpi import Communicator
from torchrelay.mpi._settings import changed


@mpi_test(SIZES, dtype=ALL_DTYPES)
def test_values(comm: Communicator, dtype: torch.dtype) -> None:
    root = comm.size // 2
    for axis in (0, 1, -1):
        lengths = [s[axis] for s in ragged(comm, axis)]
        whole = [2, 3, 2]
        whole[axis] = sum(lengths)
        check(
            lambda x: comm.Scatter(x, axis, lengths[comm.rank], root),
            lambda xs: [copy(part) for part in xs[root].split(lengths, axis)],
            inputs([whole if r == root else (1, 2) for r in range(comm.size)], dtype),
            comm.rank,
        )


@mpi_test(SIZES)
def test_large_counts_go_in_pieces(comm: Communicator) -> None:
    with changed(max_count=3):
        check(
            lambda x: comm.Scatter(x, 1, 2, 0),
            lambda xs: [copy(part) for part in xs[0].split(2, 1)],
            inputs([(5, 2 * comm.size)] * comm.size, torch.float64),
            comm.rank,
        )


FUNCTIONS: dict[str, Differentiable] = {
    "Scatter": lambda comm, x: comm.Scatter(torch.cat([x * x] * comm.size, 1), 1, 2, comm.size - 1),
    "Iscatter": lambda comm, x: comm.Iscatter(torch.cat([x * x] * comm.size), 0, 0).Wait(),
}


test_gradient, test_forward_mode, test_complex_gradient, test_second_derivative = derivative_tests(
    FUNCTIONS
)


@mpi_test()
def test_wrong_arguments(comm: Communicator) -> None:
    check_arguments(lambda: comm.Scatter(torch.ones(2, 2), 0, 7, 0))

"""Reduce_scatter, with equal parts too."""

# ruff: noqa: B023 - functions made in a loop are called in the same round of it
from __future__ import annotations

import torch
from torch import Tensor

from multi.mpi.reference import (
    ALL_DTYPES,
    DERIVATIVE_SIZES,
    REDUCTIONS,
    SIZES,
    Differentiable,
    check,
    check_arguments,
    check_transforms,
    derivative_tests,
    inputs,
    ops_of,
)
from multi.mpi.runner import THREADS, mpi_test
from torchrelay import mpi
from torchrelay.mpi import Communicator
from torchrelay.mpi._settings import changed


@mpi_test(SIZES, dtype=ALL_DTYPES)
def test_values(comm: Communicator, dtype: torch.dtype) -> None:
    wanted = [(r + 1) % 3 for r in range(comm.size)]
    for axis in (0, -1):
        shape = [2, 2]
        shape[axis] = sum(wanted)
        given = inputs([shape] * comm.size, dtype)
        for op in ops_of(dtype):
            check(
                lambda x: comm.Reduce_scatter(x, op, axis, wanted[comm.rank]),
                lambda xs: list(REDUCTIONS[op](torch.stack(xs)).split(wanted, axis)),
                given,
                comm.rank,
            )


@mpi_test(SIZES)
def test_large_counts_go_in_pieces(comm: Communicator) -> None:
    with changed(max_count=3):
        check(
            lambda x: comm.Reduce_scatter(x, mpi.MPI_SUM, 1, 2),
            lambda xs: list(torch.stack(xs).sum(0).split(2, 1)),
            inputs([(5, 2 * comm.size)] * comm.size, torch.float64),
            comm.rank,
        )


def equal_parts(comm: Communicator, x: Tensor) -> Tensor:
    return torch.cat([x] * comm.size)


FUNCTIONS: dict[str, Differentiable] = {
    "Reduce_scatter": lambda comm, x: comm.Reduce_scatter(
        equal_parts(comm, x * x), mpi.MPI_SUM, 0, 2
    ),
    "Reduce_scatter_block MAX": lambda comm, x: comm.Reduce_scatter_block(
        equal_parts(comm, x * x), mpi.MPI_MAX
    ),
    "Reduce_scatter_block PROD": lambda comm, x: comm.Reduce_scatter_block(
        equal_parts(comm, x), mpi.MPI_PROD
    ),
}


test_gradient, test_forward_mode, test_complex_gradient, test_second_derivative = derivative_tests(
    FUNCTIONS
)


@mpi_test(DERIVATIVE_SIZES, on=THREADS, name=("Reduce_scatter",))
def test_func_grad_jvp_vmap(comm: Communicator, name: str) -> None:
    check_transforms(comm, FUNCTIONS[name])


@mpi_test()
def test_wrong_arguments(comm: Communicator) -> None:
    x = torch.ones(2 * comm.size, 2)
    check_arguments(
        lambda: comm.Reduce_scatter(x, mpi.MPI_SUM, 2, 2),
        lambda: comm.Reduce_scatter(x, mpi.MPI_BAND, 0, 2),
        lambda: comm.Reduce_scatter(x.to(torch.complex64), mpi.MPI_MAX, 0, 2),
    )

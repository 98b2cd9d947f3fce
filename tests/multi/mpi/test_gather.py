"""Gather."""

# ruff: noqa: B023 - functions made in a loop are called in the same round of it
from __future__ import annotations

import torch
from torch import Tensor

from multi.mpi.reference import (
    ALL_DTYPES,
    DERIVATIVE_SIZES,
    SIZES,
    Differentiable,
    check,
    check_arguments,
    check_transforms,
    derivative_tests,
    inputs,
    ragged,
)
from multi.mpi.runner import THREADS, mpi_test
from torchrelay.mpi import Communicator
from torchrelay.mpi._settings import changed


@mpi_test(SIZES, dtype=ALL_DTYPES)
def test_values(comm: Communicator, dtype: torch.dtype) -> None:
    for axis in (0, 1, 2, -1, -2):
        given = inputs(ragged(comm, axis), dtype)
        for root in {0, comm.size - 1}:

            def model(xs: list[Tensor]) -> list[Tensor]:
                whole = torch.cat(xs, axis)
                return [whole if r == root else whole.narrow(axis, 0, 0) for r in range(comm.size)]

            check(lambda x: comm.Gather(x, axis, root), model, given, comm.rank)


@mpi_test(SIZES)
def test_large_counts_go_in_pieces(comm: Communicator) -> None:
    with changed(max_count=3):
        check(
            lambda x: comm.Gather(x, 1, 0),
            lambda xs: [torch.cat(xs, 1) if r == 0 else xs[0][:, :0] for r in range(comm.size)],
            inputs([(5, 4)] * comm.size, torch.float64),
            comm.rank,
        )


FUNCTIONS: dict[str, Differentiable] = {
    "Gather": lambda comm, x: comm.Gather(x * x, 1, comm.size - 1),
}


test_gradient, test_forward_mode, test_complex_gradient, test_second_derivative = derivative_tests(
    FUNCTIONS
)


@mpi_test(DERIVATIVE_SIZES, on=THREADS, name=("Gather",))
def test_func_grad_jvp_vmap(comm: Communicator, name: str) -> None:
    check_transforms(comm, FUNCTIONS[name])


@mpi_test()
def test_wrong_arguments(comm: Communicator) -> None:
    x = torch.ones(2, 2)
    check_arguments(lambda: comm.Gather(x, 2, 0), lambda: comm.Gather(x, 0, comm.size))

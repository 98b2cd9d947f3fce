"""Alltoall."""

# ruff: noqa: B023 - functions made in a loop are called in the same round of it
from __future__ import annotations

import torch

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

AXES = ((0, 1), (1, 0), (2, -2), (-1, 0), (0, -1))


@mpi_test(SIZES, dtype=ALL_DTYPES)
def test_values(comm: Communicator, dtype: torch.dtype) -> None:
    wanted = [r % 3 + 1 for r in range(comm.size)]
    for gatheraxis, scatteraxis in AXES:
        shape = [2, 2, 2]
        shape[scatteraxis] = sum(wanted)
        check(
            lambda x: comm.Alltoall(x, gatheraxis, scatteraxis, wanted[comm.rank]),
            lambda xs: list(torch.cat(xs, gatheraxis).split(wanted, scatteraxis)),
            inputs(ragged(comm, gatheraxis, shape), dtype),
            comm.rank,
        )


@mpi_test(SIZES, dtype=(torch.float64, torch.bfloat16, torch.int16))
def test_equal_axes_move_borders(comm: Communicator, dtype: torch.dtype) -> None:
    for axis in (0, 1, -1):
        shapes = ragged(comm, axis)
        total = sum(s[axis] for s in shapes)
        wanted = [total // comm.size + (r < total % comm.size) for r in range(comm.size)]
        check(
            lambda x: comm.Alltoall(x, axis, axis, wanted[comm.rank]),
            lambda xs: list(torch.cat(xs, axis).split(wanted, axis)),
            inputs(shapes, dtype),
            comm.rank,
        )


@mpi_test(SIZES)
def test_large_counts_go_in_pieces(comm: Communicator) -> None:
    with changed(max_count=3):
        check(
            lambda x: comm.Alltoall(x, 0, 1, 2),
            lambda xs: list(torch.cat(xs, 0).split(2, 1)),
            inputs([(5, 2 * comm.size)] * comm.size, torch.float64),
            comm.rank,
        )


FUNCTIONS: dict[str, Differentiable] = {
    "Alltoall": lambda comm, x: comm.Alltoall(torch.cat([x * x] * comm.size, 1), 0, 1, 2),
    "Alltoall of equal axes": lambda comm, x: comm.Alltoall(
        x * x, 1, 1, 2 * comm.size if comm.rank == 0 else 0
    ),
}


test_gradient, test_forward_mode, test_complex_gradient, test_second_derivative = derivative_tests(
    FUNCTIONS
)


@mpi_test(DERIVATIVE_SIZES, on=THREADS, name=("Alltoall",))
def test_func_grad_jvp_vmap(comm: Communicator, name: str) -> None:
    check_transforms(comm, FUNCTIONS[name])


@mpi_test()
def test_wrong_arguments(comm: Communicator) -> None:
    x = torch.ones(2, 2)
    check_arguments(lambda: comm.Alltoall(x, 2, 0, 2), lambda: comm.Alltoall(x, 0, -3, 2))

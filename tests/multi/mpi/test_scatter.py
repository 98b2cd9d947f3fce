"""Scatter."""

# ruff: noqa: B023 - functions made in a loop are called in the same round of it
from __future__ import annotations

import pytest
import torch

from multi.mpi.reference import (
    ALL_DTYPES,
    DERIVATIVE_SIZES,
    SIZES,
    Differentiable,
    check,
    check_arguments,
    check_transforms,
    copy,
    derivative_tests,
    inputs,
    ragged,
)
from multi.mpi.runner import THREADS, mpi_test
from torchrelay.errors import MismatchError
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
}


test_gradient, test_forward_mode, test_complex_gradient, test_second_derivative = derivative_tests(
    FUNCTIONS
)


@mpi_test(DERIVATIVE_SIZES, on=THREADS, name=("Scatter",))
def test_func_grad_jvp_vmap(comm: Communicator, name: str) -> None:
    check_transforms(comm, FUNCTIONS[name])


@mpi_test((2, 3))
def test_ranks_that_record_it_and_ranks_that_do_not_are_named(comm: Communicator) -> None:
    x = torch.ones(comm.size) if comm.rank == 0 else torch.empty(0, dtype=torch.int64)
    with pytest.raises(MismatchError, match="not recorded by autograd"):
        comm.Scatter(x, 0, 1, 0)
    with torch.no_grad():
        assert comm.Scatter(x, 0, 1, 0).tolist() == [1.0]


@mpi_test()
def test_wrong_arguments(comm: Communicator) -> None:
    check_arguments(lambda: comm.Scatter(torch.ones(2, 2), 0, 7, 0))

"""Allgather."""

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
from torchrelay.mpi._transport import ANY_TAG


@mpi_test(SIZES, dtype=ALL_DTYPES)
def test_values(comm: Communicator, dtype: torch.dtype) -> None:
    for axis in (0, 1, 2, -1, -3):
        check(
            lambda x: comm.Allgather(x, axis),
            lambda xs: [torch.cat(xs, axis)] * comm.size,
            inputs(ragged(comm, axis), dtype),
            comm.rank,
        )


@mpi_test(SIZES)
def test_large_counts_go_in_pieces(comm: Communicator) -> None:
    with changed(max_count=3):
        check(
            lambda x: comm.Allgather(x, 1),
            lambda xs: [torch.cat(xs, 1)] * comm.size,
            inputs([(5, 4)] * comm.size, torch.float64),
            comm.rank,
        )


@mpi_test((2, 3))
def test_pieces_are_not_taken_for_messages(comm: Communicator) -> None:
    above, below = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x = torch.arange(8.0) + comm.rank
    with torch.no_grad():
        for tag in (ANY_TAG, 7):
            handle = comm.Irecv(torch.empty(2), below, tag)
            with changed(max_count=3):
                y = comm.Allgather(x, 0)
            comm.Send(x[:2] + 10, above, 7)
            assert handle.Wait().tolist() == [10.0 + below, 11.0 + below]
            assert y.tolist() == [k + rank for rank in range(comm.size) for k in range(8)]


FUNCTIONS: dict[str, Differentiable] = {
    "Allgather": lambda comm, x: comm.Allgather(x * x, 0),
}


test_gradient, test_forward_mode, test_complex_gradient, test_second_derivative = derivative_tests(
    FUNCTIONS
)


@mpi_test(DERIVATIVE_SIZES, on=THREADS, name=("Allgather",))
def test_func_grad_jvp_vmap(comm: Communicator, name: str) -> None:
    check_transforms(comm, FUNCTIONS[name])


@mpi_test()
def test_wrong_arguments(comm: Communicator) -> None:
    check_arguments(lambda: comm.Allgather(torch.ones(2, 2), 2))

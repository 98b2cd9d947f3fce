"""Alltoallv."""

from __future__ import annotations

import torch

from multi.mpi.reference import (
    DERIVATIVE_SIZES,
    Differentiable,
    check_arguments,
    check_transforms,
    derivative_tests,
)
from multi.mpi.runner import THREADS, mpi_test
from torchrelay.mpi import Communicator


@mpi_test((2, 3))
def test_values(comm: Communicator) -> None:
    """Other counts on each rank."""
    counts = [(comm.rank + peer) % 3 for peer in range(comm.size)]
    x = torch.arange(sum(counts)).double() + 100 * comm.rank
    y = comm.Alltoallv(x, counts)
    wanted = []
    for peer in range(comm.size):
        theirs = [(peer + other) % 3 for other in range(comm.size)]
        start = sum(theirs[: comm.rank])
        wanted += [100.0 * peer + start + k for k in range(theirs[comm.rank])]
    assert y.tolist() == wanted


def counts(comm: Communicator, step: int) -> list[int]:
    """Two elements for one other rank."""
    return [2 if s == (comm.rank + step) % comm.size else 0 for s in range(comm.size)]


FUNCTIONS: dict[str, Differentiable] = {
    "Alltoallv": lambda comm, x: comm.Alltoallv(x * x, counts(comm, 1), 1),
}


test_gradient, test_forward_mode, test_complex_gradient, test_second_derivative = derivative_tests(
    FUNCTIONS
)


@mpi_test(DERIVATIVE_SIZES, on=THREADS, name=("Alltoallv",))
def test_func_grad_jvp_vmap(comm: Communicator, name: str) -> None:
    check_transforms(comm, FUNCTIONS[name])


@mpi_test()
def test_wrong_arguments(comm: Communicator) -> None:
    x = torch.ones(2, 2)
    check_arguments(lambda: comm.Alltoallv(x, [1] * (comm.size + 1)))

"""Several collectives in progress at once."""

from __future__ import annotations

from torch import Tensor

from multi.mpi.reference import (
    DERIVATIVE_SIZES,
    Differentiable,
    check_complex_gradient,
    check_forward_mode,
    check_gradient,
    check_second_derivative,
)
from multi.mpi.runner import mpi_test
from torchrelay import mpi
from torchrelay.mpi import Communicator


def at_once(comm: Communicator, x: Tensor) -> Tensor:
    first, second = comm.Iallreduce(x, mpi.MPI_SUM), comm.Iallgather(x * x, 0)
    results = [h.Wait() for h in ((first, second) if comm.rank % 2 else (second, first))]
    return results[0].sum() * results[1]


def in_turn(comm: Communicator, x: Tensor) -> Tensor:
    return comm.Iallreduce(x, mpi.MPI_SUM).Wait() * comm.Iallreduce(x * x, mpi.MPI_SUM).Wait()


FUNCTIONS: dict[str, Differentiable] = {
    "two at once": at_once,
    "two in turn": in_turn,
}


@mpi_test(DERIVATIVE_SIZES, name=FUNCTIONS)
def test_gradient(comm: Communicator, name: str) -> None:
    check_gradient(comm, FUNCTIONS[name])


@mpi_test(DERIVATIVE_SIZES, name=FUNCTIONS)
def test_forward_mode(comm: Communicator, name: str) -> None:
    check_forward_mode(comm, FUNCTIONS[name])


@mpi_test((1, 2), name=FUNCTIONS)
def test_complex_gradient(comm: Communicator, name: str) -> None:
    check_complex_gradient(comm, FUNCTIONS[name])


@mpi_test(DERIVATIVE_SIZES, name=FUNCTIONS)
def test_second_derivative(comm: Communicator, name: str) -> None:
    check_second_derivative(comm, FUNCTIONS[name])

"""Several collectives in progress at once."""

from __future__ import annotations

from torch import Tensor

from multi.mpi.reference import (
    Differentiable,
    derivative_tests,
)
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


test_gradient, test_forward_mode, test_complex_gradient, test_second_derivative = derivative_tests(
    FUNCTIONS
)

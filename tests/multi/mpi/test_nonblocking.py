"""Several collectives in progress at once."""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch
from torch import Tensor

from multi.mpi.reference import (
    Differentiable,
    derivative_tests,
)
from multi.mpi.runner import mpi_test
from torchrelay import mpi
from torchrelay.mpi import Communicator
from torchrelay.mpi._headers import Comparison


def at_once(comm: Communicator, x: Tensor) -> Tensor:
    first, second = comm.Iallreduce(x, mpi.MPI_SUM), comm.Iallreduce(x, mpi.MPI_PROD)
    results = [h.Wait() for h in ((first, second) if comm.rank % 2 else (second, first))]
    return results[0].sum() * results[1]


def in_turn(comm: Communicator, x: Tensor) -> Tensor:
    return comm.Iallreduce(x, mpi.MPI_SUM).Wait() * comm.Iallreduce(x * x, mpi.MPI_SUM).Wait()


@mpi_test((2, 3))
def test_memory_of_a_start_that_fails_is_kept(comm: Communicator) -> None:
    """The comparison of the calls is in transit then."""
    with (
        mock.patch.object(comm.transport, "reduce", side_effect=MemoryError),
        pytest.raises(MemoryError),
    ):
        comm.Iallreduce(torch.ones(2), mpi.MPI_SUM)
    gc.collect()
    assert any(type(each) is Comparison and each.call.comm is comm for each in gc.get_objects())
    assert comm.Iallreduce(torch.ones(2), mpi.MPI_SUM).Wait().tolist() == [float(comm.size)] * 2
    mpi.reset()


FUNCTIONS: dict[str, Differentiable] = {
    "two at once": at_once,
    "two in turn": in_turn,
}


test_gradient, test_forward_mode, test_complex_gradient, test_second_derivative = derivative_tests(
    FUNCTIONS
)

"""The public face of torchrelay.mpi in one process, without mpirun."""

from __future__ import annotations

import pytest
import torch

from torchrelay import mpi
from torchrelay.compat import mpi4torch
from torchrelay.errors import ArgumentError
from torchrelay.telemetry import Collector, handling, listening


def test_everything_public_can_be_imported() -> None:
    for module in (mpi, mpi4torch):
        assert all(hasattr(module, name) for name in module.__all__)


def test_one_process_is_the_smallest_world() -> None:
    comm = mpi.COMM_WORLD
    x = torch.ones(3, requires_grad=True)
    y = comm.Allgather(comm.Allreduce(2 * x, mpi.MPI_SUM), 0)
    y.sum().backward()
    assert comm.size == 1 and x.grad is not None and x.grad.tolist() == [2.0] * 3


def test_gradcheck_needs_no_help_in_one_process() -> None:
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: mpi.COMM_WORLD.Allreduce(t, mpi.MPI_PROD), x)
    assert torch.autograd.gradgradcheck(lambda t: mpi.COMM_WORLD.Allreduce(t, mpi.MPI_PROD), x)


def test_mpi4torch_names_give_the_same_functions() -> None:
    x = torch.ones(3, requires_grad=True)
    comm = mpi4torch.COMM_WORLD
    handle = comm.Isend(x, 0, 0)
    res1 = comm.Recv(mpi4torch.JoinDummies(torch.empty(3), [handle.dummy]), 0, 0)
    res2 = comm.Wait(mpi4torch.JoinDummiesHandle(handle, [res1]))
    mpi4torch.JoinDummies(res1, [res2]).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0] * 3


def test_communications_are_reported_to_whoever_listens() -> None:
    collector = Collector()
    with handling(collector):
        mpi.COMM_WORLD.Allreduce(torch.ones(2, requires_grad=True), mpi.MPI_SUM).sum().backward()
    assert set(collector.seconds) == {"mpi.Allreduce"}
    assert not listening()


def test_errors_name_the_call() -> None:
    with pytest.raises(ArgumentError, match="axis 3"):
        mpi.COMM_WORLD.Allgather(torch.ones(2), 3)

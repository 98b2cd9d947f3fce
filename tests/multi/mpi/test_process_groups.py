"""Communicators of process groups beside what else uses the groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from grads import grad_of
from multi.mpi.runner import mpi_test
from torchrelay import mpi
from torchrelay.errors import ArgumentError
from torchrelay.mpi import Communicator, _library


def over_groups() -> bool:
    return _library.MPI is None


@mpi_test((2, 3), mpich=())
def test_subgroup_and_mesh_dimension(comm: Communicator) -> None:
    if not over_groups():
        return
    members = [0, comm.size - 1]
    group = dist.new_group(members)
    if comm.rank in members:
        with Communicator.from_group(group) as part:
            x = torch.full((2,), float(part.rank + 1), requires_grad=True)
            ((part.rank + 1) * part.Allreduce(x, mpi.MPI_SUM)).sum().backward()
            assert grad_of(x).tolist() == [3.0, 3.0]
    else:
        with pytest.raises(ArgumentError, match="not a process group"):
            Communicator.from_group(group)
    mesh = init_device_mesh("cpu", (comm.size, 1), mesh_dim_names=("rows", "columns"))
    rows, columns = (Communicator.from_group(mesh[name]) for name in ("rows", "columns"))
    assert (rows.size, columns.size) == (comm.size, 1)
    assert rows.Allgather(torch.tensor([comm.rank]), 0).tolist() == list(range(comm.size))


@mpi_test((2, 3), mpich=())
def test_a_single_element_of_any_stride(comm: Communicator) -> None:
    """torch calls it contiguous, but does not view it as bytes."""
    x = torch.arange(5.0).as_strided((1,), (5,), 2)
    assert comm.Bcast_(x if comm.rank == 0 else torch.zeros(5).as_strided((1,), (5,)), 0) == 2
    assert comm.Allgather(x, 0).tolist() == [2.0] * comm.size
    if comm.rank == 0:
        comm.Send(x, 1, 0)
    elif comm.rank == 1:
        assert comm.Recv(torch.zeros(1), 0, 0).item() == 2


@mpi_test((2, 3), mpich=())
def test_two_communicators_in_one_backward_pass(comm: Communicator) -> None:
    """A ring over one, a sum over the other; a rank without a loss takes part."""
    with comm.Dup() as other:
        x = torch.full((2,), float(comm.rank), requires_grad=True)
        above, below = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        shifted = other.Sendrecv(comm.Allreduce(x, mpi.MPI_SUM), above, below)
        mpi.backward(None if comm.rank == 0 else (comm.rank * shifted).sum())
        assert grad_of(x).tolist() == [float(sum(range(comm.size)))] * 2


@mpi_test((2, 3), mpich=())
def test_beside_ddp_with_autocast_over_the_same_group(comm: Communicator) -> None:
    if not over_groups():
        return
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2))
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(torch.full((4, 3), float(comm.rank + step)))
        mean = comm.Allreduce(y.float().mean(), mpi.MPI_SUM) / comm.size
        loss = comm.Allreduce((mean - comm.rank).square(), mpi.MPI_SUM)
        mpi.backward(loss)
        grads = [grad_of(p).reshape(-1) for p in model.parameters()]
        with torch.no_grad():
            every = comm.Allgather(torch.cat(grads).unsqueeze(0), 0)
        assert torch.equal(every, every[:1].expand_as(every)) and every.abs().sum() > 0
        model.zero_grad()

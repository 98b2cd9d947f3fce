"""Communications under torch.compile: one graph, the same order, the same gradients."""

from __future__ import annotations

import pytest
import torch

from multi.mpi_runner import mpi_test
from torchrelay import mpi


def program(comm, x, w):
    h = comm.Allreduce(x * w, mpi.MPI_SUM).sin()
    comm.Allreduce(h, mpi.MPI_SUM)  # ignored, and yet run backward on all ranks
    h = comm.Reduce_scatter_block(torch.cat([h] * comm.size), mpi.MPI_SUM)
    g = comm.Allgather(h, 0)
    return comm.Alltoall(g.view(comm.size, -1) * w.sum(), 1, 0, 1)


@mpi_test((1, 2, 3))
def test_compiled_program_has_the_eager_gradients(comm):
    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    for step in range(3):
        x = torch.arange(4.0, dtype=torch.float64) + comm.rank
        ours, theirs = (
            torch.full((4,), 2.0 + step, dtype=torch.float64, requires_grad=True) for _ in range(2)
        )
        wanted, got = program(comm, x, theirs), None
        (wanted * (comm.rank + 1)).sum().backward()
        got = compiled(comm, x, ours)
        (got * (comm.rank + 1)).sum().backward()
        assert torch.allclose(got, wanted) and torch.allclose(ours.grad, theirs.grad)


@mpi_test((2,))
def test_compiled_and_eager_communications_form_one_chain(comm):
    torch._dynamo.reset()
    double = torch.compile(lambda x: comm.Allreduce(2 * x, mpi.MPI_SUM), fullgraph=True, backend="aot_eager")
    x = torch.ones(3, requires_grad=True)
    y = comm.Allreduce(double(comm.Allreduce(x, mpi.MPI_SUM)), mpi.MPI_SUM)
    (y if comm.rank == 0 else y.detach() + 0 * y).sum().backward()
    assert x.grad.tolist() == [2.0 * comm.size**2] * 3


@pytest.mark.timeout(300)
@mpi_test((2,))
def test_inductor(comm):
    torch._dynamo.reset()
    function = torch.compile(lambda x: comm.Allreduce(x.sin(), mpi.MPI_SUM).cos(), fullgraph=True)
    x = torch.arange(4.0, requires_grad=True)
    function(x).sum().backward()
    assert torch.allclose(x.grad, -(comm.size * x.sin()).sin().detach() * comm.size * x.cos().detach())

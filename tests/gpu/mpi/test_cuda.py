"""Tensors of a CUDA device travel through host memory, and come back to their device, gradients
too.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grads import grad_of
from multi.mpi.runner import mpi_test
from torchrelay import mpi
from torchrelay.mpi import Communicator

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def leaf(value: float) -> Tensor:
    return torch.full((4,), float(value), device="cuda", requires_grad=True)


def on_device(*tensors: Tensor) -> bool:
    return all(t.is_cuda for t in tensors)


@mpi_test((1, 2))
def test_allreduce_and_its_backward(comm: Communicator) -> None:
    for op, wanted, slope in (
        (mpi.MPI_SUM, comm.size * (comm.size + 1) / 2, float(comm.size)),
        (mpi.MPI_MAX, float(comm.size), float(comm.size * (comm.rank == comm.size - 1))),
    ):
        x = leaf(comm.rank + 1)
        y = comm.Allreduce(x, op)
        y.sum().backward()
        assert on_device(y, grad_of(x))
        assert y.tolist() == [wanted] * 4 and grad_of(x).tolist() == [slope] * 4


@mpi_test((1, 2))
def test_ring_and_its_backward(comm: Communicator) -> None:
    x, memory = leaf(comm.rank + 1), torch.empty(4, device="cuda")
    receiving = comm.Irecv(memory, (comm.rank - 1) % comm.size)
    sending = comm.Isend(x, (comm.rank + 1) % comm.size)
    got = comm.Wait(receiving)
    comm.Wait(sending)
    (got * (comm.rank + 1)).sum().backward()
    assert on_device(got, grad_of(x))
    assert got.tolist() == [(comm.rank - 1) % comm.size + 1.0] * 4
    assert grad_of(x).tolist() == [(comm.rank + 1) % comm.size + 1.0] * 4


@mpi_test((1, 2))
def test_collectives_and_their_backward(comm: Communicator) -> None:
    n, r = comm.size, comm.rank
    for function, wanted in (
        (lambda x: comm.Allgather(x, 0), [s + 1.0 for s in range(n) for _ in range(4)]),
        (lambda x: comm.Bcast_(x * 1, n - 1), [float(n)] * 4),
        (lambda x: comm.Scatter(torch.cat([x] * n), 0, 4, 0), [1.0] * 4),
        (lambda x: comm.Iallreduce(x, mpi.MPI_SUM).Wait(), [n * (n + 1) / 2] * 4),
        (lambda x: comm.Sendrecv(x, (r + 1) % n, (r - 1) % n), [(r - 1) % n + 1.0] * 4),
    ):
        x = leaf(r + 1)
        y = function(x)
        mpi.backward(y.sum())
        assert on_device(y, grad_of(x)) and y.tolist() == wanted


@mpi_test((2,))
def test_values_are_there_before_they_are_sent(comm: Communicator) -> None:
    """What the device still computes when a function is called is what arrives."""
    x = torch.ones(1 << 20, device="cuda")
    with torch.no_grad():
        for _ in range(20):
            x = x * 2 - 1
        assert comm.Allreduce(x, mpi.MPI_SUM).eq(comm.size).all()

"""Transposed, strided, expanded, conjugated and empty tensors are sent as what they show."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from multi.mpi.reference import (
    SIZES,
    check,
    copy,
    inputs,
)
from multi.mpi.runner import mpi_test
from torchrelay import mpi
from torchrelay.mpi import Communicator
from torchrelay.mpi._settings import changed

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[::2, 1::2],
    "expanded": lambda x: x[:1].expand(3, 6),
    "conjugated": lambda x: x.conj(),
    "imaginary": lambda x: x.conj().imag,
    "empty": lambda x: x[:0],
}


def check_view(
    comm: Communicator,
    name: str,
    function: Callable[[Tensor], Tensor],
    model: Callable[[list[Tensor]], list[Tensor]],
) -> None:
    view = VIEWS[name]
    check(
        lambda x: function(view(x)),
        lambda xs: model([view(x) for x in xs]),
        inputs([(4, 6)] * comm.size, torch.complex128),
        comm.rank,
    )


@mpi_test(SIZES, name=VIEWS)
def test_allreduce(comm: Communicator, name: str) -> None:
    check_view(
        comm,
        name,
        lambda x: comm.Allreduce(x, mpi.MPI_SUM),
        lambda xs: [torch.stack(xs).sum(0)] * comm.size,
    )


@mpi_test(SIZES, name=VIEWS)
def test_allgather(comm: Communicator, name: str) -> None:
    check_view(
        comm, name, lambda x: comm.Allgather(x, 1), lambda xs: [torch.cat(xs, 1)] * comm.size
    )


@mpi_test(SIZES, name=VIEWS)
def test_bcast(comm: Communicator, name: str) -> None:
    check_view(
        comm,
        name,
        lambda x: comm.Bcast_(x.clone(memory_format=torch.preserve_format), 0),
        lambda xs: [copy(xs[0])] * comm.size,
    )


@mpi_test(SIZES)
def test_results_lie_where_the_tensors_do(comm: Communicator) -> None:
    """Whatever torch's default device is."""
    n, above, below = comm.size, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x = torch.full((n, 2), comm.rank + 1.0, requires_grad=True)

    def ring(x: Tensor) -> Tensor:
        receiving, sending = comm.Irecv(torch.empty_like(x), below), comm.Isend(x, above)
        y = comm.Wait(receiving)
        comm.Wait(sending)
        sending = comm.Isend(y, above)
        z = comm.Recv(torch.empty_like(x), below)
        comm.Wait(sending)
        return z + comm.Sendrecv(x, mpi.MPI_PROC_NULL, mpi.MPI_PROC_NULL)

    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "Allreduce": lambda x: comm.Allreduce(x, mpi.MPI_SUM),
        "Allreduce MAX": lambda x: comm.Allreduce(x, mpi.MPI_MAX),
        "Allgather": lambda x: comm.Allgather(x, 1),
        "Scatter": lambda x: comm.Scatter(x, 0, 1, 0),
        "Alltoall": lambda x: comm.Alltoall(x, 1, 0, 1),
        "Alltoallv": lambda x: comm.Alltoallv(x, [1] * n),
        "Reduce_scatter": lambda x: comm.Reduce_scatter_block(x, mpi.MPI_SUM),
        "Scan": lambda x: comm.Scan(x, mpi.MPI_SUM),
        "Iallreduce": lambda x: comm.Iallreduce(x, mpi.MPI_SUM).Wait(),
        "ring": ring,
    }
    for debug in (False, True):
        with changed(debug=debug):
            for name, function in functions.items():
                wanted = function(x)
                (wanted_grad,) = mpi.grad(wanted.sum(), x)
                with torch.device("meta"):
                    y = function(x)
                    (grad,) = mpi.grad(y.sum(), x)
                    if name != "ring" and not debug:
                        y, tangent = torch.func.jvp(function, (x.detach(),), (x.detach(),))[:2]
                        assert torch.equal(tangent, wanted), name
                assert torch.equal(y, wanted) and torch.equal(grad, wanted_grad), name

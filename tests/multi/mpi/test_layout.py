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

"""Scan and Exscan."""

# ruff: noqa: B023 - functions made in a loop are called in the same round of it
from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from multi.mpi.reference import (
    COMPLEX,
    DERIVATIVE_SIZES,
    FLOATS,
    REDUCTIONS,
    SIZES,
    Differentiable,
    check,
    check_arguments,
    check_transforms,
    derivative_tests,
    inputs,
    ops_of,
)
from multi.mpi.runner import THREADS, mpi_test
from torchrelay import mpi
from torchrelay.mpi import Communicator
from torchrelay.mpi._settings import changed

DTYPES = (torch.int64, *FLOATS, *COMPLEX)


@mpi_test(SIZES, dtype=DTYPES)
def test_values(comm: Communicator, dtype: torch.dtype) -> None:
    given = inputs([(3, 2)] * comm.size, dtype)
    for op in ops_of(dtype):
        check(
            lambda x: comm.Scan(x, op),
            lambda xs: [REDUCTIONS[op](torch.stack(xs[: r + 1])) for r in range(comm.size)],
            given,
            comm.rank,
        )


@mpi_test(SIZES, dtype=DTYPES)
def test_exclusive_values(comm: Communicator, dtype: torch.dtype) -> None:
    given = inputs([(3, 2)] * comm.size, dtype)
    for op in ops_of(dtype):
        check(
            lambda x: comm.Exscan(x, op),
            lambda xs: [
                REDUCTIONS[op](torch.stack(xs[:r])) if r else torch.zeros_like(xs[0])
                for r in range(comm.size)
            ],
            given,
            comm.rank,
        )


@mpi_test(SIZES)
def test_large_counts_go_in_pieces(comm: Communicator) -> None:
    with changed(max_count=3):
        check(
            lambda x: comm.Scan(x, mpi.MPI_SUM),
            lambda xs: [torch.stack(xs[: r + 1]).sum(0) for r in range(comm.size)],
            inputs([(5, 4)] * comm.size, torch.float64),
            comm.rank,
        )


FUNCTIONS: dict[str, Differentiable] = {
    "Scan": lambda comm, x: comm.Scan(x * x, mpi.MPI_SUM),
    "Exscan": lambda comm, x: comm.Exscan(x * x, mpi.MPI_SUM),
    "Scan PROD": lambda comm, x: comm.Scan(x, mpi.MPI_PROD),
    "Exscan MAX": lambda comm, x: comm.Exscan(x * x, mpi.MPI_MAX),
}


test_gradient, test_forward_mode, test_complex_gradient, test_second_derivative = derivative_tests(
    FUNCTIONS
)


@mpi_test(DERIVATIVE_SIZES, on=THREADS, name=("Scan",))
def test_func_grad_jvp_vmap(comm: Communicator, name: str) -> None:
    check_transforms(comm, FUNCTIONS[name])


def product_scans(comm: Communicator) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Both, as functions of a tensor whose result is one loss, which all ranks hold."""
    weight = comm.rank + 1.5

    def loss(scanned: Tensor) -> Tensor:
        return comm.Allreduce((scanned * scanned).sum() * weight, mpi.MPI_SUM)

    yield "Scan", lambda x: loss(comm.Scan(x, mpi.MPI_PROD))
    yield "Exscan", lambda x: loss(comm.Exscan(x, mpi.MPI_PROD))


@mpi_test((2,), on=THREADS)
def test_second_derivatives_of_scans_of_products(comm: Communicator) -> None:
    """Against the Hessian that one process computes of all ranks' tensors."""
    n, r = comm.size, comm.rank
    every = torch.stack(inputs([(2, 2)] * n, torch.float64))
    along = torch.stack(inputs([(2, 2)] * n, torch.float64, 1))

    def whole(exclusive: bool, every: Tensor) -> Tensor:
        products = [
            every[: rank + 1 - exclusive].prod(0).square().sum() for rank in range(exclusive, n)
        ]
        weights = torch.arange(exclusive, n, dtype=torch.float64) + 1.5
        return (weights * torch.stack(products)).sum()

    for convention, copies in (("replicated", 1), ("sum", n)):
        chosen = comm.replace(convention=convention)
        for name, function in product_scans(chosen):
            leaf = every.clone().requires_grad_()
            (g,) = torch.autograd.grad(copies * whole("x" in name, leaf), leaf, create_graph=True)
            (wanted,) = torch.autograd.grad((g * along).sum(), leaf)
            x = every[r].clone().requires_grad_()
            with mpi.chain():
                (mine,) = mpi.grad(function(x), x, create_graph=True)
                assert torch.allclose(mine, g[r]), (convention, name)
                slope = (mine * along[r]).sum()
                if convention == "replicated":
                    slope = chosen.Allreduce(slope, mpi.MPI_SUM)
                (found,) = mpi.grad(slope, x)
            assert torch.allclose(found, wanted[r]), (convention, name, found, wanted[r])


@mpi_test()
def test_wrong_arguments(comm: Communicator) -> None:
    x = torch.ones(2, 2)
    check_arguments(
        lambda: comm.Scan(x, mpi.MPI_BAND),
        lambda: comm.Scan(x.to(torch.complex64), mpi.MPI_MIN),
        lambda: comm.Exscan(x.to(torch.complex64), mpi.MPI_MIN),
    )

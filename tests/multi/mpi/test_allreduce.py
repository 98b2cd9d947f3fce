"""Allreduce and Iallreduce."""

# ruff: noqa: B023 - functions made in a loop are called in the same round of it
from __future__ import annotations

from unittest import mock

import torch
from torch.autograd import forward_ad, gradcheck

from multi.mpi.reference import (
    ALL_DTYPES,
    DERIVATIVE_SIZES,
    INTEGERS,
    REDUCTIONS,
    SIZES,
    Differentiable,
    as_one_process,
    check,
    check_arguments,
    check_second_order,
    check_transforms,
    close,
    derivative_tests,
    inputs,
    ops_of,
)
from multi.mpi.runner import REAL, THREADS, mpi_test
from torchrelay import mpi
from torchrelay.mpi import Communicator
from torchrelay.mpi._settings import changed


@mpi_test(SIZES, dtype=ALL_DTYPES)
def test_values(comm: Communicator, dtype: torch.dtype) -> None:
    given = inputs([(3, 2)] * comm.size, dtype)
    for op in ops_of(dtype):
        check(
            lambda x: comm.Allreduce(x, op),
            lambda xs: [REDUCTIONS[op](torch.stack(xs))] * comm.size,
            given,
            comm.rank,
        )


@mpi_test(SIZES)
def test_up_to_1_kib_travels_with_the_check(comm: Communicator) -> None:
    transport = comm.transport
    with mock.patch.object(transport, "reduce", side_effect=transport.reduce) as moved:
        for count in (1, 31, 32, 128, 129, 5000, 20000):
            x = torch.arange(count, dtype=torch.float64)
            assert torch.equal(
                comm.Allreduce(x + comm.rank, mpi.MPI_SUM), x * comm.size + sum(range(comm.size))
            )
    if comm.size > 1:
        assert [len(each.args[0]) for each in moved.mock_calls] == [129, 5000, 20000]


@mpi_test(SIZES, op=(mpi.MPI_MAX, mpi.MPI_MIN, mpi.MPI_PROD))
def test_ties_and_zeros(comm: Communicator, op: mpi.Op) -> None:
    check(
        lambda x: comm.Allreduce(x, op),
        lambda xs: [REDUCTIONS[op](torch.stack(xs))] * comm.size,
        [x.round() for x in inputs([(4, 5)] * comm.size, torch.float64)],
        comm.rank,
    )


@mpi_test(SIZES, dtype=(*INTEGERS, torch.bool))
def test_logical_and_bitwise(comm: Communicator, dtype: torch.dtype) -> None:
    stacked = torch.stack(inputs([(5,)] * comm.size, dtype))
    bits = stacked.to(torch.int64)
    wanted = {
        mpi.MPI_LAND: (stacked != 0).all(0),
        mpi.MPI_LOR: (stacked != 0).any(0),
        mpi.MPI_LXOR: (stacked != 0).sum(0) % 2,
        mpi.MPI_BAND: bits[0],
        mpi.MPI_BOR: bits[0],
        mpi.MPI_BXOR: bits[0],
    }
    for row in bits[1:]:
        wanted[mpi.MPI_BAND] = wanted[mpi.MPI_BAND] & row
        wanted[mpi.MPI_BOR] = wanted[mpi.MPI_BOR] | row
        wanted[mpi.MPI_BXOR] = wanted[mpi.MPI_BXOR] ^ row
    for op, result in wanted.items():
        close(comm.Allreduce(stacked[comm.rank], op), result.to(dtype))


@mpi_test(SIZES)
def test_logical_and_of_floats(comm: Communicator) -> None:
    floats = torch.tensor([0.0, 1.0, float(comm.rank)])
    assert comm.Allreduce(floats, mpi.MPI_LAND).tolist() == [0.0, 1.0, 0.0]


@mpi_test(SIZES)
def test_maxloc_and_minloc(comm: Communicator) -> None:
    stacked = torch.stack(inputs([(6,)] * comm.size, torch.float64)).round()
    for op, best in ((mpi.MPI_MAXLOC, stacked.amax(0)), (mpi.MPI_MINLOC, stacked.amin(0))):
        values, ranks = comm.Allreduce(stacked[comm.rank], op)
        assert torch.equal(values, best)
        assert torch.equal(ranks, (stacked == best).int().argmax(0))


@mpi_test(SIZES)
def test_large_counts_go_in_pieces(comm: Communicator) -> None:
    with changed(max_count=3):
        check(
            lambda x: comm.Allreduce(x, mpi.MPI_SUM),
            lambda xs: [torch.stack(xs).sum(0)] * comm.size,
            inputs([(5, 8)] * comm.size, torch.float64),
            comm.rank,
        )


FUNCTIONS: dict[str, Differentiable] = {
    "Allreduce": lambda comm, x: comm.Allreduce(x * x, mpi.MPI_SUM),
    "Allreduce MAX": lambda comm, x: comm.Allreduce(x * x, mpi.MPI_MAX),
    "Allreduce MIN": lambda comm, x: comm.Allreduce(x * x, mpi.MPI_MIN),
    "Allreduce PROD": lambda comm, x: comm.Allreduce(x, mpi.MPI_PROD),
    "Allreduce MAXLOC": lambda comm, x: comm.Allreduce(x * x, mpi.MPI_MAXLOC).values,
    "Iallreduce": lambda comm, x: comm.Iallreduce(x * x, mpi.MPI_SUM).Wait(),
    "Iallreduce MAX": lambda comm, x: comm.Iallreduce(x * x, mpi.MPI_MAX).Wait(),
    "Iallreduce PROD": lambda comm, x: comm.Iallreduce(x, mpi.MPI_PROD).Wait(),
}


test_gradient, test_forward_mode, test_complex_gradient, test_second_derivative = derivative_tests(
    FUNCTIONS
)


@mpi_test(
    DERIVATIVE_SIZES,
    on=(*REAL, *THREADS),
    name=(
        "Allreduce",
        "Allreduce MAX",
        "Allreduce PROD",
    ),
)
def test_func_grad_jvp_vmap(comm: Communicator, name: str) -> None:
    check_transforms(comm, FUNCTIONS[name])


@mpi_test(DERIVATIVE_SIZES, on=THREADS)
def test_product_at_zeros_has_derivatives_of_both_orders(comm: Communicator) -> None:
    every = torch.stack(inputs([(2, 3)] * comm.size, torch.float64)).round().requires_grad_()
    function = as_one_process(lambda x: comm.Allreduce(x, mpi.MPI_PROD), comm)
    assert gradcheck(function, every)
    check_second_order(function, every)


@mpi_test(DERIVATIVE_SIZES)
def test_forward_mode_needs_a_tangent_on_one_rank_only(comm: Communicator) -> None:
    x = torch.ones(2, dtype=torch.float64)
    with torch.no_grad(), forward_ad.dual_level():
        y = comm.Allreduce(forward_ad.make_dual(x, x) if comm.rank == 0 else x, mpi.MPI_SUM)
        assert forward_ad.unpack_dual(y).tangent.tolist() == [1.0, 1.0]


@mpi_test()
def test_wrong_arguments(comm: Communicator) -> None:
    x = torch.ones(2, 2)
    check_arguments(
        lambda: comm.Allreduce(x, mpi.MPI_BAND),
        lambda: comm.Allreduce(x.to(torch.complex64), mpi.MPI_MAX),
        lambda: comm.Iallreduce(x.to(torch.complex64), mpi.MPI_MAX),
        lambda: comm.Allreduce(x.to_sparse(), mpi.MPI_SUM),
    )

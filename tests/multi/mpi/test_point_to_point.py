"""Send, Recv, Sendrecv, Isend, Irecv, Send_init and Recv_init."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from grads import grad_of
from multi.mpi.reference import (
    DERIVATIVE_SIZES,
    Differentiable,
    check_arguments,
    check_transforms,
    derivative_tests,
)
from multi.mpi.runner import THREADS, mpi_test
from torchrelay import mpi
from torchrelay.errors import ArgumentError
from torchrelay.mpi import Communicator


@mpi_test((1, 2, 3))
def test_border_without_a_neighbour(comm: Communicator) -> None:
    """MPI_PROC_NULL, the usual way to write the ends of a line of ranks, in both directions of
    autograd.
    """
    above = comm.rank + 1 if comm.rank + 1 < comm.size else mpi.MPI_PROC_NULL
    below = comm.rank - 1 if comm.rank else mpi.MPI_PROC_NULL
    has_above, has_below = float(above >= 0), float(below >= 0)
    x = torch.full((3,), comm.rank + 1.0, requires_grad=True)
    y = comm.Sendrecv(x, above, below)
    assert y.tolist() == [comm.rank * has_below] * 3
    z = comm.Recv(torch.zeros(3), below, mpi.MPI_ANY_TAG) if comm.rank % 2 else None
    handle = comm.Isend(x, above)
    if z is None:
        z = comm.Recv(torch.zeros(3), below, mpi.MPI_ANY_TAG)
    comm.Wait(handle)
    got = comm.Irecv(torch.zeros(3), below)
    sent = comm.Isend(x, above)
    w = comm.Wait(got)
    comm.Wait(sent)
    (y + 2 * z + 3 * w).sum().backward()
    assert grad_of(x).tolist() == [6.0 * has_above] * 3


@mpi_test((1, 2, 3))
def test_sendrecv_receives_what_like_says(comm: Communicator) -> None:
    above, below = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x = torch.full(
        (2, 3), comm.rank + 1.0, dtype=torch.float64 if comm.rank == 0 else torch.float32
    )
    like = torch.empty(2, 3, dtype=torch.float64 if below == 0 else torch.float32)
    x.requires_grad_()
    y = comm.Sendrecv(x, above, below, like=like)
    assert y.dtype is like.dtype and y.tolist() == [[below + 1.0] * 3] * 2
    (y * (comm.rank + 1)).sum().backward()
    assert grad_of(x).dtype is x.dtype and grad_of(x).tolist() == [[above + 1.0] * 3] * 2
    with pytest.raises(ArgumentError, match="like"):
        comm.Sendrecv(x, above, below, like=torch.empty(2, dtype=torch.int64))
    mpi.reset()


@mpi_test((1, 2, 3))
def test_what_a_graph_needs_must_not_be_received_into(comm: Communicator) -> None:
    """Also where the receive is not recorded."""
    above, below = neighbors(comm)
    for dtype, is_recorded in ((torch.float32, False), (torch.int64, False), (torch.int64, True)):
        for receive in (
            lambda x: comm.Recv(x, below),
            lambda x: comm.Wait(comm.Irecv(x, below)),
        ):
            w, x = torch.ones(3, requires_grad=True), torch.ones(3, dtype=dtype)
            y = (w * x).sum()
            with torch.set_grad_enabled(is_recorded):
                handle = comm.Isend(2 * x, above)
                receive(x)
                comm.Wait(handle)
            assert x.tolist() == [2.0] * 3
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward()


@mpi_test((2, 3))
def test_cotangent_in_transit_is_kept_if_the_backward_pass_fails(comm: Communicator) -> None:
    x = torch.ones(1 << 17, requires_grad=True)  # more than MPI sends at once
    if comm.rank == 0:
        comm.Send(x, 1)
    elif comm.rank == 1:
        fails = x * 2
        fails.register_hook(lambda _: 1 / 0)
        y = comm.Recv(torch.zeros(x.shape), 0)
        with pytest.raises(ZeroDivisionError):
            (fails + 3 * y).sum().backward()
        reused = [torch.full(x.shape, 9.0) for _ in range(8)]
    comm.Barrier()
    if comm.rank == 0:
        mpi.backward()
        assert (grad_of(x) == 3).all()
    comm.Barrier()
    mpi.reset()
    assert comm.rank != 1 or reused


@mpi_test((2, 3))
def test_refused_sendrecv_receives_nothing(comm: Communicator) -> None:
    above, below = neighbors(comm)
    x = torch.full((2,), float(comm.rank))
    with pytest.raises(ArgumentError, match="pass a dense one"):
        comm.Sendrecv(x.to_sparse(), above, below)
    handle = comm.Isend(x, above)
    assert comm.Recv(torch.empty(2), below).tolist() == [float(below)] * 2
    comm.Wait(handle)
    mpi.reset()


@mpi_test((2, 3))
def test_forward_mode_inside_of_reverse_mode_answers_both_messages(comm: Communicator) -> None:
    above, below = neighbors(comm)
    x, t = (torch.full((2,), comm.rank + 1.0, requires_grad=True) for _ in range(2))
    with forward_ad.dual_level():
        handle = comm.Isend(forward_ad.make_dual(x, t), above)
        y = comm.Recv(torch.empty(2), below, mpi.MPI_ANY_TAG)
        comm.Wait(handle)
        value, tangent = forward_ad.unpack_dual(y)
    assert tangent is not None
    (2 * value + 3 * tangent).sum().backward()
    assert (grad_of(x).tolist(), grad_of(t).tolist()) == ([2.0] * 2, [3.0] * 2)


def neighbors(comm: Communicator) -> tuple[int, int]:
    """The next and the previous rank of a ring."""
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def sendrecv(comm: Communicator, x: Tensor) -> Tensor:
    above, below = neighbors(comm)
    return comm.Sendrecv(x * x, above, below)


def ring(comm: Communicator, x: Tensor) -> Tensor:
    above, below = neighbors(comm)
    handle = comm.Isend(x * x, above, 3)
    got = comm.Recv(torch.empty_like(x), below, 3)
    comm.Wait(handle)
    return got


def irecv(comm: Communicator, x: Tensor) -> Tensor:
    above, below = neighbors(comm)
    got, sent = comm.Irecv(torch.empty_like(x), below), comm.Isend(x * x, above)
    return comm.Wait(got) + 0 * comm.Wait(sent)


FUNCTIONS: dict[str, Differentiable] = {
    "Sendrecv": sendrecv,
    "Isend and Recv": ring,
    "Irecv": irecv,
}


test_gradient, test_forward_mode, test_complex_gradient, test_second_derivative = derivative_tests(
    FUNCTIONS
)


@mpi_test(DERIVATIVE_SIZES, on=THREADS, name=("Sendrecv",))
def test_func_grad_jvp_vmap(comm: Communicator, name: str) -> None:
    check_transforms(comm, FUNCTIONS[name])


@mpi_test()
def test_wrong_arguments(comm: Communicator) -> None:
    x = torch.ones(2, 2)
    check_arguments(lambda: comm.Send(x, comm.size), lambda: comm.Recv(x, comm.size))

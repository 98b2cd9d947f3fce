"""Halo_exchange."""

from __future__ import annotations

import functools

import torch

from multi.mpi.reference import (
    Differentiable,
    check_arguments,
    derivative_tests,
)
from multi.mpi.runner import mpi_test
from torchrelay import mpi
from torchrelay.mpi import Communicator
from torchrelay.mpi._settings import changed


@functools.cache
def grid(comm: Communicator, periodic: bool) -> mpi.CartCommunicator:
    cart = comm.Cart([comm.size], [periodic])
    assert cart is not None
    return cart


@mpi_test((1, 2, 3))
def test_values(comm: Communicator) -> None:
    """Corners too."""
    dims = {1: (1, 1), 2: (2, 1), 3: (1, 3)}[comm.size]
    cart = comm.Cart(dims, [True, False])
    assert cart is not None
    whole = torch.arange(36.0).view(6, 6)
    rows, columns = 6 // dims[0], 6 // dims[1]
    top, left = cart.coords[0] * rows, cart.coords[1] * columns
    padded = torch.cat([whole[-1:], whole, whole[:1]])
    padded = torch.nn.functional.pad(padded, (1, 1))
    ours = cart.Halo_exchange(whole[top : top + rows, left : left + columns])
    assert torch.equal(ours, padded[top : top + rows + 2, left : left + columns + 2])


@mpi_test((1, 2, 3))
def test_debug_mode_takes_no_halo_for_a_message(comm: Communicator) -> None:
    cart = grid(comm, True)
    below, above = cart.neighbors[0]
    with changed(debug=True, timeout_s=60.0), torch.no_grad():
        receiving = cart.Irecv(torch.empty(5), below)
        cart.Halo_exchange(torch.ones(3, 2))
        sending = cart.Isend(torch.ones(5), above)
        assert cart.Wait(receiving).tolist() == [1.0] * 5
        cart.Wait(sending)


FUNCTIONS: dict[str, Differentiable] = {
    "Halo_exchange": lambda comm, x: grid(comm, True).Halo_exchange(x * x, [(1, 2)], axes=[1]),
    "Halo_exchange at a border": lambda comm, x: grid(comm, False).Halo_exchange(x * x, 1),
}


test_gradient, test_forward_mode, test_complex_gradient, test_second_derivative = derivative_tests(
    FUNCTIONS
)


@mpi_test()
def test_wrong_arguments(comm: Communicator) -> None:
    x = torch.ones(2, 2)
    check_arguments(
        lambda: grid(comm, True).Halo_exchange(x, 3),
        lambda: grid(comm, True).Halo_exchange(x, [1, 1]),
    )

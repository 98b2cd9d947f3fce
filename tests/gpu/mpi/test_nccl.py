"""Communicators of groups that have NCCL: tensors of a CUDA device stay there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from grads import grad_of
from torchrelay import mpi
from torchrelay.errors import ArgumentError, MismatchError
from torchrelay.mpi import Communicator
from torchrelay.world import World

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
if not (DEVICES and dist.is_nccl_available()):
    pytestmark = pytest.mark.skip("needs a CUDA device and NCCL")


def ranks(size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for tests on so many ranks, each of which needs a device."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        skip = pytest.mark.skipif(size > DEVICES, reason=f"needs {size} CUDA devices")
        marked: Callable[..., None] = skip(pytest.mark.processes(size)(body))
        return marked

    return decorate


def connected(world: World) -> Communicator:
    torch.cuda.set_device(world.rank % DEVICES)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=world.connect(), rank=world.rank, world_size=world.size
    )
    group = dist.group.WORLD
    assert group is not None
    return Communicator.from_group(group)


def check_collectives(comm: Communicator) -> None:
    """Values and gradients, whose cotangents differ between ranks, against the same on the CPU."""
    n, r = comm.size, comm.rank
    functions: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: comm.Allreduce(x, mpi.MPI_SUM),
        lambda x: comm.Allreduce(x, mpi.MPI_MAX),
        lambda x: comm.Allreduce(x + 2, mpi.MPI_PROD),
        lambda x: comm.Allgather(x[: r + 1], 0),
        lambda x: comm.Bcast_(x * 1, n - 1),
        lambda x: comm.Reduce_(x * 1, mpi.MPI_SUM, 0),
        lambda x: comm.Gather(x, 0, n - 1),
        lambda x: comm.Scatter(torch.cat([x] * n), 0, 4, 0),
        lambda x: comm.Alltoall(torch.cat([x] * n).view(n, 4), 1, 0, 1),
        lambda x: comm.Reduce_scatter_block(torch.cat([x] * n), mpi.MPI_SUM),
        lambda x: comm.Scan(x, mpi.MPI_SUM),
        lambda x: comm.Iallreduce(x, mpi.MPI_SUM).Wait(),
        lambda x: comm.Sendrecv(x, (r + 1) % n, (r - 1) % n),
    )
    for index, function in enumerate(functions):
        found = []
        for device in ("cpu", "cuda"):
            x = (torch.arange(4.0, dtype=torch.float64) + r).to(device).requires_grad_()
            y = function(x)
            mpi.backward((y * (r + 1)).sum())
            assert y.device.type == grad_of(x).device.type == device, index
            found.append((y.detach().cpu(), grad_of(x).cpu()))
        for here, there in zip(*found, strict=True):
            torch.testing.assert_close(here, there, msg=f"function {index}")


@ranks(1)
def test_one_rank(world: World) -> None:
    check_collectives(connected(world))


@ranks(2)
def test_two_ranks(world: World) -> None:
    check_collectives(connected(world))


@ranks(1)
def test_what_nccl_cannot_reduce_is_composed_or_refused(world: World) -> None:
    comm = connected(world)
    for dtype, op in (
        (torch.int16, mpi.MPI_SUM),
        (torch.int32, mpi.MPI_BXOR),
        (torch.bool, mpi.MPI_LOR),
        (torch.complex64, mpi.MPI_SUM),
        (torch.complex64, mpi.MPI_PROD),
    ):
        x = torch.ones(100, dtype=dtype, device="cuda")
        y = comm.Allreduce(x, op)
        assert y.is_cuda and torch.equal(y, x), (dtype, op)
    with pytest.raises(ArgumentError, match="MAX is not defined"):
        comm.Allreduce(torch.ones(100, dtype=torch.complex64, device="cuda"), mpi.MPI_MAX)


@ranks(1)
def test_values_are_there_before_they_are_sent(world: World) -> None:
    """What the device still computes when a function is called is what arrives."""
    comm = connected(world)
    x = torch.ones(1 << 20, device="cuda")
    with torch.no_grad():
        for _ in range(20):
            x = x * 2 - 1
        assert comm.Allreduce(x, mpi.MPI_SUM).eq(comm.size).all()


@pytest.mark.processes(2)
def test_tensors_of_different_devices_are_refused(world: World) -> None:
    """Before NCCL connects, so one device suffices."""
    comm = connected(world)
    x = torch.ones(1000, device="cuda" if comm.rank else "cpu")
    for call in (
        lambda: comm.Scatter(x, 0, 500, 0),
        lambda: comm.Allreduce(x, mpi.MPI_SUM),
        lambda: comm.Allgather(x, 0),
    ):
        with torch.no_grad(), pytest.raises(MismatchError, match="on cuda"):
            call()
    assert comm.Allreduce(x[:3], mpi.MPI_SUM).tolist() == [2.0] * 3  # in the header

"""Ranks as threads: what they pass arrives, and a deadlock is found and named at once."""

from __future__ import annotations

import torch

from multi.mpi.thread_transport import run_ranks
from torchrelay import mpi
from torchrelay.errors import OperationTimeoutError, PeerLostError
from torchrelay.mpi import Communicator


def test_threads_are_ranks() -> None:
    def ring(comm: Communicator) -> list[list[float]]:
        x = torch.full((2,), comm.rank + 1.0, requires_grad=True)
        y = comm.Allreduce(x * x, mpi.MPI_PROD)
        sent = comm.Isend(y * x, (comm.rank + 1) % comm.size)
        z = comm.Recv(torch.empty(2), (comm.rank - 1) % comm.size)
        sent.Wait()
        mpi.backward((z * (comm.rank + 1)).sum())
        assert x.grad is not None
        return [y.tolist(), z.tolist(), x.grad.tolist()]

    for rank, (y, z, grad) in enumerate(run_ranks(3, ring)):
        assert y == [36.0] * 2 and z == [36.0 * ((rank - 1) % 3 + 1)] * 2
        total = sum((r + 1) * ((r - 1) % 3 + 1) for r in range(3))
        assert grad == [total * 72 / (rank + 1) + 36 * ((rank + 1) % 3 + 1)] * 2


def test_a_deadlock_is_found_and_named() -> None:
    def program(comm: Communicator) -> None:
        part = comm.Split(comm.rank % 2, comm.rank)
        assert part is not None
        if comm.rank == 2:
            comm.Recv(torch.empty(3), 1)
        else:
            part.Allreduce(torch.ones(3), mpi.MPI_SUM)

    errors = run_ranks(3, program)
    assert errors[1] is None
    assert all(isinstance(errors[r], (OperationTimeoutError, PeerLostError)) for r in (0, 2))
    assert "waiting in Recv(rank 1, tag 0) on COMM_WORLD" in f"{errors[0]} {errors[2]}"

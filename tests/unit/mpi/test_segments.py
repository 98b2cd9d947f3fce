"""Checkpointed segments that communicate what autograd does not record.

Local operations then decide which ranks recompute them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from multi.mpi.thread_transport import run_ranks
from multi.mpi.threads import prepare_threads
from torchrelay import mpi
from torchrelay.mpi import Communicator
from torchrelay.mpi._settings import changed


def integers(comm: Communicator, x: Tensor) -> Tensor:
    return comm.Allreduce(ONE, mpi.MPI_SUM)


def no_grad(comm: Communicator, x: Tensor) -> Tensor:
    with torch.no_grad():
        return comm.Allreduce(x, mpi.MPI_SUM)


def overwritten(comm: Communicator, x: Tensor) -> Tensor:
    return comm.Bcast_(ONE + comm.rank, 0)


def started(comm: Communicator, x: Tensor) -> Tensor:
    return comm.Iallreduce(ONE, mpi.MPI_SUM).Wait()


def messages(comm: Communicator, x: Tensor) -> Tensor:
    sent = comm.Isend(ONE, (comm.rank + 1) % comm.size)
    received = comm.Irecv(torch.zeros_like(ONE), (comm.rank - 1) % comm.size)
    sent.Wait()
    return received.Wait()


def exchange(comm: Communicator, x: Tensor) -> Tensor:
    return comm.Sendrecv(ONE, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)


def communicators(comm: Communicator, x: Tensor) -> Tensor:
    comm.Barrier()
    part = comm.Dup().Split(0, comm.rank)
    assert part is not None
    return part.Allreduce(ONE, mpi.MPI_SUM)


ONE = torch.ones(1).long()
CALLS = (integers, no_grad, overwritten, started, messages, exchange, communicators)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_what_is_not_recorded_is_not_called_again(call: object, debug: bool) -> None:
    def program(comm: Communicator) -> list[tuple[float, list[Tensor]]]:
        counts: list[Tensor] = []

        def segment(x: Tensor) -> Tensor:
            counts.append(call(comm, x).clone())  # type: ignore[operator]
            return (x + counts[-1]).sin() if comm.rank == 0 else x + counts[-1]

        def nested(x: Tensor) -> Tensor:
            return checkpoint(segment, x, use_reentrant=False)

        found = []
        for function in (segment, nested):
            x = torch.ones(1, requires_grad=True)
            checkpoint(function, x, use_reentrant=False).sum().backward()
            assert x.grad is not None
            found.append((x.grad.item(), [*counts]))
            counts.clear()
        return found

    prepare_threads()
    with changed(debug=debug):
        for rank, found in enumerate(run_ranks(3, program)):
            for (gradient, counts), times in zip(found, (2, 3), strict=True):
                assert len(counts) == (1 if rank else times)
                assert all(torch.equal(each, counts[0]) for each in counts)
                assert gradient == pytest.approx(1.0 if rank else (1 + counts[0]).cos().item())

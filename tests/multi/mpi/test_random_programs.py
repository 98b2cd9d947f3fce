"""Random programs end, and agree with all ranks run in one process."""

from __future__ import annotations

import random

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from grads import grad_of
from multi.mpi.reference import inputs
from multi.mpi.runner import mpi_test
from torchrelay import mpi
from torchrelay.mpi import Communicator

# Random programs: every rank draws the same one, and the reference runs all ranks in one process.

Program = list[tuple[str, int]]  # steps, and what varies them
STEPS = (
    "allreduce",
    "shift",
    "bcast",
    "allgather",
    "scatter",
    "local",
    "isend",
    "max",
    "scan",
    "iallreduce",
)


def distributed(comm: Communicator, program: Program, x: Tensor) -> Tensor:
    n, r = comm.size, comm.rank
    pending = []
    for step, k in program:
        if step == "allreduce":
            x = comm.Allreduce(x, mpi.MPI_SUM)
        elif step == "max":
            x = comm.Allreduce(x, mpi.MPI_MAX)
        elif step == "scan":
            x = comm.Scan(x, mpi.MPI_SUM)
        elif step == "shift":
            x = comm.Sendrecv(x, (r + k) % n, (r - k) % n)
        elif step == "bcast":
            x = comm.Bcast_(x * 1, k % n) + x
        elif step == "allgather":
            x = comm.Allgather(x, 0).view(n, -1).cos().sum(0)
        elif step == "scatter":
            x = x + comm.Scatter(torch.cat([x] * n), 0, len(x), k % n)
        elif step == "local":
            x = (x * (r + 1)).sin() if r % (k + 1) == 0 else x + 1
        elif step == "isend":
            handle = comm.Isend(x, (r + 1) % n, k)
            x = x * 2 + comm.Recv(torch.empty_like(x), (r - 1) % n, k)
            comm.Wait(handle)
        elif step == "iallreduce":
            pending.append(comm.Iallreduce(x.tanh(), mpi.MPI_SUM))
    for started in pending if r % 2 else pending[::-1]:
        x = x + started.Wait()
    return x


def in_one_process(n: int, program: Program, xs: list[Tensor]) -> list[Tensor]:
    pending = []
    for step, k in program:
        if step == "allreduce":
            xs = [torch.stack(xs).sum(0)] * n
        elif step == "max":
            xs = [torch.stack(xs).amax(0)] * n
        elif step == "scan":
            xs = [torch.stack(xs[: r + 1]).sum(0) for r in range(n)]
        elif step == "shift":
            xs = [xs[(r - k) % n] for r in range(n)]
        elif step == "bcast":
            xs = [xs[k % n] + x for x in xs]
        elif step == "allgather":
            xs = [torch.stack(xs).cos().sum(0)] * n
        elif step == "scatter":
            xs = [x + xs[k % n] for x in xs]
        elif step == "local":
            xs = [(x * (r + 1)).sin() if r % (k + 1) == 0 else x + 1 for r, x in enumerate(xs)]
        elif step == "isend":
            xs = [x * 2 + xs[(r - 1) % n] for r, x in enumerate(xs)]
        elif step == "iallreduce":
            pending.append(sum(x.tanh() for x in xs))
    return [x + sum(pending) for x in xs]


@mpi_test((1, 2, 3, 5))
def test_random_programs_end_and_agree(comm: Communicator) -> None:
    @seed(7)
    @settings(
        max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(
        st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 3)), min_size=1, max_size=12),
        st.integers(0, 99),
    )
    def run(program: Program, number: int) -> None:
        xs = [x.requires_grad_() for x in inputs([(3,)] * comm.size, torch.float64, number)]
        weights = [random.Random(number + r).choice([0.0, 1.0, -2.0]) for r in range(comm.size)]
        wanted = in_one_process(comm.size, program, xs)
        losses = [(w * y).sum() for w, y in zip(weights, wanted, strict=True)]
        torch.stack(losses).sum().backward()
        mine = xs[comm.rank].detach().clone().requires_grad_()
        y = distributed(comm, program, mine)
        assert torch.allclose(y, wanted[comm.rank])
        mpi.backward((weights[comm.rank] * y).sum())
        assert torch.allclose(grad_of(mine), grad_of(xs[comm.rank]), rtol=1e-9, atol=1e-9), program

    run()

"""Ranks that fail, or do not come: every rank ends with an error that names the call and the
ranks.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

import pytest

from multi.mpi.runner import LIBRARIES, SCRIPT_S, run_script

pytestmark = pytest.mark.timeout(SCRIPT_S + 60)


class Run(Protocol):
    """Runs a script that must fail on some ranks; returns all output."""

    def __call__(self, body: str, size: int = 3, timeout_s: str = "4", **environ: str) -> str: ...


@pytest.fixture(params=(*LIBRARIES, "sml"))
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Run:
    def run(body: str, size: int = 3, timeout_s: str = "4", **environ: str) -> str:
        job = run_script(request.param, tmp_path, body, size, timeout_s, **environ)
        assert job.code != 0, job.output
        return job.output

    return run


def test_rank_that_raises_in_the_middle_of_a_backward(run: Run) -> None:
    output = run(
        """
        class Fail(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()
            @staticmethod
            def backward(ctx, grad):
                raise ValueError("out of luck") if comm.rank == 1 else None
        total = comm.Allreduce(x, mpi.MPI_SUM)
        y = comm.Allreduce(Fail.apply(total) if comm.rank == 1 else total, mpi.MPI_SUM)
        y.sum().backward()
        say("must not get here")
        """,
        timeout_s="30",
    )
    assert "must not get here" not in output
    assert "ValueError: out of luck" in output
    for rank in (0, 2):  # told at once, long before the time is over
        assert f"PeerLostError: rank {rank}: waiting in Allreduce(SUM)" in output
    assert "rank 1 gave up: it ended with ValueError: out of luck" in output


def test_rank_that_does_not_come_is_named(run: Run) -> None:
    output = run(
        """
        if comm.rank == 2:
            wait_until_told(0)
            wait_until_told(1)
            sys.exit("rank 2 waited")
        try:
            comm.Allgather(x, 0)
        finally:
            tell(comm.rank)
        """,
    )
    assert "OperationTimeoutError" in output
    assert "Allgather(axis=0) on COMM_WORLD did not end within" in output
    assert "rank 2 did not take part" in output


def test_mismatched_calls_say_where_each_rank_is(run: Run) -> None:
    output = run(
        """
        if comm.rank == 0:
            comm.Recv(torch.empty(3), 1)
        else:
            comm.Recv(torch.empty(3), 0)
        """,
        size=2,
    )
    assert (
        "rank 1 is waiting in Recv(rank 0, tag 0)" in output
        or "rank 0 is waiting in Recv(rank 1, tag 0)" in output
    )
    assert "did not end within" in output


def test_deadlock_backward_is_named(run: Run) -> None:
    """One rank leaves out a communication that the other runs backward."""
    output = run(
        """
        y = comm.Allreduce(x, mpi.MPI_SUM)
        if comm.rank == 0:
            y.sum().backward()
            comm.Barrier()
        else:
            comm.Barrier()
        """,
        size=2,
    )
    assert "Allreduce(SUM) on COMM_WORLD (backward)" in output
    assert "Barrier()" in output


def test_after_a_failure_nothing_is_sent(run: Run) -> None:
    output = run(
        """
        from torchrelay.errors import OperationTimeoutError, PeerLostError
        if comm.rank == 0:
            try:
                comm.Recv(torch.empty(3), 1)
            except OperationTimeoutError as error:
                assert error.ranks == (1,)
            try:
                comm.Send(x, 1)
            except PeerLostError as error:
                say("refused: " + str(error)[:40])
            tell("refused")
        else:
            wait_until_told("refused")
        """,
        size=2,
    )
    assert "rank 0: refused: no communication is possible any more" in output


def test_messages_that_do_not_fit_raise_on_both_sides_in_debug_mode(run: Run) -> None:
    output = run(
        """
        from torchrelay.errors import MismatchError
        try:
            if comm.rank == 0:
                comm.Send(torch.ones(2, 3), 1, tag=5)
                comm.Recv(torch.empty(3), 1)  # what it waits in when it is told
            else:
                comm.Recv(torch.empty(3, dtype=torch.float64), 0, tag=5)
        except MismatchError as error:
            say("refused: " + str(error))
            end_together()
            raise
        """,
        size=2,
        timeout_s="30",
        TORCHRELAY_MPI_DEBUG="1",
    )
    # mpirun may put what two ranks say on one line
    refusals = dict(re.findall(r"rank (\d): refused: (.*?)(?=rank \d: refused|\n)", output))
    for rank in (0, 1):
        said = refusals[str(rank)]
        assert "torch.float64 (3,) in Recv(rank 0, tag 5)" in said
        assert "torch.float32 (2, 3) in Send(rank 1, tag 5)" in said

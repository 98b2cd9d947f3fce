"""Connections between hosts that carry nothing for long, or break: no message takes the place of
another.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from multi.mpi.runner import SCRIPT_S, Finished, run_script

pytestmark = pytest.mark.timeout(SCRIPT_S + 60)

# Rank 0 sends two messages, while rank 1 receives nothing.
HEAD = """
import contextlib, socket, time

LENGTH = 1 << 24  # more than the kernel holds for a receiver
torch.set_grad_enabled(False)

def send_two(between=lambda: None):
    comm.Send(torch.ones(1), 1)
    wait_until_told("connected")
    handles = [comm.Isend(torch.full((LENGTH,), 1.0), 1)]
    between()
    handles.append(comm.Isend(torch.full((LENGTH,), 2.0), 1))
    tell("sent")
    return handles

def wait_until_sent():
    comm.Recv(torch.empty(1), 0)
    tell("connected")
    wait_until_told("sent")

def connections():
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                yield socket.socket(fileno=os.dup(int(name)))

def cut():
    for each in connections():  # but those with the store
        with contextlib.suppress(OSError):
            if int(os.environ["MASTER_PORT"]) not in (each.getsockname()[1], each.getpeername()[1]):
                each.shutdown(socket.SHUT_RDWR)
"""


def run(folder: Path, body: str, timeout_s: float = 60) -> Finished:
    return run_script(
        "gloo",
        folder,
        HEAD + textwrap.dedent(body),
        size=2,
        timeout_s=str(timeout_s),
        TEST_HOSTS="ab",
    )


def test_a_rank_that_receives_nothing_for_long_gets_every_message(tmp_path: Path) -> None:
    job = run(
        tmp_path,
        """
        if comm.rank == 0:
            handles = send_two()
            comm.Recv(torch.empty(1), 1)
        else:
            wait_until_sent()
            time.sleep(2)
            for value in (1.0, 2.0):
                assert (comm.Recv(torch.empty(LENGTH), 0) == value).all()
            comm.Send(torch.ones(1), 0)
        """,
    )
    assert job.code == 0, job.output


def test_a_rank_ends_once_its_messages_are_sent(tmp_path: Path) -> None:
    job = run(
        tmp_path,
        """
        if comm.rank == 0:
            comm.Send(torch.full((LENGTH,), 3.0), 1)
            tell("sent")
        else:
            wait_until_told("sent")
            time.sleep(3)  # longer than a connection that is closed waits
            assert (comm.Recv(torch.empty(LENGTH), 0) == 3).all()
        """,
    )
    assert job.code == 0, job.output


def test_ranks_that_end_with_messages_to_each_other_end(tmp_path: Path) -> None:
    """Each waits until the other has read, which it does while it waits."""
    job = run(tmp_path, "handle = comm.Isend(torch.ones(LENGTH), 1 - comm.rank)", 2 * SCRIPT_S)
    assert job.code == 0, job.output


def test_messages_lost_with_their_connection_are_an_error_on_both_ranks(tmp_path: Path) -> None:
    job = run(
        tmp_path,
        """
        if comm.rank == 0:
            handles = send_two(between=cut)
            comm.Recv(torch.empty(1), 1)
        else:
            wait_until_sent()
            comm.Recv(torch.empty(LENGTH), 0)
        say("must not get here")
        """,
    )
    assert job.code != 0 and "must not get here" not in job.output, job.output
    for rank in (0, 1):
        assert f"PeerLostError: rank {rank}: Recv(rank {1 - rank}, tag 0)" in job.output, job.output


def test_a_receive_from_any_rank_notices_that_another_host_died(tmp_path: Path) -> None:
    job = run(
        tmp_path,
        """
        if comm.rank == 1:
            wait_until_told("waiting")
            os.kill(os.getpid(), 9)
        tell("waiting")
        comm.Recv(torch.empty(1), mpi.MPI_ANY_SOURCE)
        """,
        timeout_s=SCRIPT_S,
    )
    assert "PeerLostError: rank 0: Recv(rank -1, tag 0)" in job.output, job.output

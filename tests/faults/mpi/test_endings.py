"""Ranks that end, and calls that do not match and cannot be taken back: every rank gets an error, none hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from multi.mpi_runner import LIBRARIES, mpirun, prefix, run_script

pytestmark = pytest.mark.parametrize("library", LIBRARIES)


def test_rank_that_exits_is_not_waited_for(library: str, tmp_path: Path) -> None:
    body = """
        if comm.rank == 0:
            sys.exit("bad input")
        comm.Allreduce(x, mpi.MPI_SUM)
        say("must not get here")
    """
    job = run_script(library, tmp_path, body, timeout_s="300")
    assert job.code != 0 and "bad input" in job.output and "must not get here" not in job.output
    assert "PeerLostError" in job.output
    assert "Allreduce(SUM) on COMM_WORLD cannot complete, because rank 0 ended" in job.output


def test_rank_that_ends_after_its_part_is_not_blamed(library: str, tmp_path: Path) -> None:
    """Rank 0 has sent what the others wait for; rank 1 is late, and rank 2 waits for it."""
    body = """
        if comm.rank == 0:
            comm.Send(x.detach(), 2)
            sys.exit(0)
        time.sleep(5 if comm.rank == 1 else 0)
        if comm.rank == 1:
            comm.Send(2 * x.detach(), 2)
        else:
            got = [comm.Recv(torch.empty(3), mpi.MPI_ANY_SOURCE) for _ in range(2)]
            assert sum(got).tolist() == [3.0] * 3
            say("got both")
    """
    job = run_script(library, tmp_path, body, timeout_s="60", TORCHRELAY_MPI_GRACE_S="0.5")
    assert job.code == 0 and "rank 2: got both" in job.output, job.output


def test_dtypes_on_both_sides_of_the_threshold(library: str, tmp_path: Path) -> None:
    """One rank meets the others first, the other does not: they wait for each other until the time is over."""
    body = """
        comm.Allreduce(torch.ones(12000, dtype=torch.float64 if comm.rank else torch.float32), mpi.MPI_SUM)
        say("must not get here")
    """
    job = run_script(library, tmp_path, body, size=2)
    assert job.code != 0 and "must not get here" not in job.output, job.output
    assert "Error: rank" in job.output and "Allreduce(SUM) on COMM_WORLD" in job.output


def test_collectives_in_two_steps_that_do_not_match(library: str, tmp_path: Path) -> None:
    body = """
        from torchrelay.errors import MismatchError
        big = torch.ones(20000)
        handle = comm.Ibcast(big, 0) if comm.rank else comm.Iallreduce(big, mpi.MPI_SUM)
        try:
            handle.Wait()
        except MismatchError as error:
            assert "IAllreduce(SUM)" in str(error) and "IBcast(root=0)" in str(error), error
            say("refused")
            raise
    """
    job = run_script(library, tmp_path, body, size=2, timeout_s="30")
    assert job.code != 0, job.output
    assert job.output.count(": refused") == 2, job.output


@pytest.mark.parametrize(
    "receive",
    [
        "comm.Sendrecv(x, 0, 0, like=torch.empty(5))",
        # Of another size, but whole elements: where they are not, MPICH itself aborts the job.
        "comm.Recv(torch.empty(8, dtype=torch.int16), 0)",
        "comm.Irecv(torch.empty(5), 0).Wait()",
        "comm.Recv(torch.empty(2), 0)",
    ],
)
def test_message_of_another_length(library: str, tmp_path: Path, receive: str) -> None:
    body = f"""
        from torchrelay.errors import MismatchError, PeerLostError
        if comm.rank == 0:
            comm.Isend(x, 1)
            try:
                comm.Recv(torch.empty(1), 1, 99)
            except MismatchError:
                say("was told")
                raise
        try:
            {receive}
        except MismatchError as error:
            say("refused")
            raise
    """
    job = run_script(library, tmp_path, body, size=2, timeout_s="30")
    assert job.code != 0
    assert "rank 1: refused" in job.output and "rank 0: was told" in job.output, job.output


def test_waiting_ends_at_an_interrupt(library: str, tmp_path: Path) -> None:
    """Large calls too, which may block in MPI, but not before all ranks are there."""
    body = """
        import signal, threading
        if comm.rank == 0:
            threading.Timer(2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            try:
                comm.Allreduce(torch.ones(1 << 20), mpi.MPI_SUM)
            except KeyboardInterrupt:
                say("interrupted")
                raise
        else:
            comm.Recv(torch.empty(3), 0, 7)
    """
    job = run_script(library, tmp_path, body, size=2, timeout_s="30")
    assert job.code != 0 and "rank 0: interrupted" in job.output, job.output


def test_worker_processes_are_no_ranks(library: str, tmp_path: Path) -> None:
    """DataLoader's workers import the script again, with the environment of the rank that started them."""
    (tmp_path / "spawning.py").write_text("""
import multiprocessing, os
import torch
from torchrelay import mpi

class Numbers(torch.utils.data.Dataset):
    def __init__(self):
        self.comm = mpi.COMM_WORLD
    def __len__(self):
        return 4
    def __getitem__(self, index):
        try:
            self.comm.Allreduce(torch.ones(1), mpi.MPI_SUM)
        except RuntimeError as error:
            return str(error)

if __name__ == "__main__":
    comm = mpi.COMM_WORLD
    for method in ("spawn", "fork"):
        loader = torch.utils.data.DataLoader(Numbers(), num_workers=1, multiprocessing_context=method)
        for (text,) in loader:
            assert "communicate in the rank" in text, text
        assert comm.Allreduce(torch.ones(1), mpi.MPI_SUM).item() == comm.size
    print(f"rank {comm.rank}: done", flush=True)
""")
    job = mpirun(library, 2, str(tmp_path / "spawning.py"), timeout_s=100, TORCHRELAY_MPI_TIMEOUT_S="60")
    assert job.code == 0, job.output
    assert "rank 0: done" in job.output and "rank 1: done" in job.output


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_NTASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_worlds_of_one_process_each_are_refused(library: str, name: str) -> None:
    if library != "openmpi":
        pytest.skip("the same for every MPI")
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PMI", "OMPI_COMM"))
    }
    environment["OMPI_MCA_btl"] = "self"  # leaves no shared memory behind
    command = [sys.executable, "-c", "import torchrelay.mpi"]
    job = subprocess.run(command, env={**environment, name: "2"}, capture_output=True, text=True, check=False)
    assert job.returncode != 0 and f"UnavailableError: {name}=2" in job.stderr and "mpirun -n 2" in job.stderr
    if name != "SLURM_NTASKS":
        return
    one = {**environment, name: "2", "OMPI_COMM_WORLD_SIZE": "1"}  # mpirun -n 1 inside of an allocation
    job = subprocess.run(command, env=one, capture_output=True, text=True, check=False)
    assert "UnavailableError" not in job.stderr


def test_launcher_of_the_other_mpi_is_refused(library: str, tmp_path: Path) -> None:
    if library != "openmpi":
        pytest.skip("MPICH itself aborts under Open MPI's launcher")
    other = prefix("mpich")
    script = tmp_path / "script.py"
    script.write_text("import torchrelay.mpi\nprint('must not get here')\n")
    command = ("-n", "2", str(prefix(library) / "bin" / "python"), str(script))
    environment = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_btl": "self",  # leaves no shared memory behind
    }
    job = subprocess.run(
        [str(other / "bin" / "mpirun"), *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert job.returncode != 0 and "must not get here" not in job.stdout, job.stdout
    assert "UnavailableError" in job.stderr and "mpirun -n 2" in job.stderr, job.stderr

"""Ranks that end, and calls that do not match and cannot be taken back: every rank gets an error,
none hangs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest

from multi.mpi.runner import GROUPS, LIBRARIES, SCRIPT_HEAD, SCRIPT_S, mpirun, prefix, run_script

EVERY = (*LIBRARIES, *GROUPS)
on_every = pytest.mark.parametrize("library", EVERY)
pytestmark = pytest.mark.timeout(SCRIPT_S + 60)


def pairs(names: Iterable[str], everywhere: Iterable[str]) -> pytest.MarkDecorator:
    """Run each case over an MPI and a group, and those of ``everywhere`` over the others too."""
    found = [
        pytest.param(library, name, id=f"{name}-{library}")
        for name in names
        for library in (EVERY if name in everywhere else ("openmpi", "sml"))
    ]
    return pytest.mark.parametrize(("library", "name"), found)


@on_every
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
    if library in LIBRARIES:  # a group may find first that rank 0's store or connection is gone
        assert "Allreduce(SUM) on COMM_WORLD cannot complete, because rank 0 ended" in job.output


@on_every
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


# Their data is in transit when the mismatch is found.
MISMATCHES = {
    "operations": (
        "comm.Iallreduce(big.int(), mpi.MPI_BAND if comm.rank else mpi.MPI_SUM).Wait()",
        ("Iallreduce(SUM)", "Iallreduce(BAND)"),
    ),
    "small dtypes": (
        "comm.Iallreduce(x.double() if comm.rank else x, mpi.MPI_SUM).Wait()",
        ("float32 (3,)", "float64 (3,)"),
    ),
    "shapes": (
        "comm.Iallreduce(torch.ones(2, 3 + comm.rank), mpi.MPI_SUM).Wait()",
        ("float32 (2, 3)", "float32 (2, 4)"),
    ),
    "recorded or not, in debug mode": (
        "with changed(debug=True), torch.set_grad_enabled(comm.rank == 0):\n"
        "    comm.Iallreduce(x, mpi.MPI_SUM).Wait()",
        ("Iallreduce(SUM)", "not recorded by autograd"),
    ),
    "one step and two": (
        "comm.Allreduce(x, mpi.MPI_SUM) if comm.rank else comm.Iallreduce(x, mpi.MPI_SUM).Wait()\n"
        "comm.Barrier()",
        ("make different calls", "Iallreduce(SUM)"),
    ),
}


@pairs(MISMATCHES, ["operations"])  # large ones, which a library moves by itself
def test_calls_that_do_not_match_end_on_every_rank(library: str, tmp_path: Path, name: str) -> None:
    calls, named = MISMATCHES[name]
    body = f"""
from torchrelay.errors import MismatchError
from torchrelay.mpi._settings import changed
big = torch.ones(20000)
try:
{textwrap.indent(calls, "    ")}
except MismatchError as error:
    for text in {named}:
        assert text in str(error), error
    say("refused")
    end_together()
    raise
"""
    job = run_script(library, tmp_path, body, size=2, timeout_s="50")
    assert job.code != 0, job.output
    assert job.output.count(": refused") == 2, job.output


RECEIVES = {
    "of longer messages": "comm.Recv(torch.empty(2), 0)",
    # Of another size, but whole elements: where they are not, MPICH itself aborts the job.
    "of another dtype": "comm.Recv(torch.empty(8, dtype=torch.int16), 0)",
    "in two steps": "comm.Irecv(torch.empty(5), 0).Wait()",
    "of both": "comm.Sendrecv(x, 0, 0, like=torch.empty(5))",
}


@pairs(RECEIVES, ["of longer messages", "of another dtype"])
def test_message_of_another_length(library: str, tmp_path: Path, name: str) -> None:
    body = f"""
        from torchrelay.errors import MismatchError, PeerLostError
        if comm.rank == 0:
            comm.Isend(x, 1)
            try:
                comm.Recv(torch.empty(1), 1, 99)
            except MismatchError:
                say("was told")
                end_together()
                raise
        try:
            {RECEIVES[name]}
        except MismatchError as error:
            say("refused")
            end_together()
            raise
    """
    job = run_script(library, tmp_path, body, size=2, timeout_s="30")
    assert job.code != 0
    assert "rank 1: refused" in job.output and "rank 0: was told" in job.output, job.output


@on_every
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
    job = run_script(library, tmp_path, body, size=2, timeout_s="8")
    assert job.code != 0 and "rank 0: interrupted" in job.output, job.output


@on_every
def test_worker_processes_are_no_ranks(library: str, tmp_path: Path) -> None:
    """DataLoader's workers import the script again, with the environment of the rank that started
    them.
    """
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
        loader = torch.utils.data.DataLoader(
            Numbers(), num_workers=1, multiprocessing_context=method
        )
        for (text,) in loader:
            assert "communicate in the rank" in text, text
        assert comm.Allreduce(torch.ones(1), mpi.MPI_SUM).item() == comm.size
    print(f"rank {comm.rank}: done", flush=True)
""")
    job = mpirun(library, 2, str(tmp_path / "spawning.py"), TORCHRELAY_MPI_TIMEOUT_S="60")
    assert job.code == 0, job.output
    assert "rank 0: done" in job.output and "rank 1: done" in job.output


REFUSED = {
    "torchrun": ({"WORLD_SIZE": "2"}, "WORLD_SIZE"),
    "MPICH": ({"PMI_SIZE": "2"}, "PMI_SIZE"),
    "Open MPI": ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE"),
    "srun": ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, "SLURM_NTASKS"),
    "srun of a part": (
        {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "2"},
        "SLURM_STEP_NUM_TASKS",
    ),
    # One process is all that was started here.
    "mpirun in an allocation": (
        {"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        None,
    ),
    "salloc": ({"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}, None),
    "salloc with an interactive step": (
        {
            "SLURM_NTASKS": "2",
            "SLURM_STEP_ID": "4294967290",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_PROCID": "0",
        },
        None,
    ),
    "the script of sbatch": ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, None),
}


def test_worlds_of_one_process_each_are_refused() -> None:
    """The same for every MPI."""
    prefix("openmpi")
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PMI", "OMPI_COMM", "SLURM_"))
    }
    environment["OMPI_MCA_btl"] = "self"  # leaves no shared memory behind
    checks = """
import os, json, sys
from torchrelay.errors import UnavailableError
from torchrelay.mpi import _library
for added in json.load(sys.stdin):
    os.environ.update(added)
    try:
        _library.check_launcher(1)
        print("taken")
    except UnavailableError as error:
        print(error)
    for name in added:
        del os.environ[name]
"""
    job = subprocess.run(
        [sys.executable, "-c", checks],
        input=json.dumps([added for added, _ in REFUSED.values()]),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert job.returncode == 0, job.stderr
    for (case, (_, name)), line in zip(REFUSED.items(), job.stdout.splitlines(), strict=True):
        expected = "taken" if name is None else f"{name}=2, but this process knows of 1"
        assert line.startswith(expected) and (name is None or "mpirun -n 2" in line), (case, line)
    command = [sys.executable, "-c", "from torchrelay.mpi import COMM_WORLD"]
    job = subprocess.run(
        command, env={**environment, "WORLD_SIZE": "2"}, capture_output=True, text=True, check=False
    )
    assert job.returncode != 0 and "UnavailableError: WORLD_SIZE=2" in job.stderr


def test_mpi4py_imported_by_ranks_of_a_group_is_no_world(tmp_path: Path) -> None:
    """The same for every group."""
    prefix("openmpi")
    script = tmp_path / "script.py"
    script.write_text("""
from mpi4py import MPI
import torch
from torchrelay import mpi
comm = mpi.COMM_WORLD
assert mpi.MPI_PROC_NULL == MPI.PROC_NULL
assert comm.Allreduce(torch.ones(()), mpi.MPI_SUM) == comm.size == 2
""")
    for environ in ({}, {"TORCHELASTIC_RUN_ID": "1", "PMIX_RANK": "0"}):
        environ["OMPI_MCA_btl"] = "self"  # leaves no shared memory behind
        job = mpirun("sml", 2, str(script), timeout_s=SCRIPT_S, **environ)
        assert job.code == 0, job.output


def test_launcher_of_the_other_mpi_is_refused(tmp_path: Path) -> None:
    """MPICH itself aborts under Open MPI's launcher."""
    other = prefix("mpich")
    script = tmp_path / "script.py"
    script.write_text("import torchrelay.mpi\nprint('must not get here')\n")
    command = ("-n", "2", str(prefix("openmpi") / "bin" / "python"), str(script))
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
        timeout=SCRIPT_S,
    )
    assert job.returncode != 0 and "must not get here" not in job.stdout, job.stdout
    assert "UnavailableError" in job.stderr and "mpirun -n 2" in job.stderr, job.stderr


@pytest.mark.parametrize("library", GROUPS)  # the launchers of MPI set more than this
def test_a_setting_of_pmix_makes_no_worker(library: str, tmp_path: Path) -> None:
    """As images with Open MPI have; ``multiprocessing`` starts the ranks of groups here."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT_HEAD + "assert comm.Allreduce(x, mpi.MPI_SUM).tolist() == [2.0] * 3\n")
    job = mpirun(library, 2, str(script), timeout_s=SCRIPT_S, PMIX_MCA_gds="hash")
    assert job.code == 0, job.output

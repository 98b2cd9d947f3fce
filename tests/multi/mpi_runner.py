"""Tests that run under mpirun, and look like any other test.

A function marked ``@mpi_test(sizes=(1, 2, 3))`` takes a communicator and runs on all ranks. It
becomes one pytest test for each MPI library and number of ranks. Starting ranks takes longer than
most tests, so the first test of a file starts mpirun once for all functions of the file, and each
test reports its own result.

Open MPI is the one beside this Python. MPICH has an environment of its own, since both wheels
install an ``mpirun``: the one named by ``TORCHRELAY_TEST_MPICH``, or ``build/mpich`` in the
repository.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
LIBRARIES = ("openmpi", "mpich")
JOB_S = 240  # for all functions of a file, with more ranks than cores
Body = Callable[[Any], None]

_bodies: dict[str, Body] = {}  # of the file this process is a rank for


@dataclass
class Finished:
    """How a job ended: its exit code, and all its output."""

    code: int
    output: str


def prefix(library: str) -> Path:
    """The environment of an MPI library; skips the test where there is none."""
    if library == "openmpi":
        found = Path(sys.prefix)
    else:
        found = Path(os.environ.get("TORCHRELAY_TEST_MPICH", REPOSITORY / "build" / "mpich"))
    if not (found / "bin" / "mpirun").exists():
        pytest.skip(
            f"no {library} in {found}; TORCHRELAY_TEST_MPICH names an environment that has mpich"
        )
    return found


def mpirun(
    library: str, size: int, *command: str, timeout_s: float = 100, **environ: str
) -> Finished:
    """Runs ``python command...`` as ``size`` ranks; ranks that outlive ``timeout_s`` are killed."""
    where = prefix(library)
    scratch = tempfile.mkdtemp(prefix="mpi", dir="/tmp")  # short: it holds sockets
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TMPDIR": scratch,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # not /dev/shm, where killed ranks would leave it
        "OMPI_MCA_btl_sm_backing_directory": scratch,
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        **environ,
    }
    arguments = [
        str(where / "bin" / "mpirun"),
        "-n",
        str(size),
        str(where / "bin" / "python"),
        *command,
    ]
    segments = set(Path("/dev/shm").glob("mpich_shm_*"))
    process = subprocess.Popen(
        arguments,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 15)
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
        output += f"\n(killed after {timeout_s:g} s)"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if (
            process.returncode and library == "mpich"
        ):  # killed ranks leave theirs, and MPICH knows no other place
            for segment in set(Path("/dev/shm").glob("mpich_shm_*")) - segments:
                segment.unlink(missing_ok=True)
    return Finished(process.returncode, output)


SCRIPT_HEAD = """
import os, sys, time
import torch
from torchrelay import mpi
comm = mpi.COMM_WORLD
x = torch.ones(3, requires_grad=True)

def say(text):
    print(f"rank {comm.rank}: {text}", flush=True)
"""


def run_script(
    library: str, folder: Path, body: str, size: int = 3, timeout_s: str = "4", **environ: str
) -> Finished:
    """Runs a script as ``size`` ranks; it starts with ``SCRIPT_HEAD``, and must end within a
    minute.
    """
    script = folder / "script.py"
    script.write_text(SCRIPT_HEAD + textwrap.dedent(body))
    environ["TORCHRELAY_MPI_TIMEOUT_S"] = timeout_s
    job = mpirun(library, size, str(script), timeout_s=60, **environ)
    assert "killed after" not in job.output, job.output
    return job


def mpi_test(
    sizes: tuple[int, ...] = (1, 2, 3), mpich: tuple[int, ...] | None = None
) -> Callable[[Body], Any]:
    """Decorator; see the module. ``mpich`` are the numbers of ranks under MPICH, if not the
    same.
    """
    jobs = [(size, "openmpi") for size in sizes]
    jobs += [(size, "mpich") for size in (sizes if mpich is None else mpich)]

    def decorate(body: Body) -> Any:
        name = body.__name__
        _bodies[name] = body

        @pytest.mark.timeout(JOB_S + 60)
        @pytest.mark.parametrize(("size", "library"), sorted(jobs))
        def test(library: str, size: int, request: pytest.FixtureRequest) -> None:
            prefix(library)
            check(run_file(str(request.path), library, size), name)

        test.__doc__ = body.__doc__
        test.jobs = jobs  # type: ignore[attr-defined]
        return test

    return decorate


@functools.cache
def run_file(path: str, library: str, size: int) -> tuple[list[dict[str, str]], Finished]:
    """All functions of a test file on ``size`` ranks: each rank's results, and how the job
    ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = (__file__, path, folder, library, str(size))
        job = mpirun(library, size, *command, timeout_s=JOB_S, TORCHRELAY_MPI_TIMEOUT_S="120")
        results = []
        for rank in range(size):
            file = Path(folder) / f"{rank}.json"
            lines = file.read_text().splitlines() if file.exists() else []
            results.append(dict(json.loads(line) for line in lines))
    return results, job


def check(ran: tuple[list[dict[str, str]], Finished], name: str) -> None:
    results, job = ran
    failures = [
        f"--- rank {rank}\n{result.get(name, 'did not get there: ' + job.output[-3000:])}"
        for rank, result in enumerate(results)
        if result.get(name) != ""
    ]
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)


def _main(path: str, folder: str, library: str, size: int) -> None:
    """One rank: runs the functions that want this many ranks, in the order of the file."""
    import importlib.util
    import warnings

    warnings.simplefilter("error")
    warnings.filterwarnings(
        "ignore", "`torch.jit.script", DeprecationWarning
    )  # torch's own use of it
    warnings.filterwarnings(
        "ignore", "The .grad attribute of a Tensor that is not a leaf"
    )  # torch.compile's own look
    import torch

    from torchrelay import mpi
    from torchrelay.errors import PeerLostError

    torch.set_num_threads(1)
    sys.path.insert(0, str(REPOSITORY / "tests"))
    sys.modules["multi.mpi_runner"] = sys.modules["__main__"]
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    comm = mpi.COMM_WORLD
    with open(Path(folder) / f"{comm.rank}.json", "a", buffering=1) as results:
        for name, body in _bodies.items():
            if (size, library) not in getattr(module, name).jobs:
                continue
            error = ""
            try:
                body(comm)
            except BaseException:
                error = traceback.format_exc()
            mpi.reset()
            results.write(json.dumps((name, error)) + "\n")
            try:
                comm.Barrier()
            except PeerLostError:
                return  # another rank failed inside a communication; what follows cannot match


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))

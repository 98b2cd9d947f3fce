"""The larger examples, by each launcher."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

import preloaded
from multi.mpi.runner import REPOSITORY, SCRIPT_S, mpirun

pytestmark = pytest.mark.timeout(3 * SCRIPT_S)


def run_example(name: str, launcher: str) -> str:
    """Return its output: by python alone, or as two ranks of MPI or of a process group."""
    script = str(REPOSITORY / "examples" / name)
    if launcher != "python":
        job = mpirun(launcher, 2, script)
        assert job.code == 0, job.output
        return job.output
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [preloaded.python(), script], env=environ, capture_output=True, text=True, check=True
    ).stdout


def test_the_fit_of_a_heat_source_does_not_depend_on_the_ranks() -> None:
    """Its optimizer's parameters are spread over the ranks."""
    misfits = []
    for launcher in ("python", "openmpi", "sml"):
        output = run_example("mpi_heat.py", launcher)
        found = re.search(r"the misfit fell from (\S+) to (\S+)", output)
        assert found, output
        misfits.append([float(value) for value in found.groups()])
    for other in misfits[1:]:
        assert all(abs(a - b) <= 0.02 * a for a, b in zip(misfits[0], other, strict=True)), misfits


@pytest.mark.parametrize("launcher", ["openmpi", "sml"])
def test_tensor_parallel_layer_is_the_whole_one(launcher: str) -> None:
    output = run_example("mpi_tensor_parallel.py", launcher)
    assert output.count("holds 6 of 12 hidden units; the gradient agrees") == 2, output

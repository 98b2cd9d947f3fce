"""The example with an optimizer whose parameters are spread over the ranks."""

from __future__ import annotations

import re

import pytest

from multi.mpi.runner import REPOSITORY, mpirun


@pytest.mark.timeout(400)
def test_the_fit_does_not_depend_on_the_number_of_ranks() -> None:
    misfits = []
    for size in (1, 2):
        job = mpirun("openmpi", size, str(REPOSITORY / "examples" / "mpi_heat.py"), timeout_s=180)
        found = re.search(r"the misfit fell from (\S+) to (\S+)", job.output)
        assert job.code == 0 and found, job.output
        misfits.append([float(value) for value in found.groups()])
    assert all(abs(a - b) <= 0.02 * a for a, b in zip(*misfits, strict=True)), misfits

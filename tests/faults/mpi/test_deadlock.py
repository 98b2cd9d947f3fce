"""The program of docs/mpi.md: a backward pass that waits forever elsewhere, and ends here."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from multi.mpi.runner import REPOSITORY, SCRIPT_S, mpirun

pytestmark = pytest.mark.timeout(SCRIPT_S + 60)

# Ranks stay until both have ended, because the end of a connection ends a wait, too.
FRAME = """
import os, sys, time
try:
{program}
    print(f"rank {{comm.rank}} ended: {{x.grad.tolist()}}", flush=True)
except RuntimeError:
    print(f"rank {{comm.rank}} waited in vain", flush=True)
open(f"{{sys.argv[0]}}.{{comm.rank}}", "w").close()
while not os.path.exists(f"{{sys.argv[0]}}.{{1 - comm.rank}}"):
    time.sleep(0.05)
"""


def with_torch(program: str) -> str:
    """Return the program with the functions of torch.distributed.nn."""
    program = re.sub(
        r"comm\.Allreduce\((.*), mpi\.MPI_SUM\)", r"dist.nn.functional.all_reduce(\1)", program
    )
    program = program.replace("mpi.backward(loss)", "loss.backward()")
    return "import datetime\nimport torch.distributed.nn\n" + program.replace(
        '"gloo"', '"gloo", timeout=datetime.timedelta(seconds=20)'
    )


@pytest.mark.parametrize("which", ["ours", "torch"])
def test_rank_that_uses_one_of_two_results(which: str, tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "mpi.md").read_text()
    (program,) = re.findall(r"^```python\n([^`]*mpi\.backward\(loss\)\n)```", page, re.MULTILINE)
    if which == "torch":
        program = with_torch(program)
    script = tmp_path / "script.py"
    script.write_text(FRAME.format(program=textwrap.indent(program, "    ")))
    job = mpirun("gloo", 2, str(script))
    assert "rank 0 ended" in job.output, job.output
    if which == "ours":  # the derivative of the sum of both ranks' losses
        assert "rank 0 ended: [4.0, 4.0, 4.0]" in job.output, job.output
        assert "rank 1 ended: [4.0, 4.0, 4.0]" in job.output, job.output
    else:
        assert "rank 1 waited in vain" in job.output, job.output

"""The program of docs/mpi.md: a backward pass that waits forever elsewhere, and ends here."""

from __future__ import annotations

from pathlib import Path

import pytest

from multi.mpi.runner import mpirun

SCRIPT = """
import datetime, os, sys, time
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as F
from torchrelay import mpi

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
rank, ours = dist.get_rank(), sys.argv[1] == "ours"
comm = mpi.COMM_WORLD if ours else None
reduce = (lambda t: comm.Allreduce(t, mpi.MPI_SUM)) if ours else F.all_reduce
x = torch.ones(3, requires_grad=True)
a = reduce(x)
b = reduce(2 * x)
loss = (a + b if rank else a).sum()
try:
    mpi.backward(loss) if ours else loss.backward()
    print(f"rank {rank} ended: {x.grad.tolist()}", flush=True)
except RuntimeError:
    print(f"rank {rank} waited in vain", flush=True)
open(f"{sys.argv[0]}.{rank}", "w").close()
while not os.path.exists(f"{sys.argv[0]}.{1 - rank}"):  # its connection stays open
    time.sleep(0.05)
"""


@pytest.mark.parametrize("which", ["ours", "torch"])
def test_rank_that_uses_one_of_two_results(which: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    job = mpirun("gloo", 2, str(script), which, timeout_s=100)
    assert "rank 0 ended" in job.output, job.output
    if which == "ours":  # the derivative of the sum of both ranks' losses
        assert "rank 0 ended: [4.0, 4.0, 4.0]" in job.output, job.output
        assert "rank 1 ended: [4.0, 4.0, 4.0]" in job.output, job.output
    else:
        assert "rank 1 waited in vain" in job.output, job.output

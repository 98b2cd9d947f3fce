"""A job of a user who is not root, on a machine that gives him little: he has no HOME, sees no
process of others (``hidepid``), and can write neither to ``/tmp`` nor to ``/dev/shm``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PATIENCE_S = 200
_TOOLS = ("unshare", "mount", "setpriv")
pytestmark = [
    pytest.mark.timeout(PATIENCE_S + 60),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else"),
    pytest.mark.skipif(not all(map(shutil.which, _TOOLS)), reason=f"needs {', '.join(_TOOLS)}"),
]

JOB = """
import os, sys
import torch, torch.distributed as dist
from torchrelay import checkpoint, mpi
from torchrelay.deferred import deferred_init, materialize_module
from torchrelay.parameters import Embedding
from torchrelay.switching import ModelStore, Switcher

if __name__ == "__main__":
    assert os.getuid() == 12345 and "HOME" not in os.environ
    dist.init_process_group("sml")
    total = torch.ones(200_000)
    dist.all_reduce(total)
    theirs = mpi.COMM_WORLD.Allreduce(torch.ones(3), mpi.MPI_SUM)
    embedding = Embedding(8, 2, apply_gradients="backward")
    embedding(torch.tensor([1, 2])).sum().backward()
    embedding.table.close()
    model = deferred_init(torch.nn.Linear, 3, 3)
    materialize_module(model)
    checkpoint.async_save({"model": model}, "checkpoints/step-1").result()
    checkpoint.load({"model": model}, "checkpoints")
    if dist.get_rank() == 0:
        x = torch.zeros(1, 3)
        with ModelStore() as store:
            sizes = {"in_features": 3, "out_features": 2}
            store.add("linear", "torch.nn:Linear", kwargs=sizes, inputs={"input": x})
            with Switcher(store, arena_bytes=1 << 20) as switcher:
                switcher.load("linear")
                print(tuple(switcher.infer("linear", {"input": x})["output"].shape))
    dist.barrier()
    if dist.get_rank() == 1:
        print(total[-1].item(), theirs.tolist())
    dist.destroy_process_group()
"""

BECOME = """
mount -t proc -o hidepid=2 proc /proc
mount -t tmpfs -o ro tmpfs /tmp
mount -t tmpfs -o ro tmpfs /dev/shm
exec setpriv --reuid 12345 --regid 12345 --clear-groups --no-new-privs \
    --inh-caps=-all,+dac_read_search --ambient-caps=-all,+dac_read_search env -u HOME "$@"
"""  # dac_read_search, because the interpreter may be in a folder of root's


def test_all_components_work() -> None:
    # Not below /tmp, which is covered.
    folder = Path(__file__).parent.parent.parent / "build" / "ordinary user"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        os.chown(folder, 12345, 12345)
        (folder / "job.py").write_text(JOB)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        job = subprocess.run(
            [
                *("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", BECOME),
                *("sh", sys.executable, *launcher, "job.py"),
            ],
            cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder)
    assert job.returncode == 0, job.stdout
    assert {"(1, 2)", "2.0 [2.0, 2.0, 2.0]"} <= {*job.stdout.splitlines()}, job.stdout

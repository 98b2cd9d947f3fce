"""Processes that end while their group still has something to do end with their own error."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist

# PyTorch keeps the Python object of a tensor while C++ refers to the tensor, except for references
# that are taken when the interpreter is ending already: if the Python object goes first, the
# process aborts ("use_count() == 1 INTERNAL ASSERT FAILED"). Gloo does that if a collective is
# started there.
SCRIPT = """
import ctypes, os, sys
import torch
import torch.distributed as dist
import torchrelay.aggregation

class Late:
    def __init__(self, keep=ctypes.pythonapi.Py_IncRef, ref=ctypes.py_object, write=os.write):
        self.tensor, self.group = torch.ones(3), dist.group.WORLD
        self.keep, self.ref, self.write = keep, ref, write

    def __del__(self):
        try:
            work = self.group.allreduce([self.tensor])
            self.keep(self.ref(work))  # as a thread does that has not ended
            self.write(1, b"started late")
        except BaseException as error:
            self.write(1, b"refused late")

port, rank, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group(backend, store=store, rank=rank, world_size=2)
late = Late()
dist.all_reduce(late.tensor)
if rank == 0:
    unfinished = dist.all_reduce(torch.ones(1000), async_op=True)
    raise ValueError("on purpose")
store.wait(["ended"])
"""


@pytest.mark.timeout(200)
def test_a_rank_that_ends_before_its_collectives_does_not_abort() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(store.port), str(rank), "sml"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said, errors = ranks[0].communicate(timeout=100)
        store.set("ended", "")
        _, others = ranks[1].communicate(timeout=100)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[0].returncode == 1 and "ValueError: on purpose" in errors, errors
    assert "late" in said and "INTERNAL ASSERT" not in errors + others, errors + others
    assert ranks[1].returncode == 0, others

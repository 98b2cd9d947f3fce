"""Ranks that cannot reach each other's memory: in process or user namespaces of their own, as in
containers and on several hosts.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import preloaded
from ranks import free_port

# The ranks import torch: minutes where many others run.
pytestmark = pytest.mark.timeout(400)

USER = ["unshare", "--user", "--map-root-user"]
PROCESS = [*USER, "--pid", "--fork", "--kill-child"]

SCRIPT = """
import torch, torch.distributed as dist
import torchrelay.aggregation
from torchrelay.errors import UnavailableError
from torchrelay.world import World

world = World.from_environment()
store = world.connect(300)
dist.init_process_group("sml", store=store, rank=world.rank, world_size=world.size)
tensor = torch.full((1000,), float(world.rank + 1))
dist.all_reduce(tensor)
assert tensor.eq(sum(range(1, world.size + 1))).all()

# Ranks 0 and 1 share a host, so their own group is one of shared memory alone.
near = dist.new_group([0, 1], backend="sml")
far = dist.new_group([0, world.size - 1], backend="sml")
for group, ranks in ((near, (0, 1)), (far, (0, world.size - 1))):
    if world.rank in ranks:
        ones = torch.ones(3)
        dist.all_reduce(ones, group=group)
        assert ones.eq(2).all()
if world.rank in (0, 1):
    assert near.stats().plane == "shm"
if world.rank in (0, world.size - 1):
    assert far.stats().plane == "hosts"
assert dist.group.WORLD.stats().links[1].transport == "tcp"

try:
    dist.new_group(backend="sml", pg_options=torchrelay.aggregation.Options(plane="shm"))
except UnavailableError as error:
    assert "not all on one host" in str(error)
else:
    raise AssertionError("plane = shm was accepted")
module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
module(torch.full((1, 4), float(world.rank))).sum().backward()
assert module.module.weight.grad.eq(sum(range(world.size)) / world.size).all()
dist.barrier()
store.set(f"done/{world.rank}", "")
if world.rank == 0:
    store.wait([f"done/{r}" for r in range(world.size)])
print("done")
"""


def can_unshare(unshare: list[str]) -> bool:
    try:
        return (
            subprocess.run(
                [*unshare, "true"], capture_output=True, timeout=100, check=False
            ).returncode
            == 0
        )
    except OSError:
        return False


@pytest.mark.parametrize("unshare", [USER, PROCESS], ids=["user", "process"])
def test_ranks_in_two_namespaces_are_on_two_hosts(unshare: list[str], tmp_path: Path) -> None:
    if not can_unshare(unshare):
        pytest.skip("this machine lets us make no such namespaces")
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    size = 3
    port = free_port()
    processes = []
    for rank in range(size):
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONWARNINGS": "error::UserWarning:torchrelay",
        }
        command = [*(unshare if rank == size - 1 else []), preloaded.python(), str(script)]
        processes.append(
            subprocess.Popen(
                command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        ended = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, error) in zip(processes, ended, strict=True):
        assert process.returncode == 0 and "done" in out, error

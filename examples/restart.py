"""A job that loses a rank and resumes by itself: ``sml``, an ``Embedding``, a deferred FSDP2 model
and asynchronous checkpoints::

    python examples/restart.py [SEED]

It trains twice under ``torchrun --max-restarts``, once with a rank that is killed at a step chosen
by the seed, and compares the losses: they are equal bit for bit, because a checkpoint holds all
that the next step depends on, and sums are added in the order of ranks.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchrelay import checkpoint
from torchrelay.deferred import deferred_init, materialize_module
from torchrelay.parameters import Embedding, optim
from torchrelay.world import World

RANKS, STEPS, SAVE_EVERY = 2, 40, 5
WORDS, DIM, CLASSES, BATCH = 1000, 16, 4, 64


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, 64), nn.Tanh(), nn.Linear(64, CLASSES))


def newest(folder: str) -> str | None:
    """Return the newest checkpoint, the same on every rank."""
    found: list[str | None] = [None]
    if dist.get_rank() == 0:
        found = [checkpoint.latest(folder, None)]  # there is none in the first attempt
    dist.broadcast_object_list(found)
    return found[0]


def train(folder: str, killed_rank: int, killed_step: int) -> None:
    """Run one rank: from the newest checkpoint in ``folder``, if there is one."""
    world = World.from_environment()
    dist.init_process_group("sml")
    torch.manual_seed(0)
    model = deferred_init(build)
    mesh = init_device_mesh("cpu", (world.size,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    embedding = Embedding(WORDS, DIM, optimizer=optim.adagrad(0.1))
    rows = embedding.table.optimizer()
    path, first = newest(folder), 0
    if path is None:
        materialize_module(model)
    else:
        checkpoint.load({"model": model}, path)  # not initialised before
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if path is not None:
        state = {"optimizer": optimizer, "table": embedding.table, "step": 0}
        checkpoint.load(state, path)
        first = int(state["step"]) + 1  # type: ignore[call-overload]
        print(f"rank {world.rank} resumes at step {first} from {os.path.basename(path)}")

    is_first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for step in range(first, STEPS):
        # The data of a step depends on nothing but the step and the rank.
        generator = torch.Generator().manual_seed(step * world.size + world.rank)
        words = torch.randint(WORDS, (BATCH,), generator=generator)
        loss = nn.functional.cross_entropy(model(embedding(words)), words % CLASSES)
        optimizer.zero_grad()
        rows.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if is_first_attempt and (world.rank, step) == (killed_rank, killed_step):
            print(f"rank {world.rank} is killed in step {step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        rows.step()
        embedding.table.sync()
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            state = {
                "model": model,
                "optimizer": optimizer,
                "table": embedding.table,
                "step": step,
            }
            saving = checkpoint.async_save(state, f"{folder}/step-{step}", keep=2)
    saving.result()  # the last one
    mean = loss.detach().clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    if world.rank == 0:
        print(f"loss {float(mean).hex()}", flush=True)
    embedding.close()
    dist.destroy_process_group()


def run(killed_rank: int, killed_step: int) -> float:
    """Run the whole job under torchrun, and return its last loss."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun = f"--standalone --nproc-per-node {RANKS} --max-restarts 2".split()
        command = [sys.executable, "-m", "torch.distributed.run", *torchrun, __file__]
        where = [folder, str(killed_rank), str(killed_step)]
        with subprocess.Popen([*command, *where], stdout=subprocess.PIPE, text=True) as job:
            assert job.stdout is not None
            output = ""
            for line in job.stdout:
                print(line, end="")
                output += line
        if job.returncode != 0:
            sys.exit(f"torchrun ended with exit code {job.returncode}")
    found = re.search(r"^loss (\S+)$", output, re.MULTILINE)
    assert found is not None
    if killed_step >= 0:
        assert "is killed in step" in output
        assert killed_step < SAVE_EVERY or "resumes at step" in output
    return float.fromhex(found[1])


def main(seed: int = 0) -> None:
    chosen = random.Random(seed)
    wanted = run(-1, -1)
    resumed = run(chosen.randrange(RANKS), chosen.randrange(2 * SAVE_EVERY, STEPS))
    print(f"uninterrupted: {wanted:.6f}, resumed: {resumed:.6f}")
    if resumed != wanted:
        sys.exit("the losses differ")


if __name__ == "__main__":
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        main(*map(int, sys.argv[1:]))

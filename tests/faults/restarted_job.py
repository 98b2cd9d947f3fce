"""A job for torchrun: ``sml``, a table and checkpoints. In each attempt but the last a rank is
killed: rank 1, or the one with the variable ``VICTIM``.

Arguments: a folder for checkpoints, ``torchrun`` or ``connect`` (who makes the store of the default
group), and for each attempt when the rank is killed; ``agent`` is a step in which its agent is
killed too.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist

import torchrelay.aggregation  # noqa: F401 - registers sml
from torchrelay import checkpoint
from torchrelay.aggregation import _native_planes
from torchrelay.errors import StorageError
from torchrelay.parameters import Embedding, Table, optim
from torchrelay.world import Meeting, Ranks, World

STEPS = 4


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, store: str, *moments: str) -> None:
    world = World.from_environment()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    is_victim = os.environ.get("VICTIM", str(world.rank)) == "1"
    moment = moments[attempt] if is_victim and attempt < len(moments) else ""
    if moment == "registered":
        Meeting._await_all = die  # type: ignore[assignment,method-assign]
    if moment == "joining":
        _native_planes.ShmPlane.__init__ = die  # type: ignore[assignment]
    if store == "torchrun":
        dist.init_process_group("sml")
    else:
        shared = world.connect(60)
        dist.init_process_group("sml", store=shared, rank=world.rank, world_size=world.size)
    if moment == "table":
        Ranks.agree = die  # type: ignore[assignment,method-assign]
    rule = optim.sgd(0.5)
    table = Table.create(16, 4, optimizer=rule, node_of_rank=lambda rank: rank)
    rows = table.optimizer()
    embedding = Embedding(16, 4, table=table)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    first = 0
    try:
        state: dict[str, Any] = {"model": model.state_dict(), "step": 0}
        checkpoint.load(state, checkpoint.latest(folder))
        first = state["step"] + 1
    except StorageError:
        pass
    for step in range(first, STEPS):
        model(embedding(torch.arange(8))).sum().backward()
        if moment in ("step", "agent") and step == 2:
            if moment == "agent":
                os.kill(int(os.environ["PARENT_PID"]), signal.SIGKILL)
            die()
        dense.step()
        rows.step()
        dense.zero_grad()
        rows.zero_grad()
        checkpoint.save({"model": model.state_dict(), "step": step}, f"{folder}/step-{step}")
    part = dist.new_group([0], backend="sml")
    if world.rank == 0:
        dist.all_reduce(torch.ones(1), group=part)
    print(f"rank {world.rank} of {world.size} did steps {first} to {STEPS}", flush=True)
    table.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A training job of four components: ``sml`` averages the gradients of a model that is built
without memory, an ``Embedding`` holds the rows of a table, and a checkpoint holds all of it::

    python examples/train.py
    torchrun --standalone --nproc-per-node 2 examples/train.py

Run it again, with another number of processes if you like: it goes on where it ended.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchrelay.checkpoint import latest, load, save
from torchrelay.deferred import deferred_init, materialize_module
from torchrelay.parameters import Embedding, optim

FOLDER = "checkpoints"
WORDS, DIM, CLASSES, BATCH, STEPS = 10_000, 32, 4, 256, 50


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, 64), nn.Tanh(), nn.Linear(64, CLASSES))


def main() -> None:
    dist.init_process_group("sml")
    torch.manual_seed(0)  # the same model on every rank
    dense = deferred_init(build)
    last = latest(FOLDER, None)  # None in the first run
    if last is None:
        materialize_module(dense)
    else:
        load({"dense": dense}, last)  # straight into memory, without initialising it
    model = DistributedDataParallel(dense)
    with Embedding(WORDS, DIM, optimizer=optim.adagrad(0.5)) as embedding:
        # Two optimizers: the owner of a row steps it, each rank its copy of the dense part.
        rows = embedding.table.optimizer()
        optimizer = torch.optim.Adam(dense.parameters(), lr=0.01)
        state = {"optimizer": optimizer, "table": embedding.table, "step": 0}
        if last is not None:
            load(state, last)
        first = int(str(state["step"]))
        for step in range(first, first + STEPS):
            generator = torch.Generator().manual_seed(
                step * dist.get_world_size() + dist.get_rank()
            )
            words = torch.randint(WORDS, (BATCH,), generator=generator)  # each rank its own
            loss = nn.functional.cross_entropy(model(embedding(words)), words % CLASSES)
            optimizer.zero_grad()
            rows.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            rows.step()
        embedding.table.sync()
        done = first + STEPS
        save({**state, "dense": dense, "step": done}, f"{FOLDER}/step-{done}", keep=2)
    if dist.get_rank() == 0:
        print(f"steps {first} to {done}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

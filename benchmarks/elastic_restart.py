"""A rank of a job that torchrun restarts, for bench_elastic.py: it saves each step in memory.

torchrun elastic_restart.py FOLDER STEP_S AWAY_S

Of ranks that are started again, the first is AWAY_S late. Prints what `bench_elastic.Job` reads.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from torchrelay.checkpoint import Checkpointer


def report(*what: object) -> None:
    os.write(1, f"{os.getpid()} {' '.join(map(str, what))}\n".encode())  # at once, beside others


def main() -> None:
    torch.set_num_threads(1)
    folder, step_s, away_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        time.sleep(away_s)
    report(0, 0, 0.0)
    dist.init_process_group("sml")
    model, step = torch.nn.Linear(100, 100), 0
    with Checkpointer(folder, memory=True) as checkpointer:
        state = {"model": model}
        step = checkpointer.load(state) or 0
        while True:
            for one in model.parameters():
                one.grad = torch.zeros_like(one)
                dist.all_reduce(one.grad)
            time.sleep(step_s)
            step += 1
            report(step, dist.get_world_size(), time.monotonic())
            checkpointer.save(state, step=step)


if __name__ == "__main__":
    main()

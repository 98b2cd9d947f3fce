"""A member of a job of torchft, for bench_elastic.py: it is run in an environment of torchft's own.

python elastic_torchft.py lighthouse                   # prints its address; ends with its input
python elastic_torchft.py member ADDRESS NAME STEP_S   # prints what `bench_elastic.Job` reads
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]
from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]

TIMEOUT = timedelta(seconds=20)


def lighthouse() -> None:
    """Serve with timeouts as short as the members of a small job allow."""
    server = LighthouseServer("127.0.0.1:0", 1, 100, 10, 500)
    print(server.address(), flush=True)
    sys.stdin.read()
    server.shutdown()


def member(address: str, name: str, step_s: str) -> None:
    torch.set_num_threads(1)
    model, pid = torch.nn.Linear(100, 100), os.getpid()
    print(pid, 0, 0, 0.0, flush=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(TIMEOUT),
        model.load_state_dict,
        model.state_dict,
        min_replica_size=1,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=name,
        hostname="127.0.0.1",
    )
    while True:
        manager.start_quorum()
        for one in model.parameters():
            one.grad = torch.zeros_like(one)
            manager.allreduce(one.grad).wait()
        time.sleep(float(step_s))
        if manager.should_commit():
            size, number = manager.num_participants(), manager.current_step()
            print(pid, number, size, time.monotonic(), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "lighthouse":
        lighthouse()
    else:
        member(*sys.argv[2:])

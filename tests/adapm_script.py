"""A script in the style of AdaPM's own example: a scheduler, and nodes with worker threads.

``python -m torchrelay.compat tests/adapm_script.py NODES [FAULT]``; FAULT is how the last node
fails: ``worker``, ``main`` or ``killed``. ``DMLC_PS_ROOT_PORT`` is a free port.
"""

import multiprocessing
import os
import signal
import sys
import threading
from typing import Any

import adapm  # type: ignore[import-not-found]
import numpy as np
import torch

NUM_KEYS, LENGTH, NUM_WORKERS = 60, 6, 2
NUM_NODES = int(sys.argv[1])
FAULT = sys.argv[2] if len(sys.argv) > 2 else ""


def run_worker(worker_id: int, server: Any, sums: list[float]) -> None:
    kv = adapm.Worker(worker_id, server)
    keys = torch.LongTensor([1, 2, 3, 4])
    everyone = NUM_NODES * NUM_WORKERS

    kv.begin_setup()
    if server.my_rank() == 0 and worker_id == 0:
        everything = torch.arange(NUM_KEYS)
        kv.wait(kv.set(everything, vals=torch.zeros(NUM_KEYS, 2, LENGTH // 2), **{"async": True}))
    kv.end_setup()
    assert kv.get_key_size() == kv.get_key_size(key_id=3) == LENGTH and kv.num_keys == NUM_KEYS

    # Tensors of three dimensions, arrays of one, announced and not.
    kv.wait(kv.intent(keys=keys, start=1, end=3))
    kv.advance_clock()
    kv.push(keys=keys, vals=torch.ones(4, 2, LENGTH // 2))
    timestamp = kv.push(np.array([1, 2, 3, 4]), np.ones(4 * LENGTH, dtype=np.float32), True)
    kv.wait(timestamp)
    if FAULT and server.my_rank() == NUM_NODES - 1:
        if FAULT == "worker" and worker_id == 0:
            raise ValueError("the data is broken")
        if FAULT == "main" or (FAULT == "killed" and worker_id == 1):
            return
    kv.wait_replica_sync()
    kv.barrier()
    pulled = np.zeros((2, 2, LENGTH // 2), dtype=np.float32)
    kv.wait(kv.pull(keys=np.array([1, 4]), vals=pulled, **{"async": True}))
    assert (pulled == 2 * everyone).all(), pulled

    sample = kv.prepare_sample(K=8, start=kv.current_clock(), end=kv.current_clock() + 1)
    drawn, values = torch.empty(4, dtype=torch.int64), torch.empty(4, LENGTH)
    for _ in range(2):
        kv.wait(kv.pull_sample(id=sample, keys=drawn, vals=values))
        assert ((drawn >= 10) & (drawn < 20)).all() and not values.any()
    kv.waitall()
    kv.barrier()
    kv.finalize()
    sums.append(float(pulled.sum()))


def init_node() -> None:
    os.environ["DMLC_ROLE"] = "server"
    adapm.setup(NUM_KEYS, NUM_WORKERS, use_techniques="all")
    server = adapm.Server(value_lengths=torch.ones(NUM_KEYS) * LENGTH)
    server.enable_sampling_support(
        scheme="naive", with_replacement=True, distribution="uniform", min=10, max=20
    )
    server.barrier()
    sums: list[float] = []
    threads = [
        threading.Thread(target=run_worker, args=(w, server, sums)) for w in range(NUM_WORKERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if FAULT and server.my_rank() == NUM_NODES - 1:
        print(f"node {server.my_rank()} fails\n", end="", flush=True)
        if FAULT == "main":
            raise ValueError("the data is broken")
        if FAULT == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    server.shutdown()
    assert len(sums) == NUM_WORKERS, "a worker has failed"
    print(f"node {server.my_rank()}: {sum(sums):g}\n", end="", flush=True)


def main() -> None:
    os.environ.update(DMLC_NUM_SERVER=str(NUM_NODES), DMLC_PS_ROOT_URI="127.0.0.1")
    os.environ["DMLC_ROLE"] = "scheduler"
    scheduler = multiprocessing.Process(target=adapm.scheduler, args=(NUM_KEYS, NUM_WORKERS))
    processes = [multiprocessing.Process(target=init_node) for _ in range(NUM_NODES)]
    for process in [scheduler, *processes]:
        process.start()
    for process in [scheduler, *processes]:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in [scheduler, *processes]))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()

"""Scripts written for AdaPM, under its own variables and under a launcher's."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from torchrelay.world import World


def _train(adapm: Any, world_size: int) -> None:
    keys_total, length = 120, 10
    adapm.setup(keys_total, 1, "all", 2)
    server = adapm.Server(torch.ones(keys_total, dtype=torch.int64) * length)
    worker = adapm.Worker(0, server)
    assert server.my_rank() in range(world_size)
    worker.begin_setup()
    if server.my_rank() == 0:
        worker.set(torch.arange(keys_total), torch.zeros(keys_total * length))
    worker.end_setup()
    for make in (torch.LongTensor, np.array):
        keys = make([1, 2, 3, 4])
        values = torch.ones(40) if make is torch.LongTensor else np.ones(40, dtype=np.float32)
        worker.intent(keys, 2, 3)
        worker.advance_clock()
        timestamp = worker.push(keys, values, True)
        worker.wait(timestamp)
        worker.wait_sync()
        worker.barrier()
        worker.pull(keys, values)
    assert (values == 2 * world_size).all()
    assert worker.current_clock() == 2
    assert worker.get_key_size(1) == worker.get_key_size() == length
    assert worker.num_keys == keys_total
    worker.waitall()
    worker.barrier()
    worker.finalize()
    server.barrier()
    server.shutdown()


@pytest.mark.processes(2)
def test_under_a_launcher(world: World) -> None:
    from torchrelay.compat import adapm

    _train(adapm, world.size)


@pytest.mark.processes(3)
def test_under_the_originals_variables(world: World) -> None:
    from torchrelay.compat import adapm

    assert world.master_port is not None
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name)
    os.environ.update(DMLC_NUM_SERVER="2", DMLC_PS_ROOT_URI="127.0.0.1")
    os.environ["DMLC_PS_ROOT_PORT"] = str(world.master_port)
    os.environ["TORCHRELAY_PARAMETERS_TIMEOUT_S"] = "inf"
    if world.rank == 2:
        os.environ["DMLC_ROLE"] = "scheduler"
        adapm.scheduler(120, 1)
    else:
        os.environ["DMLC_ROLE"] = "server"
        _train(adapm, 2)

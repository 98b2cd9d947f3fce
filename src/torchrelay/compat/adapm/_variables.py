"""AdaPM's variables (``DMLC_*``), by which its servers find each other."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from torchrelay import config
from torchrelay.errors import ConfigError
from torchrelay.parameters._topology import Topology, topology_of
from torchrelay.world import Ranks, World

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["dmlc_variables", "of_servers"]


def of_servers(num_threads: int, techniques: str, settings: config.Parameters) -> Topology:
    """Return the topology of the original's variables (``DMLC_*``), else of a launcher.

    Each process is a node.

    Raises:
        ConfigError: a variable is missing or not a number.
    """
    import torch.distributed as dist  # noqa: PLC0415

    if "DMLC_NUM_SERVER" in os.environ:
        size, address, port = dmlc_variables()
        timeout = timedelta(seconds=settings.timeout_s)
        store: Store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
        rank = store.add("torchrelay/parameters/arrived", 1) - 1
        if rank >= size:
            raise ConfigError(f"DMLC_NUM_SERVER={size}, but this is server number {rank + 1}")
    else:
        world = World.from_environment()
        rank, size, address = world.rank, world.size, world.master_addr
        store = world.connect(settings.timeout_s)
    return topology_of(
        Ranks(store, rank, size),
        address,
        node_of_rank=lambda rank: rank,
        workers_per_process=num_threads,
        techniques=techniques,
        settings=settings,
    )


def dmlc_variables() -> tuple[int, str, int]:
    """Return number of nodes, and address and port of the scheduler, from ``DMLC_*``."""
    values = []
    for name in ("DMLC_NUM_SERVER", "DMLC_PS_ROOT_PORT"):
        text = os.environ.get(name, "")
        if not text.isdigit():
            raise ConfigError(
                f"{name}={text!r}: it must be a whole number, the same for all processes"
            )
        values.append(int(text))
    return values[0], os.environ.get("DMLC_PS_ROOT_URI", "127.0.0.1"), values[1]

"""AdaPM's variables (``DMLC_*``), by which its servers find each other."""

from __future__ import annotations

import os
from datetime import timedelta

from torchrelay import config
from torchrelay.errors import ConfigError
from torchrelay.parameters._rendezvous import address_in, node_network, topology_of
from torchrelay.parameters._topology import Topology
from torchrelay.world import World

__all__ = ["dmlc_variables", "of_servers"]


def of_servers(num_threads: int, techniques: str, settings: config.Parameters) -> Topology:
    """Return the topology of the original's variables (``DMLC_*``), else of a launcher.

    Each process is a node.

    Raises:
        ConfigError: a variable is missing or not a number.
    """
    import torch.distributed as dist  # noqa: PLC0415

    if "DMLC_NUM_SERVER" not in os.environ:
        world = World.from_environment()
        node_of_rank = None if world.size == 1 else (lambda rank: rank)
        return topology_of(
            world,
            world.connect(settings.timeout_s),
            node_of_rank=node_of_rank,
            workers_per_process=num_threads,
            techniques=techniques,
            settings=settings,
        )
    num_nodes, address, port = dmlc_variables()
    store = dist.TCPStore(
        address,
        port,
        is_master=False,
        timeout=timedelta(seconds=settings.timeout_s),
    )
    messages = config.load(config.TransportSettings)
    node = store.add("torchrelay/parameters/arrived", 1) - 1
    if node >= num_nodes:
        raise ConfigError(f"DMLC_NUM_SERVER={num_nodes}, but this is server number {node + 1}")
    solo = Topology(node, num_nodes, store=store, settings=settings, transport=messages)
    interface = address_in(solo, address)
    return Topology(
        node,
        num_nodes,
        workers_per_node=num_threads,
        techniques=techniques,
        store=store,
        network=node_network(store, node, 0, interface, messages),
        interface=interface,
        settings=settings,
        transport=messages,
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

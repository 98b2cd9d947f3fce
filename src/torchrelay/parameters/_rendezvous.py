"""The nodes of a launcher's processes, found through the job's store."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchrelay import _native, config, transport
from torchrelay._addresses import DISCARD_PORT, address_towards
from torchrelay.errors import ArgumentError, ConfigError
from torchrelay.parameters._topology import Topology
from torchrelay.world import World, host_identity

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["interface_towards", "node_network", "topology_of"]


def node_network(
    store: Store, node: int, member: int, interface: str, settings: config.TransportSettings
) -> Callable[[], _native.Network]:
    def open_network() -> _native.Network:
        first = 0 if node == member == 0 else 1
        token = transport.session_token(store, first, "parameters", settings.connect_timeout_s)
        make = transport.zmq_network if settings.uses_zeromq else transport.plain_network
        return make(settings, token=token, interface=interface)

    return open_network


def _network_identity() -> str:
    """Return a string that is equal for processes in one network namespace."""
    return f"{host_identity()}/{os.stat('/proc/self/ns/net').st_ino}"


def interface_towards(host: str) -> str:
    """Return the address of this host from which packets to ``host`` are sent."""
    try:
        return address_towards((socket.gethostbyname(host), DISCARD_PORT))
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR={host!r} cannot be reached from this host: {error}"
        ) from error


def topology_of(
    world: World,
    store: Store,
    *,
    node_of_rank: Callable[[int], int] | None = None,
    workers_per_process: int = 1,
    techniques: str = "all",
    settings: config.Parameters | None = None,
) -> Topology:
    """Return the topology of a launcher's processes. Blocks.

    The processes of one host form a node, unless ``node_of_rank`` assigns them.

    Raises:
        ArgumentError: nodes have unequal numbers of processes, or one spans hosts.
        OperationTimeoutError: a process is missing.
    """
    settings = settings or config.load(config.Parameters)
    solo = Topology(num_nodes=world.size, node=world.rank, store=store, settings=settings)
    prefix = "torchrelay/parameters/host"
    mine = {
        "host": host_identity(),
        "network": _network_identity(),
        "group": None if node_of_rank is None else node_of_rank(world.rank),
    }
    solo.publish(f"{prefix}/{world.rank}", mine)
    ranks = range(world.size)
    places = solo.collect([f"{prefix}/{rank}" for rank in ranks], ranks, "the host names")
    groups = [place["host"] if place["group"] is None else place["group"] for place in places]
    names = list(dict.fromkeys(groups))
    members = [[rank for rank in ranks if groups[rank] == name] for name in names]
    if len({len(group) for group in members}) != 1:
        raise ArgumentError(
            f"nodes have unequal numbers of processes: ranks {members}; give each the same"
        )
    for group in members:
        if len({places[rank]["host"] for rank in group}) != 1:
            raise ArgumentError(f"ranks {group} form a node but do not share a host")
    node = names.index(groups[world.rank])
    one_network = len({place["network"] for place in places}) == 1
    interface = "127.0.0.1" if one_network else interface_towards(world.master_addr)
    member = members[node].index(world.rank)
    return Topology(
        node,
        len(names),
        member,
        len(members[node]),
        workers_per_node=len(members[node]) * workers_per_process,
        techniques=techniques,
        store=store,
        network=node_network(store, node, member, interface, solo.transport),
        ranks=tuple(rank for group in members for rank in group),
        settings=settings,
        transport=solo.transport,
    )

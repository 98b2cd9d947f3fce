"""The nodes of a launcher's processes, found through the job's store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchrelay import _native, config, transport
from torchrelay._addresses import address_for_peers
from torchrelay.errors import ArgumentError
from torchrelay.parameters._topology import Topology
from torchrelay.world import World, host_identity

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["address_in", "node_network", "topology_of"]


def node_network(
    store: Store, node: int, member: int, interface: str, settings: config.TransportSettings
) -> Callable[[], _native.Network]:
    def open_network() -> _native.Network:
        first = 0 if node == member == 0 else 1
        token = transport.session_token(store, first, "parameters", settings.connect_timeout_s)
        make = transport.zmq_network if settings.uses_zeromq else transport.plain_network
        return make(settings, token=token, interface=interface)

    return open_network


def address_in(topology: Topology, server: str) -> str:
    """Return the address at which the other processes reach this one. Collective.

    Args:
        topology: of all processes, each a node.
        server: the host of the store.
    """
    return address_for_peers(
        lambda step, mine: topology.gather(
            f"torchrelay/parameters/{step}",
            topology.node,
            topology.num_nodes,
            mine,
            "the addresses",
        ),
        topology.name_of(topology.node),
        server,
        topology.transport.interface,
    )


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
    ranks = tuple(range(world.size))
    solo = Topology(world.rank, world.size, store=store, ranks=ranks, settings=settings)
    mine = {
        "host": host_identity(),
        "group": None if node_of_rank is None else node_of_rank(world.rank),
    }
    places = solo.gather(
        "torchrelay/parameters/host", world.rank, world.size, mine, "the host names", "ranks"
    )
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
    member = members[node].index(world.rank)
    interface = address_in(solo, world.master_addr)
    return Topology(
        node,
        len(names),
        member,
        len(members[node]),
        workers_per_node=len(members[node]) * workers_per_process,
        techniques=techniques,
        store=store,
        network=node_network(store, node, member, interface, solo.transport),
        interface=interface,
        ranks=tuple(rank for group in members for rank in group),
        settings=settings,
        transport=solo.transport,
    )

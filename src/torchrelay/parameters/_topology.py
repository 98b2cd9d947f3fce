"""The nodes of a job, their processes, and the network between them.

A node is one process, or several of one host; the first of them, its leader, holds the slab and
runs the threads that serve other nodes. :meth:`Topology.in_memory` makes nodes that are threads of
one process.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from torchrelay import _native, _torch, config, transport
from torchrelay._addresses import address_for_peers
from torchrelay._communicators import open_group
from torchrelay._group import Group
from torchrelay._platform import need_core
from torchrelay._waiting import nothing_to_check
from torchrelay.errors import ArgumentError, ConfigError, PeerLostError
from torchrelay.world import Meeting, Ranks, World, host_identity

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

__all__ = ["Topology", "meet", "topology_of"]

TECHNIQUES = tuple(techniques.name for techniques in _native.Techniques)
_NEWS_HEARTBEATS = 4  # a node that refuses connections is lost after two
_EVERY_PROCESS = "every process must make this call; do not put it inside `if rank == 0:`"


@dataclass
class Topology:
    """The nodes of a job, and this process's place among them.

    Args:
        ranks: the processes of all nodes.
        nodes: the ranks of each node, its leader first; all nodes have equally many.
        workers_per_node: the workers of each node, over all its processes; barriers wait for all.
        network: creates this process's network; called once.
        interface: the address at which the other processes reach this one.
        hosts: the identity of each rank's host; default: they share one.
    """

    ranks: Ranks = field(default_factory=Ranks)
    nodes: Sequence[Sequence[int]] = ((0,),)
    workers_per_node: int = 1
    techniques: str = "all"
    network: Callable[[], _native.Network] | None = None
    interface: str = "127.0.0.1"
    hosts: Sequence[str] = ()
    settings: config.Parameters = field(default_factory=lambda: config.load(config.Parameters))
    transport: config.TransportSettings = field(
        default_factory=lambda: config.load(config.TransportSettings)
    )
    _tables: itertools.count[int] = field(default_factory=itertools.count)
    _open_tables: int = 0

    def __post_init__(self) -> None:
        need_core("a table")
        if self.techniques not in TECHNIQUES:
            raise ArgumentError(
                f"techniques={self.techniques!r}: the choices are {', '.join(TECHNIQUES)}"
            )
        if self.workers_per_node < 1:
            raise ArgumentError(f"a node needs at least one worker, not {self.workers_per_node}")
        self.node, mine = next(
            (i, ranks) for i, ranks in enumerate(self.nodes) if self.ranks.rank in ranks
        )
        self.member = mine.index(self.ranks.rank)

    @classmethod
    def in_memory(
        cls, num_nodes: int, network: _native.Network | None = None, **fields: Any
    ) -> list[Topology]:
        """Create ``num_nodes`` nodes for threads of this process, by default over memory."""
        import torch.distributed as dist  # noqa: PLC0415 - importing it takes long, and one process needs none of it

        shared = network or _native.MemoryNetwork()
        store, nodes = dist.HashStore(), [[node] for node in range(num_nodes)]
        return [
            cls(Ranks(store, node, num_nodes), nodes, network=lambda: shared, **fields)
            for node in range(num_nodes)
        ]

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def members(self) -> int:
        """The number of processes of each node."""
        return len(self.nodes[0])

    @property
    def workers_per_process(self) -> int:
        return self.workers_per_node // self.members

    @cached_property
    def opened_network(self) -> _native.Network | None:
        """This process's network, one for all tables; ``None`` for one node."""
        if self.num_nodes == 1:
            return None
        if self.network is None:
            raise ArgumentError(f"a topology of {self.num_nodes} nodes needs a network")
        return self.network()

    @cached_property
    def key_name(self) -> str:
        return transport.key_name(transport.read_key(self.transport))

    @cached_property
    def group(self) -> Group:
        """The processes' group for collectives. Creation is collective, and blocks."""
        return open_group(
            self.ranks,
            self.hosts or [""] * self.ranks.size,
            self.transport,
            self.interface,
            self.settings.timeout_s,
            config.load(config.Aggregation),
        )

    def close(self, cause: PeerLostError | None = None) -> None:
        """Close a table. The last one leaves the group: processes that wait for this one raise
        PeerLostError, with the ``cause``, if there is one.
        """
        self._open_tables -= 1
        group = self.__dict__.get("group")
        if group is not None and cause is not None:
            lost = [self.ranks.names[rank] for node in cause.ranks for rank in self.nodes[node]]
            group.report(str(cause), lost)
        if group is not None and self._open_tables == 0:
            group.close()

    def next_table(self) -> str:
        """Return a name for the next table; processes create tables in the same order. Each is
        followed by one :meth:`close`.
        """
        self._open_tables += 1
        return f"table/{next(self._tables)}"

    def gather(
        self, step: str, mine: Any, call: str, check: Callable[[], None] = nothing_to_check
    ) -> list[Any]:
        """Return what each process passes; see :meth:`torchrelay.world.Ranks.gather`."""
        waiting = self._waiting(call, check)
        return self.ranks.gather(step, mine, self.settings.timeout_s, **waiting)

    @contextlib.contextmanager
    def opening(self, table: str) -> Iterator[Callable[..., list[Any]]]:
        """Notify the others of an error of this process alone in this block, and raise theirs.

        Yields:
            What :meth:`gather` is elsewhere.
        """
        ranks = self.ranks.with_keys(table)  # the next table may be opened after an error
        waiting = self._waiting("open the table", nothing_to_check)
        with ranks.joining():
            yield partial(ranks.gather, timeout_s=self.settings.timeout_s, **waiting)

    def barrier(
        self,
        step: str,
        call: str,
        check: Callable[[], None],
        check_missing: Callable[[Sequence[int]], None],
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """Wait for all processes; see :meth:`torchrelay.world.Ranks.barrier`."""
        waiting = self._waiting(call, check) | {"check_missing": check_missing}
        self.ranks.barrier(step, self.settings.timeout_s, part=part, **waiting)

    def _waiting(self, call: str, check: Callable[[], None]) -> dict[str, Any]:
        news_s = _NEWS_HEARTBEATS * self.transport.heartbeat_s
        return {"call": call, "hint": _EVERY_PROCESS, "check": check, "news_s": news_s}


def topology_of(
    ranks: Ranks,
    server: str,
    *,
    node_of_rank: Callable[[int], int] | None = None,
    workers_per_process: int = 1,
    techniques: str = "all",
    settings: config.Parameters | None = None,
) -> Topology:
    """Return the topology of the processes ``ranks``. Blocks.

    The processes of one host form a node, unless ``node_of_rank`` assigns them.

    Args:
        server: the host of the store.

    Raises:
        ArgumentError: nodes have unequal numbers of processes, or one spans hosts.
        OperationTimeoutError: a process is missing.
        UnavailableError: ``node_of_rank`` raises on another process; on that one its own exception.
    """
    settings = settings or config.load(config.Parameters)
    messages = config.load(config.TransportSettings)
    try:
        group = None if node_of_rank is None else operator.index(node_of_rank(ranks.rank))
    except Exception as error:  # of this process alone
        ranks.refuse(ArgumentError(f"node_of_rank({ranks.rank}) raised {error!r}"))
        raise
    gather = partial(ranks.gather, timeout_s=settings.timeout_s)
    places = gather("place", [host_identity(), group, secrets.token_hex(transport.TOKEN_BYTES)])
    hosts = [host for host, _, _ in places]
    members: dict[Any, list[int]] = {}
    for rank, (host, group, _) in enumerate(places):
        members.setdefault(host if group is None else group, []).append(rank)
    nodes = list(members.values())
    if len({len(node) for node in nodes}) != 1:
        raise ArgumentError(
            f"nodes have unequal numbers of processes: ranks {nodes}; give each the same"
        )
    for node in nodes:
        if len({hosts[rank] for rank in node}) != 1:
            raise ArgumentError(f"ranks {node} form a node but do not share a host")
    with ranks.joining():
        interface = address_for_peers(gather, ranks.name, server, messages.interface)
    token = bytes.fromhex(places[0][2])
    return Topology(
        ranks,
        nodes,
        workers_per_node=len(nodes[0]) * workers_per_process,
        techniques=techniques,
        network=partial(transport.network, messages, token=token, interface=interface),
        interface=interface,
        hosts=hosts,
        settings=settings,
        transport=messages,
    )


def meet(
    name: str,
    techniques: str,
    node_of_rank: Callable[[int], int] | None,
    group: ProcessGroup | None,
) -> Topology:
    """Return the topology of the processes that share the table ``name``. Collective; blocks.

    They are those of ``group``, else of the default process group, else of the launcher.

    Raises:
        ArgumentError: this process is not in ``group``, or nodes differ in size or span hosts.
        ConfigError: the default process group contradicts the launcher's variables.
        OperationTimeoutError: a process is missing.
    """
    import torch.distributed as dist  # noqa: PLC0415 - importing it takes long

    need_core("a table")
    settings = config.load(config.Parameters)
    world, store = _job(group, settings.timeout_s)
    # A name may be used again, after its table was closed or torchrun restarted the processes.
    meeting = Meeting(dist.PrefixStore(name, store), world.rank, world.size, settings.timeout_s)
    ranks = Ranks(meeting.store, world.rank, world.size)
    return topology_of(
        ranks,
        world.master_addr,
        node_of_rank=node_of_rank,
        techniques=techniques,
        settings=settings,
    )


def _job(group: ProcessGroup | None, timeout_s: float) -> tuple[World, Store]:
    import torch.distributed as dist  # noqa: PLC0415

    launched = World.from_environment()
    if group is None and not dist.is_initialized():
        return launched, launched.connect(timeout_s)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ArgumentError("this process is not in the process group that was given")
    if group is None and launched.size > 1 and (launched.rank, launched.size) != (rank, size):
        raise ConfigError(
            f"this process is rank {rank} of {size} in the default process group, but rank "
            f"{launched.rank} of {launched.size} by the variables of {launched.launcher}; pass "
            "process_group= to choose"
        )
    store: Store = _torch.group_store(group or dist.group.WORLD)
    host = _torch.store_host(store) or launched.master_addr
    return World(rank, size, launcher="a process group", master_addr=host), store

"""Who is who: nodes, their processes, and how they find each other.

A node is one process, or several of one host; the first of them, its leader, holds the slab and runs the
threads that serve other nodes. Processes meet in a torch store. :func:`start` does all of it under a launcher;
:meth:`Topology.in_memory` makes nodes that are threads of one process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from torchrelay import _native, _torch, config, transport
from torchrelay.errors import (
    ArgumentError,
    ConfigError,
    MismatchError,
    PeerLostError,
    TorchRelayError,
)
from torchrelay.parameters._meeting import Marks, nothing_to_check, wait_for_others
from torchrelay.parameters.contract import KeyInit, UpdateRule
from torchrelay.world import World, host_identity

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

    from torchrelay.parameters.server import Server
    from torchrelay.parameters.worker import Worker

__all__ = ["Place", "Topology", "start"]

TECHNIQUES = ("all", "replication_only", "relocation_only")
_POLL_S = 0.01
_NEWS_HEARTBEATS = 4  # a node that refuses connections is lost after two
_LONGEST_PARTING_S = 5.0
_PORT_OF_NOWHERE = 9  # discard: connecting a datagram socket to it sends nothing, but shows the interface


@dataclass
class Topology:
    """This process's place among all nodes.

    Args:
        node: this process's node, of ``num_nodes``.
        member: this process among its node's ``members``; 0 is the leader.
        workers_per_node: how many workers each node has, over all its processes; barriers wait for all.
        store: where processes meet; ``None`` where there is one.
        network: makes this process's network; asked once.
        ranks: of the processes of all nodes, in order of nodes; empty: they have none.
    """

    node: int = 0
    num_nodes: int = 1
    member: int = 0
    members: int = 1
    workers_per_node: int = 1
    techniques: str = "all"
    store: Store | None = None
    network: Callable[[], _native.Network] | None = None
    ranks: tuple[int, ...] = ()
    settings: config.Parameters = field(default_factory=lambda: config.load(config.Parameters))
    transport: config.TransportSettings = field(default_factory=lambda: config.load(config.TransportSettings))
    _network: _native.Network | None = None
    _tables: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        if self.techniques not in TECHNIQUES:
            raise ArgumentError(f"techniques={self.techniques!r}: the choices are {', '.join(TECHNIQUES)}")
        if self.workers_per_node < 1:
            raise ArgumentError(f"a node needs at least one worker, not {self.workers_per_node}")

    @classmethod
    def in_memory(
        cls, num_nodes: int, network: _native.Network | None = None, **fields: Any
    ) -> list[Topology]:
        """``num_nodes`` nodes for threads of this process, over one network, by default in memory."""
        import torch.distributed as dist  # noqa: PLC0415 - importing it takes long, and one process needs none of it

        shared = network or _native.MemoryNetwork()
        store = dist.HashStore()  # type: ignore[attr-defined]
        return [
            cls(node, num_nodes, store=store, network=lambda: shared, **fields) for node in range(num_nodes)
        ]

    def open_network(self) -> _native.Network | None:
        """This process's network, one for all tables; ``None`` where there is one node."""
        if self._network is None and self.num_nodes > 1:
            if self.network is None:
                raise ArgumentError(f"a topology of {self.num_nodes} nodes needs a network")
            self._network = self.network()
        return self._network

    def next_table(self) -> str:
        """A name for the next table; processes make their tables in the same order."""
        return f"torchrelay/parameters/{next(self._tables)}"

    def publish(self, key: str, value: Any) -> None:
        if self.store is not None:
            self.store.set(key, json.dumps(value))

    def name_of(self, process: int) -> str:
        """What users call the process with this index among those of all nodes."""
        if self.ranks:
            return f"rank {self.ranks[process]}"
        node, member = divmod(process, self.members)
        return f"node {node}" if self.members == 1 else f"process {member} of node {node}"

    @property
    def process(self) -> int:
        """The index of this process among those of all nodes."""
        return self.node * self.members + self.member

    def collect(
        self,
        keys: Sequence[str],
        owners: Sequence[int],
        what: str,
        kind: str = "nodes",
        check: Callable[[], None] = nothing_to_check,
    ) -> list[Any]:
        """The values of ``keys``, each published by the one in ``owners``; waits for them.

        Raises:
            OperationTimeoutError: some did not come; ``ranks`` names their owners.
            PeerLostError: as ``check`` says.
        """
        store = self.store
        assert store is not None

        def sentence(missing: Sequence[int], elapsed_s: float) -> str:
            return (
                f"{self.name_of(self.process)}: {what} of {kind} {list(missing)} did not come within "
                f"{elapsed_s:.1f} s; did they start, did each get its own number, and do all make this call?"
            )

        with self._store_in_use(f"waiting for {what}", check):
            wait_for_others(
                lambda: bool(store.check(list(keys))),
                lambda: [o for key, o in zip(keys, owners, strict=True) if not store.check([key])],
                sentence,
                check,
                self.settings.timeout_s,
            )
            return [json.loads(store.get(key)) for key in keys]

    def gather(
        self,
        key: str,
        index: int,
        count: int,
        mine: Any,
        what: str,
        kind: str = "processes",
        check: Callable[[], None] = nothing_to_check,
    ) -> list[Any]:
        """The values that ``count`` processes gave for ``key``; this one is ``index``. Waits for all.

        Raises:
            OperationTimeoutError: some did not come; ``ranks`` names their indices.
            PeerLostError: as ``check`` says.
        """
        if count == 1:
            return [mine]
        self.publish(f"{key}/{index}", mine)
        return self.collect([f"{key}/{i}" for i in range(count)], range(count), what, kind, check)

    def agree(self, key: str, mine: dict[str, str]) -> None:
        """Compares the description ``mine`` of a table with those of all processes.

        Raises:
            MismatchError: one differs; on every process.
            OperationTimeoutError: a process did not come.
        """
        processes = self.num_nodes * self.members
        kind = "nodes" if self.members == 1 else "processes"
        others = self.gather(key, self.process, processes, mine, "the table", kind)
        for index, other in enumerate(others):
            different = [
                f"{name} is {mine[name]} here, {other.get(name)} there"
                for name in mine
                if mine[name] != other.get(name)
            ]
            if different:
                self.part(f"{key}/refused", processes)  # the first process may serve the store
                node, member = divmod(index, self.members)
                raise MismatchError(
                    f"node {self.node} (process {self.member}) and node {node} (process {member}) made different "
                    f"tables: {'; '.join(different)}"
                )

    def barrier(
        self,
        name: str,
        generation: int,
        participants: int,
        check: Callable[[], None],
        *,
        index: int = 0,
        calls: str = "",
        missing: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> None:
        """Waits until ``participants`` have come to ``generation`` of barrier ``name``.

        Args:
            check: raises PeerLostError if a node was lost.
            index: this participant; participants are spread evenly over the processes, in order.
            calls: the calls that lead here, for messages.
            missing: may raise for participants that will not come.

        Raises:
            OperationTimeoutError: not all came; ``ranks`` names those, or their nodes where there are no ranks.
            PeerLostError: a node died meanwhile (``check`` says so), or the store did.
        """
        if participants == 1:
            return
        store = self.store
        assert store is not None
        counter, gate = f"{name}/{generation}", f"{name}/{generation}/open"
        marks = Marks(store, counter, index, participants)
        per_process = max(1, participants // (self.num_nodes * self.members))

        def absent() -> Sequence[int] | None:
            without = marks.missing()
            if store.check([gate]) or len(without) != participants - store.add(counter, 0):
                return None  # some have come, and not yet waited long enough to leave a mark
            missing(without)
            processes = dict.fromkeys(i // per_process for i in without)
            return [self.ranks[i] if self.ranks else i // self.members for i in processes]

        def sentence(ranks: Sequence[int], elapsed_s: float) -> str:
            who = f": {'ranks' if self.ranks else 'nodes'} {list(ranks)}" if ranks else ""
            return (
                f"{self.name_of(self.process)}: {participants - store.add(counter, 0)} of {participants} did not "
                f"come to {calls or name} within {elapsed_s:.1f} s{who}; every process must make this call, so none "
                "may stand under `if rank == 0:`"
            )

        with self._store_in_use(f"barrier {name}", check):
            if store.add(counter, 1) == participants:
                store.set(gate, "1")
                if generation > 0:  # everybody has left the one before, or could not be here
                    store.delete_key(f"{name}/{generation - 1}")
                    store.delete_key(f"{name}/{generation - 1}/open")
                return
            wait_for_others(
                lambda: bool(store.check([gate])), absent, sentence, check, self.settings.timeout_s
            )
            marks.clear()

    @contextlib.contextmanager
    def _store_in_use(self, what: str, check: Callable[[], None]) -> Iterator[None]:
        """Name the cause if the store goes: its process may have left because of another, as ``check`` then says."""
        started_s = time.monotonic()
        try:
            yield
        except TorchRelayError:
            raise
        except RuntimeError as error:  # the store's errors are RuntimeErrors
            elapsed_s = time.monotonic() - started_s
            deadline_s = time.monotonic() + _NEWS_HEARTBEATS * self.transport.heartbeat_s
            while time.monotonic() < deadline_s:
                check()
                time.sleep(_POLL_S)
            raise PeerLostError(
                f"node {self.node}: the store where processes meet is gone after {elapsed_s:.1f} s in {what}; has its "
                f"process ended? ({error})"
            ) from error

    def part(self, name: str, participants: int) -> None:
        """After the last barrier: the first process, which may serve the store, leaves when all others have."""
        if participants == 1 or self.store is None:
            return
        with contextlib.suppress(RuntimeError):  # the store is gone: so is whoever would have waited
            gone = self.store.add(f"{name}/left", 1)
            deadline_s = time.monotonic() + _LONGEST_PARTING_S
            while self.node == self.member == 0 and gone < participants and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
                gone = self.store.add(f"{name}/left", 0)


@dataclass(frozen=True)
class Place:
    """What :func:`start` made: this process's part of a table, and its worker."""

    server: Server
    worker: Worker
    world: World


def _node_network(
    store: Store, node: int, member: int, interface: str, settings: config.TransportSettings
) -> Callable[[], _native.Network]:
    def open_network() -> _native.Network:
        first = 0 if node == member == 0 else 1
        token = transport.session_token(store, first, "parameters", settings.connect_timeout_s)
        make = transport.zmq_network if settings.uses_zeromq else transport.plain_network
        return make(settings, token=token, interface=interface)

    return open_network


def _network_identity() -> str:
    """Equal for processes that have the same network interfaces; containers of one host may have their own."""
    return f"{host_identity()}/{os.stat('/proc/self/ns/net').st_ino}"


def interface_towards(host: str) -> str:
    """The address of this host that packets to ``host`` leave from."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((socket.gethostbyname(host), _PORT_OF_NOWHERE))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"MASTER_ADDR={host!r} cannot be reached from this host: {error}") from error


def of_world(
    world: World,
    store: Store,
    *,
    node_of_rank: Callable[[int], int] | None = None,
    workers_per_process: int = 1,
    techniques: str = "all",
    settings: config.Parameters | None = None,
) -> Topology:
    """The topology of a launcher's processes: those of one host form a node, or as ``node_of_rank`` says.

    Raises:
        ArgumentError: nodes have unequal numbers of processes, or one spans hosts.
        OperationTimeoutError: a process did not come.
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
        raise ArgumentError(f"nodes have unequal numbers of processes: ranks {members}; give each the same")
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
        network=_node_network(store, node, member, interface, solo.transport),
        ranks=tuple(rank for group in members for rank in group),
        settings=settings,
        transport=solo.transport,
    )


def of_servers(num_threads: int, techniques: str, settings: config.Parameters) -> Topology:
    """The topology of the original's variables (``DMLC_*``) or, without them, of a launcher's: each process a node.

    Raises:
        ConfigError: a variable is missing or no number.
    """
    import torch.distributed as dist  # noqa: PLC0415

    if "DMLC_NUM_SERVER" not in os.environ:
        world = World.from_environment()
        node_of_rank = None if world.size == 1 else (lambda rank: rank)
        return of_world(
            world,
            world.connect(settings.timeout_s),
            node_of_rank=node_of_rank,
            workers_per_process=num_threads,
            techniques=techniques,
            settings=settings,
        )
    num_nodes, address, port = dmlc_variables()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        is_master=False,
        timeout=timedelta(seconds=settings.timeout_s),
    )
    messages = config.load(config.TransportSettings)
    node = store.add("torchrelay/parameters/arrived", 1) - 1
    if node >= num_nodes:
        raise ConfigError(f"DMLC_NUM_SERVER={num_nodes}, but this is server number {node + 1}")
    loopback = address in ("127.0.0.1", "localhost")
    return Topology(
        node,
        num_nodes,
        workers_per_node=num_threads,
        techniques=techniques,
        store=store,
        network=_node_network(
            store, node, 0, "127.0.0.1" if loopback else interface_towards(address), messages
        ),
        settings=settings,
        transport=messages,
    )


def dmlc_variables() -> tuple[int, str, int]:
    """Number of nodes, and address and port of the scheduler, from the original's variables."""
    values = []
    for name in ("DMLC_NUM_SERVER", "DMLC_PS_ROOT_PORT"):
        text = os.environ.get(name, "")
        if not text.isdigit():
            raise ConfigError(f"{name}={text!r}: it must be a whole number, the same for all processes")
        values.append(int(text))
    return values[0], os.environ.get("DMLC_PS_ROOT_URI", "127.0.0.1"), values[1]


def _job(group: ProcessGroup | None, timeout_s: float) -> tuple[World, Store]:
    """The processes of ``group``, of the default group if there is one, or of the launcher; and their store."""
    import torch.distributed as dist  # noqa: PLC0415

    launched = World.from_environment()
    if group is None and not dist.is_initialized():
        return launched, launched.connect(timeout_s)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ArgumentError("this process is not in the process group that was given")
    if group is None and launched.size > 1 and (launched.rank, launched.size) != (rank, size):
        raise ConfigError(
            f"this process is rank {rank} of {size} in the default process group, but rank {launched.rank} of "
            f"{launched.size} by the variables of {launched.launcher}; pass process_group= to choose"
        )
    store: Store = _torch.group_store(group or dist.group.WORLD)
    host = _torch.store_host(store) or launched.master_addr
    return World(rank, size, launcher="a process group", master_addr=host), store


def start(
    num_keys: int,
    length: int,
    *,
    dtype: torch.dtype = torch.float32,
    rule: UpdateRule | None = None,
    init: KeyInit | None = None,
    techniques: str = "all",
    name: str = "table",
    world: World | None = None,
    store: Store | None = None,
    node_of_rank: Callable[[int], int] | None = None,
    process_group: ProcessGroup | None = None,
    description: Mapping[str, Any] | None = None,
) -> Place:
    """Makes the table ``name`` with one worker per process; collective over all processes of the job.

    Args:
        world: the job; default: that of ``process_group``, of the default process group if there is one, or of the
            launcher.
        store: where the processes of ``world`` meet.
        node_of_rank: which ranks form which node; default: those of one host.
        description: more that must be the same on every process.

    Raises:
        ArgumentError: a size, dtype, rule or technique is not served.
        ConfigError: the default process group is not what the launcher's variables describe.
        MismatchError: the processes describe different tables; on every process.
        OperationTimeoutError: a process did not come.
    """
    import torch.distributed as dist  # noqa: PLC0415

    from torchrelay.parameters.server import Server  # noqa: PLC0415 - they import this module
    from torchrelay.parameters.worker import Worker  # noqa: PLC0415

    settings = config.load(config.Parameters)
    if world is None:
        world, found = _job(process_group, settings.timeout_s)
        store = store or found
    shared = dist.PrefixStore(name, store or world.connect(settings.timeout_s))  # type: ignore[attr-defined]
    # A table may be made, closed and made again; the second must not meet in what the first has left.
    use = shared.add(f"made/{world.rank}", 1)
    shared = dist.PrefixStore(str(use), shared)  # type: ignore[attr-defined]
    topology = of_world(world, shared, node_of_rank=node_of_rank, techniques=techniques, settings=settings)
    server = Server(
        num_keys,
        length=length,
        dtype=dtype,
        rule=rule,
        init=init,
        topology=topology,
        description=description,
    )
    return Place(server, Worker(topology.member, server), world)

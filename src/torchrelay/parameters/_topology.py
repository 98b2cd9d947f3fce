"""Nodes and their processes, and how they wait for each other in a torch store.

A node is one process, or several of one host; the first of them, its leader, holds the slab and
runs the threads that serve other nodes. :meth:`Topology.in_memory` makes nodes that are threads of
one process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchrelay import _native, config
from torchrelay._waiting import nothing_to_check, wait_for_others
from torchrelay.errors import (
    ArgumentError,
    MismatchError,
    PeerLostError,
    TorchRelayError,
)

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["Topology"]

TECHNIQUES = tuple(techniques.name for techniques in _native.Techniques)
_POLL_S = 0.01
_NEWS_HEARTBEATS = 4  # a node that refuses connections is lost after two
_LONGEST_PARTING_S = 5.0


@dataclass
class Topology:
    """This process's position among all nodes.

    Args:
        node: the index of this process's node, of ``num_nodes``.
        member: the index of this process among its node's ``members``; 0 is the leader.
        workers_per_node: the workers of each node, over all its processes; barriers wait for all.
        store: shared by all processes; ``None`` if there is one process.
        network: creates this process's network; called once.
        interface: the address at which the other processes reach this one.
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
    interface: str = "127.0.0.1"
    ranks: tuple[int, ...] = ()
    settings: config.Parameters = field(default_factory=lambda: config.load(config.Parameters))
    transport: config.TransportSettings = field(
        default_factory=lambda: config.load(config.TransportSettings)
    )
    _network: _native.Network | None = None
    _tables: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        if self.techniques not in TECHNIQUES:
            raise ArgumentError(
                f"techniques={self.techniques!r}: the choices are {', '.join(TECHNIQUES)}"
            )
        if self.workers_per_node < 1:
            raise ArgumentError(f"a node needs at least one worker, not {self.workers_per_node}")

    @classmethod
    def in_memory(
        cls, num_nodes: int, network: _native.Network | None = None, **fields: Any
    ) -> list[Topology]:
        """Create ``num_nodes`` nodes for threads of this process, by default over memory."""
        import torch.distributed as dist  # noqa: PLC0415 - importing it takes long, and one process needs none of it

        shared = network or _native.MemoryNetwork()
        store = dist.HashStore()
        return [
            cls(node, num_nodes, store=store, network=lambda: shared, **fields)
            for node in range(num_nodes)
        ]

    def open_network(self) -> _native.Network | None:
        """Return this process's network, one for all tables; ``None`` for one node."""
        if self._network is None and self.num_nodes > 1:
            if self.network is None:
                raise ArgumentError(f"a topology of {self.num_nodes} nodes needs a network")
            self._network = self.network()
        return self._network

    def next_table(self) -> str:
        """Return a name for the next table; processes create tables in the same order."""
        return f"torchrelay/parameters/{next(self._tables)}"

    def publish(self, key: str, value: Any) -> None:
        if self.store is not None:
            self.store.set(key, json.dumps(value))

    def name_of(self, process: int) -> str:
        """Return the users' name of the process with this index among those of all nodes."""
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
        """Wait for the values of ``keys``, each published by the one in ``owners``; return them.

        Raises:
            OperationTimeoutError: some are missing; ``ranks`` names their owners.
            PeerLostError: raised by ``check``.
        """
        store = self.store
        assert store is not None

        def sentence(missing: Sequence[int], elapsed_s: float) -> str:
            return (
                f"{self.name_of(self.process)}: {what} of {kind} {list(missing)} did not arrive "
                f"within {elapsed_s:.1f} s; did they start, did each get its own number, and do "
                "all make this call?"
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
        """Return the values that ``count`` processes published for ``key``; this is ``index``.
        Blocks.

        Raises:
            OperationTimeoutError: some are missing; ``ranks`` names their indices.
            PeerLostError: raised by ``check``.
        """
        if count == 1:
            return [mine]
        self.publish(f"{key}/{index}", mine)
        return self.collect([f"{key}/{i}" for i in range(count)], range(count), what, kind, check)

    def agree(self, key: str, mine: dict[str, str]) -> None:
        """Compare the description ``mine`` of a table with those of all processes.

        Raises:
            MismatchError: one differs; on every process.
            OperationTimeoutError: a process is missing.
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
                    f"node {self.node} (process {self.member}) and node {node} (process {member}) "
                    f"made different tables: {'; '.join(different)}"
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
        """Wait until ``participants`` have reached ``generation`` of barrier ``name``.

        Args:
            check: raises PeerLostError if a node was lost.
            index: this participant; participants are spread evenly over the processes, in order.
            calls: the calls that lead here, for messages.
            missing: may raise for participants that cannot arrive.

        Raises:
            OperationTimeoutError: some are missing; ``ranks`` names them, or their nodes if there
                are no ranks.
            PeerLostError: a node died (``check`` raises), or the store did.
        """
        if participants == 1:
            return
        store = self.store
        assert store is not None
        counter, gate = f"{name}/{generation}", f"{name}/{generation}/open"
        marks = _Marks(store, counter, index, participants)
        per_process = max(1, participants // (self.num_nodes * self.members))

        def absent() -> Sequence[int] | None:
            without = marks.missing()
            if store.check([gate]) or len(without) != participants - store.add(counter, 0):
                return None  # some have arrived, but not waited long enough to leave a mark
            missing(without)
            processes = dict.fromkeys(i // per_process for i in without)
            return [self.ranks[i] if self.ranks else i // self.members for i in processes]

        def sentence(ranks: Sequence[int], elapsed_s: float) -> str:
            who = f": {'ranks' if self.ranks else 'nodes'} {list(ranks)}" if ranks else ""
            return (
                f"{self.name_of(self.process)}: {participants - store.add(counter, 0)} of "
                f"{participants} did not reach {calls or name} within {elapsed_s:.1f} s{who}; "
                "every process must make this call; do not put it inside `if rank == 0:`"
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
        """Report the cause if the store is lost: its process may have left because of another."""
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
                f"node {self.node}: the store where processes meet is gone after {elapsed_s:.1f} s "
                f"in {what}; has its process ended? ({error})"
            ) from error

    def part(self, name: str, participants: int) -> None:
        """Leave after the last barrier. The first process, which may serve the store, leaves
        last.
        """
        if participants == 1 or self.store is None:
            return
        with contextlib.suppress(RuntimeError):
            # The store is gone: so is whoever would have waited.
            gone = self.store.add(f"{name}/left", 1)
            deadline_s = time.monotonic() + _LONGEST_PARTING_S
            while (
                self.node == self.member == 0
                and gone < participants
                and time.monotonic() < deadline_s
            ):
                time.sleep(_POLL_S)
                gone = self.store.add(f"{name}/left", 0)


class _Marks:
    """Which of ``count`` participants wait at ``place``, once they have waited for a while.

    A barrier costs one message to the store, and this only where it takes long.

    Args:
        index: this participant; others see its mark once it has called :meth:`missing`.
    """

    def __init__(self, store: Store, place: str, index: int, count: int) -> None:
        self._store, self._place, self._index, self._count = store, place, index, count
        self._is_set = False

    def missing(self) -> list[int]:
        """Return those without a mark; set this participant's."""
        if not self._is_set:
            self._store.set(f"{self._place}/at/{self._index}", "")
            self._is_set = True
        everyone = range(self._count)
        return [i for i in everyone if not self._store.check([f"{self._place}/at/{i}"])]

    def clear(self) -> None:
        """Remove this participant's mark."""
        if self._is_set:
            self._store.delete_key(f"{self._place}/at/{self._index}")

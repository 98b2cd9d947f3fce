"""A node's part of the table."""

from __future__ import annotations

import itertools
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from torchrelay import _native, _telemetry, transport
from torchrelay._resource import Resource
from torchrelay.errors import (
    ArgumentError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    ProtocolError,
    UnavailableError,
)
from torchrelay.parameters._arrays import DTYPES, describe
from torchrelay.parameters._contract import (
    KeyInit,
    UpdateRule,
    check_number,
    native_init,
    native_rule,
)
from torchrelay.parameters._ends import Ending, end_with_process
from torchrelay.parameters._sampling import Sampling
from torchrelay.parameters._topology import Topology

__all__ = ["Server"]

_POLL_S = 0.001
_LENGTHS_SHOWN = 8
_INT32_MAX, _INT64_MAX = 2**31 - 1, 2**63 - 1
_NO_RULE, _NO_INIT = UpdateRule(), KeyInit()


_LEADERS: weakref.WeakSet[Server] = weakref.WeakSet()  # the statistics are those of a node


class Server(Resource):
    """This node's part of a table. Create one per process, in the same order everywhere.

    In a node's first process it allocates the node's memory and serves other nodes; in the others
    it attaches that memory. A key starts at node ``key % num_nodes``.

    Args:
        keys: the number of keys; 0 for keys created at first use; or one length per key, as an
            int64 tensor or array.
        length: elements of a value, if ``keys`` is a number.
        capacity: rows that this node can hold, if keys are created at first use; the least recently
            used are evicted, and initialised again at their next use.
        dtype: float32, float64, float16, bfloat16 or int64.
        rule: the effect of :meth:`Worker.push`.
        init: the initial value of keys.
        description: further values that must be equal on all processes.
        problem: with the arguments of this process, if known; no process makes the table.

    Raises:
        ArgumentError: a number, dtype, rule or length is not supported.
        MismatchError: the processes describe different tables; on every process.
        OperationTimeoutError: another node is missing, or cannot be reached.
    """

    def __init__(
        self,
        keys: int | torch.Tensor | np.ndarray[Any, Any],
        *,
        length: int = 1,
        capacity: int = 0,
        dtype: torch.dtype = torch.float32,
        rule: UpdateRule | None = None,
        init: KeyInit | None = None,
        topology: Topology | None = None,
        description: Mapping[str, Any] | None = None,
        problem: ArgumentError | None = None,
    ) -> None:
        self.topology = topology or Topology()
        self.dtype = dtype
        self.rule = rule or _NO_RULE
        self.init = init or _NO_INIT
        self.sampling: Sampling | None = None
        self._num_keys, self._lengths, self._capacity = 0, [1], capacity
        try:
            self._num_keys, self._lengths = _keys_and_lengths(keys, length)
            self._check()
        except ArgumentError as error:
            problem = problem or error
        self.table = self.topology.next_table()
        arguments = "valid" if problem is None else str(problem)
        try:
            self.topology.ranks.agree(
                f"{self.table}/description",
                self._describe({"arguments": arguments, **(description or {})}),
                self.topology.settings.timeout_s,
                "tables",
                call="make the table",
                hint="did they start, and do all make this call?",
            )
        except MismatchError:
            if problem is None:
                raise
        if problem is not None:
            raise problem
        self._service: _native.NodeService | None = None
        self._down = self._is_stopped = False
        self.loads = itertools.count()  # of states, by name of the collective call
        self._origin = _native.Origin()
        self.ending = Ending(self, self.table)
        with (
            _telemetry.event("parameters", "open", self.table),
            self.topology.opening(self.table) as gather,
        ):
            self.network = self.topology.opened_network
            self.store, self.addresses = self._open(gather)
        end_with_process(self, self.ending)
        if self.topology.member == 0:
            _LEADERS.add(self)

    def _check(self) -> None:
        if self.dtype not in DTYPES:
            allowed = ", ".join(str(dtype) for dtype in DTYPES)
            raise ArgumentError(f"dtype={self.dtype}: a table's values are {allowed}")
        if self._num_keys == 0 and self._capacity < 1:
            raise ArgumentError(
                "a table without a number of keys needs capacity, the rows a node can hold"
            )

    def _make_store(self) -> _native.ParameterStore:
        return _native.ParameterStore.create(
            _native.StoreSpec(
                lengths=self._lengths,
                num_keys=self._num_keys,
                capacity=self._capacity,
                dtype=DTYPES[self.dtype],
                rule=native_rule(self.rule),
                init=native_init(self.init),
                node=self.topology.node,
                num_nodes=self.topology.num_nodes,
                num_channels=self.topology.settings.num_channels,
            )
        )

    def _open(self, gather: Callable[..., list[Any]]) -> tuple[_native.ParameterStore, list[str]]:
        """Make this node's store, or attach its leader's; return it and all nodes' endpoints.

        A leader starts to serve once the endpoints of all nodes exist.
        """
        topology, mine = self.topology, None
        if topology.member == 0:
            self.store = self._make_store()
            if self.network is not None:
                self._service = self._make_service(self.network)
            mine = self.store.address, self._service.addresses if self._service else []
        made = gather("nodes", mine)
        if topology.member > 0:
            address, _ = made[topology.nodes[topology.node][0]]
            self.store = _native.ParameterStore.attach(address, native_init(self.init))
        addresses = [address for leader, *_ in topology.nodes for address in made[leader][1]]
        if self._service is not None:
            self._service.start(addresses)
        gather("opened", None)  # one that lacks descriptors or threads says so here
        if self._service is not None:
            self._greet()
        return self.store, addresses

    def _make_service(self, network: _native.Network) -> _native.NodeService:
        settings, messages = self.topology.settings, self.topology.transport
        return _native.NodeService(
            self.store,
            network,
            _native.ChannelOptions(
                techniques=_native.Techniques[self.topology.techniques],
                max_rounds_per_s=settings.max_rounds_per_s,
                sync_threshold=settings.sync_threshold,
                hysteresis_rounds=settings.hysteresis_rounds,
                heartbeat_interval_s=messages.heartbeat_s,
                heartbeat_timeout_s=messages.peer_timeout_s,
            ),
        )

    def _greet(self) -> None:
        """Wait for a message of every other node, which shows that it has our key, if any."""
        timeout_s = self.topology.transport.connect_timeout_s
        deadline_s = time.monotonic() + timeout_s
        missing = set(range(self.num_nodes)) - {self.node}
        while missing := {node for node in missing if not self.store.has_heard(node)}:
            if time.monotonic() > deadline_s:
                self.abort()
                raise OperationTimeoutError(
                    f"node {self.node}: nodes {sorted(missing)} did not answer within "
                    f"{timeout_s:g} s, though they reached the store; can they be reached?",
                    ranks=sorted(missing),
                )
            time.sleep(_POLL_S)

    def _describe(self, more: Mapping[str, Any]) -> dict[str, str]:
        """Return what must be equal on every process, in a readable form."""
        settings = self.topology.settings
        table = {
            "keys": self._num_keys,
            "dim": _describe_lengths(self._lengths),
            "dtype": self.dtype,
            "optimizer": self.rule,
            "init": self.init,
            "techniques": self.topology.techniques,
            "parameters.num_channels": settings.num_channels,
            f"the key ({transport.KEY_VARIABLES})": self.topology.key_name,
        }
        return {name: str(value) for name, value in (table | dict(more)).items()}

    @property
    def num_keys(self) -> int:
        return self._num_keys

    @property
    def is_uniform(self) -> bool:
        """Whether the values of all keys have the same length."""
        return len(self._lengths) == 1

    def has_one_length(self, keys: torch.Tensor) -> bool:
        """Whether the values of ``keys``, which the table has, are of one length."""
        return self.is_uniform or len({self._lengths[key] for key in keys.tolist()}) == 1

    @property
    def node(self) -> int:
        return self.topology.node

    @property
    def num_nodes(self) -> int:
        return self.topology.num_nodes

    def row_length(self, key: int = 0) -> int:
        """Return the elements of the row of ``key``: value and optimizer state."""
        keys = np.array([key], dtype=np.int64)
        return self.store.elements(True, keys.ctypes.data, 1)

    def set_learning_rate(self, lr: float) -> None:
        """Set the optimizer's learning rate in this node's store; call it on every node.

        Raises:
            ArgumentError: the rate is negative or not finite.
        """
        self.check_open()
        check_number("learning rate lr", lr)
        self.store.set_learning_rate(lr)

    def enable_sampling_support(
        self,
        scheme: str = "local",
        with_replacement: bool = True,
        distribution: str = "uniform",
        min: int = 0,
        max: int = 0,
        *,
        weights: torch.Tensor | np.ndarray[Any, Any] | None = None,
        seed: int | None = None,
    ) -> None:
        """Let ``Worker.prepare_sample`` draw keys from [``min``, ``max``).

        Call it before creating workers.

        Args:
            scheme: ``naive`` draws independently; ``preloc`` draws and announces; ``pool`` reuses a
                drawn pool; ``local`` takes the nearest key of this node.
            distribution: ``uniform`` or ``log-uniform``; ``weights`` (one per key of the range)
                replace it.
            max: 0 means the number of keys.
            seed: of this node's draws; default: random.

        Raises:
            ArgumentError: a name or the range is invalid.
        """
        self.check_open()
        high = max or self._num_keys
        if not 0 <= min < high <= self._num_keys:
            raise ArgumentError(
                f"sampling from [{min}, {high}): the table has the keys [0, {self._num_keys})"
            )
        self.sampling = Sampling(scheme, with_replacement, distribution, min, high, weights, seed)

    def statistics(self) -> dict[str, float]:
        """Return the statistics of this node since its start, over all its processes.

        The names are those of ``torchrelay._native.TableStat``: numbers of keys, messages and
        ``..._bytes`` to and from other nodes, and times, ``..._ns`` there and ``..._seconds`` here.
        """
        return {
            stat.name.replace("_ns", "_seconds"): value / (1e9 if stat.name.endswith("_ns") else 1)
            for stat, value in self.store.stats().items()
        }

    def check_open(self) -> None:
        """Raise UnavailableError if this process has left the table, or was forked from the one
        that has it.
        """
        if self._origin.is_forked:
            raise UnavailableError(
                f"node {self.node}: this table belongs to process {self._origin.pid}; a process "
                "forked from it, such as a DataLoader's, cannot use it; look keys up in the "
                "process that made the table"
            )
        if self._is_stopped:
            raise UnavailableError(
                f"node {self.node}: this process has left the table, which has been closed, or "
                "given up after an error; nothing can be read or written any more"
            )

    def barrier(self) -> None:
        """Wait for all processes of all nodes."""
        self.check_open()
        self.topology.barrier(
            f"{self.table}/servers",
            "reach the barrier of all processes (Table.close and Server.close wait at one)",
            self.store.check_leader,
            partial(self.ending.check_processes, or_closing=False),
        )

    def close(self) -> None:
        """Wait for all nodes, then stop serving; at once if a node was lost. Idempotent.

        In a forked process it does nothing.
        """
        if self._down or self._origin.is_forked:
            return
        self._down = True
        try:
            self.ending.close()
            self.barrier()
            self.topology.ranks.leave(f"{self.table}/servers/left")
        except PeerLostError:
            pass  # no node is served any more; requests raise
        except (UnavailableError, ProtocolError):
            # the node's leader has left the barrier and stopped: so all had come; or its threads
            # have failed
            pass
        finally:
            self._stop_service()

    def lose(self, ranks: Sequence[int]) -> None:
        """Record that these processes were found to have exited, so that it is what other nodes
        learn of this one.
        """
        for node, members in enumerate(self.topology.nodes):
            if not set(ranks).isdisjoint(members):
                self.store.lose_node(node)

    def abort(self) -> None:
        """Leave the table at once. Processes that still use it raise PeerLostError. Idempotent.

        In a forked process it does nothing.
        """
        if self._origin.is_forked:
            return
        cause = None
        if not self._down and self.topology.ranks.size > 1:
            try:
                self.store.check_leader()
            except (PeerLostError, UnavailableError, ProtocolError) as error:
                cause = error if isinstance(error, PeerLostError) else None
            self.store.abort_membership()
        self._down = self.ending.is_over = True
        self._stop_service(cause)

    def _end_block(self, error: BaseException | None) -> None:
        """Close the server; after an error, abort: the others may not close theirs."""
        if error is None or self.topology.ranks.size == 1:
            self.close()
        else:
            self.abort()

    def _stop_service(self, cause: PeerLostError | None = None) -> None:
        if not self._is_stopped:
            self.topology.close(cause)
        self._is_stopped = True
        if self._service is not None:
            self._service.stop()
            self._service = None


def _describe_lengths(lengths: list[int]) -> str:
    if len(lengths) == 1:
        return str(lengths[0])
    shown = ", ".join(str(length) for length in lengths[:_LENGTHS_SHOWN])
    more = ", ..." if len(lengths) > _LENGTHS_SHOWN else ""
    checksum = zlib.crc32(np.asarray(lengths, dtype="<i8").tobytes())
    return f"[{shown}{more}] ({sum(lengths)} elements in all, checksum {checksum:08x})"


def _keys_and_lengths(keys: Any, length: int) -> tuple[int, list[int]]:
    if isinstance(keys, int | np.integer):
        if not (
            isinstance(length, int | np.integer)
            and 0 <= keys <= _INT64_MAX
            and 1 <= length <= _INT32_MAX
        ):
            raise ArgumentError(
                f"{keys} keys of length {length}: they must be whole numbers, at least 0 and 1, "
                "and fit in int64 and int32"
            )
        return int(keys), [int(length)]
    if not isinstance(keys, torch.Tensor | np.ndarray) or keys.ndim != 1:
        raise ArgumentError(f"keys must be a number, or one length per key, not a {describe(keys)}")
    integral = not (
        keys.dtype.is_floating_point if isinstance(keys, torch.Tensor) else keys.dtype.kind == "f"
    )
    lengths = [int(value) for value in keys.tolist()] if integral else []
    if not lengths or min(lengths) < 1:
        raise ArgumentError(f"lengths must be at least one positive integer, not {describe(keys)}")
    return (len(lengths), [lengths[0]]) if len(set(lengths)) == 1 else (len(lengths), lengths)


def _samples() -> Iterator[_telemetry.MetricSample]:
    for server in list(_LEADERS):
        labels = {"table": str(server.table), "node": str(server.node)}
        for name, value in server.statistics().items():
            kind = "gauge" if name == "replicas" else "counter"
            meaning = f"{name.replace('_', ' ').capitalize()} of a node; see parameters.Metrics"
            yield _telemetry.MetricSample(f"parameters_{name}", meaning, kind, value, labels)


_telemetry.publish(_samples)

"""A node's part of the table."""

from __future__ import annotations

import contextlib
import json
import math
import time
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from torchrelay import _native
from torchrelay._resource import Resource
from torchrelay.errors import (
    ArgumentError,
    OperationTimeoutError,
    PeerLostError,
    ProtocolError,
    UnavailableError,
)
from torchrelay.parameters._arrays import DTYPES, describe
from torchrelay.parameters._contract import (
    INITS,
    RULES,
    KeyInit,
    UpdateRule,
    native_init,
    native_rule,
)
from torchrelay.parameters._ends import CLOSES, Ending, end_with_process
from torchrelay.parameters._sampling import Sampling
from torchrelay.parameters._topology import Topology

__all__ = ["Server"]

_POLL_S = 0.001
_LENGTHS_SHOWN = 8
_INT32_MAX, _INT64_MAX = 2**31 - 1, 2**63 - 1
_NO_RULE, _NO_INIT = UpdateRule(), KeyInit()


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
    ) -> None:
        self.topology = topology or Topology()
        self.dtype = dtype
        self.rule = rule or _NO_RULE
        self.init = init or _NO_INIT
        self.sampling: Sampling | None = None
        self._num_keys, self._lengths = _keys_and_lengths(keys, length)
        self._capacity = capacity
        self._check()
        self._table = self.topology.next_table()
        self.topology.agree(f"{self._table}/description", self._describe(description or {}))
        self._service: _native.NodeService | None = None
        self._barriers = 0
        self._down = self._is_stopped = False
        self._origin = _native.Origin()
        self._ended_workers: set[int] = set()
        self._ending = Ending(self, self._end_of(self.topology.process))
        self._store = self._make_store() if self.topology.member == 0 else self._attach_store()
        self.network = self.topology.open_network()
        self.addresses = self._start()
        end_with_process(self, self._ending)

    def _check(self) -> None:
        if self.dtype not in DTYPES:
            allowed = ", ".join(str(dtype) for dtype in DTYPES)
            raise ArgumentError(f"dtype={self.dtype}: a table's values are {allowed}")
        if self.rule.kind not in RULES:
            raise ArgumentError(f"rule {self.rule.kind!r}: the choices are {', '.join(RULES)}")
        for name, number in vars(self.rule).items():
            if name != "kind" and not (math.isfinite(number) and number >= 0):
                raise ArgumentError(f"{self.rule}: {name} must be a finite number from 0 up")
        if self.init.kind not in INITS:
            raise ArgumentError(f"init {self.init.kind!r}: the choices are {', '.join(INITS)}")
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

    def _attach_store(self) -> _native.ParameterStore:
        key = f"{self._table}/slab/{self.topology.node}"
        (address,) = self.topology.collect([key], [self.topology.node], "the shared memory")
        return _native.ParameterStore.attach(address, native_init(self.init))

    def _start(self) -> list[str]:
        """Start this node's threads once all nodes' endpoints exist; return the endpoints of all
        nodes.
        """
        topology, settings, transport = (
            self.topology,
            self.topology.settings,
            self.topology.transport,
        )
        addresses: list[str] = []
        if topology.member == 0 and self.network is not None:
            self._service = _native.NodeService(
                self._store,
                self.network,
                _native.ChannelOptions(
                    techniques=_native.Techniques[topology.techniques],
                    max_rounds_per_s=settings.max_rounds_per_s,
                    sync_threshold=settings.sync_threshold,
                    hysteresis_rounds=settings.hysteresis_rounds,
                    heartbeat_interval_s=transport.heartbeat_s,
                    heartbeat_timeout_s=transport.peer_timeout_s,
                ),
            )
            addresses = self._service.addresses
        if topology.num_nodes > 1:
            if topology.member == 0:
                topology.publish(f"{self._table}/node/{topology.node}", addresses)
            keys = [f"{self._table}/node/{node}" for node in range(topology.num_nodes)]
            nodes = topology.collect(keys, range(topology.num_nodes), "the addresses")
            addresses = [address for node in nodes for address in node]
        if self._service is not None:
            self._service.start(addresses)
            self._greet()
        if topology.member == 0 and topology.members > 1:
            topology.publish(f"{self._table}/slab/{topology.node}", self._store.address)
        return addresses

    def _greet(self) -> None:
        """Wait for a message of every other node, which shows that it has our key file."""
        timeout_s = self.topology.transport.connect_timeout_s
        deadline_s = time.monotonic() + timeout_s
        missing = set(range(self.num_nodes)) - {self.node}
        while missing := {node for node in missing if not self._store.has_heard(node)}:
            if time.monotonic() > deadline_s:
                self.abort()
                raise OperationTimeoutError(
                    f"node {self.node}: nodes {sorted(missing)} did not answer within "
                    f"{timeout_s:g} s, though they reached the store; can they be reached, and do "
                    "all nodes have the same key file?",
                    ranks=sorted(missing),
                )
            time.sleep(_POLL_S)

    def _describe(self, more: Mapping[str, Any]) -> dict[str, str]:
        """Return what must be equal on every process, in a readable form."""
        settings, transport = self.topology.settings, self.topology.transport
        zeromq = "ZeroMQ with a key file" if transport.key_file else "ZeroMQ"
        table = {
            "keys": self._num_keys,
            "dim": _describe_lengths(self._lengths),
            "dtype": self.dtype,
            "optimizer": self.rule,
            "init": self.init,
            "techniques": self.topology.techniques,
            "parameters.num_channels": settings.num_channels,
            "the network": zeromq if transport.uses_zeromq else "plain sockets",
        }
        return {name: str(value) for name, value in (table | dict(more)).items()}

    @property
    def store(self) -> _native.ParameterStore:
        """The native memory of this node."""
        return self._store

    @property
    def table(self) -> str:
        return self._table

    @property
    def num_keys(self) -> int:
        return self._num_keys

    @property
    def is_uniform(self) -> bool:
        """Whether the values of all keys have the same length."""
        return len(self._lengths) == 1

    @property
    def node(self) -> int:
        return self.topology.node

    @property
    def num_nodes(self) -> int:
        return self.topology.num_nodes

    @property
    def techniques(self) -> str:
        return self.topology.techniques

    @property
    def address(self) -> str:
        """The slab's address, for other processes of this host."""
        return self._store.address

    def row_length(self, key: int = 0) -> int:
        """Return the elements of the row of ``key``: value and optimizer state."""
        keys = np.array([key], dtype=np.int64)
        return self._store.elements(True, keys.ctypes.data, 1)

    def set_learning_rate(self, lr: float) -> None:
        """Set the optimizer's learning rate in this node's store; call it on every node.

        Raises:
            ArgumentError: the rate is negative or not finite.
        """
        self.check_open()
        if not (math.isfinite(lr) and lr >= 0):
            raise ArgumentError(f"lr = {lr}: a learning rate is a finite number from 0 up")
        self._store.set_learning_rate(lr)

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
        """Return the counters of this node since its start, over all its processes.

        Keys, messages, bytes and seconds. Messages and bytes are those to and from other nodes.
        """
        stats = {stat.name: float(value) for stat, value in self._store.stats().items()}
        seconds = {
            f"{name}_seconds": stats.pop(f"{name}_ns") / 1e9 for name in ("round", "refresh_age")
        }
        return stats | seconds

    @property
    def _participants(self) -> int:
        return self.topology.num_nodes * self.topology.members

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
                f"node {self.node}: this process has left the table; nothing can be read or "
                "written any more"
            )

    def barrier(self) -> None:
        """Wait for all processes of all nodes."""
        self.check_open()
        self.topology.barrier(
            f"{self._table}/servers",
            self._barriers,
            self._participants,
            self._store.check_leader,
            index=self.topology.process,
            calls="the barrier of all processes, of which Table.close and Server.close have one",
            missing=partial(self.check_not_ended, or_closing=False),
        )
        self._barriers += 1

    def _end_of(self, process: int) -> str:
        return f"{self._table}/ends/{process}"

    def worker_begins(self, worker_id: int) -> None:
        """Register a worker with this id."""
        if worker_id in self._ended_workers and self.topology.store is not None:
            self._ended_workers.discard(worker_id)
            self.topology.store.delete_key(self._end_of_worker(worker_id))

    def worker_ends(self, worker_id: int) -> None:
        """Publish that a worker has ended without ``close()``, for processes that wait for it."""
        self._ended_workers.add(worker_id)
        if not self._is_stopped and not self._origin.is_forked:
            with contextlib.suppress(RuntimeError):  # the store is gone
                self.topology.publish(self._end_of_worker(worker_id), "")

    def _end_of_worker(self, worker_id: int) -> str:
        return f"{self._table}/ended/{self.node * self.topology.workers_per_node + worker_id}"

    def check_workers_not_ended(self, workers: Sequence[int]) -> None:
        """Raise PeerLostError if one of the workers with these indices, or its process, has
        ended.
        """
        topology = self.topology
        for index in workers:
            node, worker_id = divmod(index, topology.workers_per_node)
            if topology.store is not None and topology.store.check(
                [f"{self._table}/ended/{index}"]
            ):
                raise PeerLostError(
                    f"{topology.name_of(topology.process)}: worker {worker_id} of node {node} has "
                    "ended without close(), while this process waits for it; look at the output of "
                    "that node for the cause",
                    ranks=[node],
                )
        per_process = max(1, topology.workers_per_node // topology.members)
        self.check_not_ended(list(dict.fromkeys(index // per_process for index in workers)))

    def check_not_ended(self, processes: Sequence[int], *, or_closing: bool = True) -> None:
        """Raise PeerLostError if one of the processes with these indices has ended, or is closing
        the table.
        """
        topology = self.topology
        for process in processes:
            key = self._end_of(process)
            if topology.store is None or not topology.store.check([key]):
                continue
            how = json.loads(topology.store.get(key))
            if or_closing or how != CLOSES:
                raise PeerLostError(
                    f"{topology.name_of(topology.process)}: {topology.name_of(process)} {how}, "
                    "while this process waits for it; all processes must make the same collective "
                    "calls",
                    ranks=[process // topology.members],
                )

    def close(self) -> None:
        """Wait for all nodes, then stop serving; at once if a node was lost. Idempotent.

        In a forked process it does nothing.
        """
        if self._down or self._origin.is_forked:
            return
        self._down = self._ending.is_over = True
        try:
            self._ending.publish(CLOSES)
            self.barrier()
            self.topology.part(f"{self._table}/servers", self._participants)
        except PeerLostError:
            pass  # no node is served any more; requests raise
        except (UnavailableError, ProtocolError):
            # the node's leader has left the barrier and stopped: so all had come; or its threads
            # have failed
            pass
        finally:
            self._stop_service()

    def abort(self) -> None:
        """Leave the table at once. Processes that still use it raise PeerLostError. Idempotent.

        In a forked process it does nothing.
        """
        if self._origin.is_forked:
            return
        if not self._down and self._participants > 1:
            self._store.leave_in_need()
        self._down = self._ending.is_over = True
        self._stop_service()

    def _end_block(self, error: BaseException | None) -> None:
        """Close the server; after an error, abort: the others may not close theirs."""
        if error is None or self._participants == 1:
            self.close()
        else:
            self.abort()

    def _stop_service(self) -> None:
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
    if isinstance(keys, int):
        if not (0 <= keys <= _INT64_MAX and 1 <= length <= _INT32_MAX):
            raise ArgumentError(
                f"{keys} keys of length {length}: they must be at least 0 and 1, and fit in int64 "
                "and int32"
            )
        return keys, [length]
    if not isinstance(keys, torch.Tensor | np.ndarray) or keys.ndim != 1:
        raise ArgumentError(f"keys must be a number, or one length per key, not a {describe(keys)}")
    integral = not (
        keys.dtype.is_floating_point if isinstance(keys, torch.Tensor) else keys.dtype.kind == "f"
    )
    lengths = [int(value) for value in keys.tolist()] if integral else []
    if not lengths or min(lengths) < 1:
        raise ArgumentError(f"lengths must be at least one positive integer, not {describe(keys)}")
    return (len(lengths), [lengths[0]]) if len(set(lengths)) == 1 else (len(lengths), lengths)

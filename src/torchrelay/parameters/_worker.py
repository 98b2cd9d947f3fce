"""Access of one worker to the table."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from typing import Any

import numpy as np
import torch

from torchrelay import _native, _torch
from torchrelay._resource import Resource
from torchrelay.errors import ArgumentError, PeerLostError, UnavailableError
from torchrelay.parameters._arrays import (
    address_of_keys,
    address_of_values,
    check_finite,
    sum_rows,
)
from torchrelay.parameters._sampling import Sample, Sampling
from torchrelay.parameters._server import Server

__all__ = ["AccessHandle", "Worker"]

_PULL, _PUSH, _SET, _PULL_ROWS, _SET_ROWS = _native.TableOp


class _KeyAccess(Resource):
    """The part of a :class:`Worker` that reads and writes keys, and that ends."""

    def __init__(self, worker_id: int, server: Server) -> None:
        workers = server.topology.workers_per_node
        if not 0 <= worker_id < workers:
            raise ArgumentError(
                f"worker_id={worker_id}: node {server.node} has the workers 0 to {workers - 1}; "
                "the topology's workers_per_node is their number"
            )
        self.worker_id = worker_id
        self.server = server
        self._dtype = server.dtype
        self._sums = server.rule.kind != "add"
        settings = server.topology.settings
        server.check_open()
        server.ending.worker_begins(worker_id)
        self._native = _native.ParameterWorker(
            server.store,
            worker_id,
            server.network,
            server.addresses,
            settings.timeout_s,
            settings.max_unfinished,
            server.topology.transport.max_message_bytes,
        )
        # Autograd calls from a thread of its own for each device. Reentrant, for signal handlers.
        self._lock = threading.RLock()
        self._closed = False
        self._end = weakref.finalize(self, server.ending.worker_ends, worker_id)
        self._end.atexit = False  # the end of the process is published too

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError(
                f"worker {self.worker_id} of node {self.server.node} is closed and cannot be used"
            )
        self.server.check_open()

    def _start(
        self, op: _native.TableOp, keys: Any, values: Any, async_op: bool
    ) -> AccessHandle | None:
        timestamp = self._access(op, keys, values, async_op)
        return AccessHandle(self, timestamp) if async_op else None

    def _access(self, op: _native.TableOp, keys: Any, values: Any, async_op: bool) -> int:
        self._check_open()
        key_address, count = address_of_keys(keys)
        address, size = address_of_values(
            values, self._dtype, written=op is _PULL or op is _PULL_ROWS
        )
        held = (keys, values) if async_op else None
        with _torch.span(f"torchrelay.parameters.{op.name.lower()}"), self._lock:
            return self._native.access(op, key_address, count, address, size, not async_op, held)

    def pull(self, keys: Any, values: Any, async_op: bool = False) -> AccessHandle | None:
        """Read the values of ``keys`` into ``values``.

        Args:
            keys: int64, of shape ``(n,)``.
            values: of the table's dtype and shape ``(n, length)``, or any other in which the values
                of the keys follow each other.
            async_op: return at once, with a handle whose ``wait()`` blocks until ``values`` are
                read.

        Returns:
            A handle if ``async_op``, else None.

        Raises:
            ArgumentError: keys or values are not as described; nothing was read or written.
            UnavailableError: this worker is closed, or its process has left the table.
            PeerLostError: a node was lost.
            OperationTimeoutError: an owner did not answer.
        """
        return self._start(_PULL, keys, values, async_op)

    def push(
        self, keys: Any, values: Any, async_op: bool = False, *, checked: bool = False
    ) -> AccessHandle | None:
        """Add ``values`` to the values of ``keys``; see :class:`UpdateRule`.

        With an optimizer they are applied as gradients. Repeated keys accumulate; gradients of a
        repeated key are summed, then applied once. Arguments, result and errors as for
        :meth:`pull`; also an ArgumentError if a gradient is NaN or infinite.

        Args:
            checked: gradients are known to be finite, and their keys to be distinct.
        """
        if self._sums and not checked:
            keys, values = self._summed(keys, values)
            check_finite(
                torch.as_tensor(keys, device="cpu") if self.server.is_uniform else None,
                torch.as_tensor(values, device="cpu").detach(),
                f"push by worker {self.worker_id} of node {self.server.node}",
            )
        return self._start(_PUSH, keys, values, async_op)

    def set(self, keys: Any, values: Any, async_op: bool = False) -> AccessHandle | None:
        """Overwrite the values of ``keys``; the last of repeated keys wins."""
        return self._start(_SET, keys, values, async_op)

    def pull_rows(self, keys: Any, rows: Any) -> None:
        """Read rows: values and optimizer state, ``server.row_length(key)`` elements each."""
        self._access(_PULL_ROWS, keys, rows, False)

    def set_rows(self, keys: Any, rows: Any) -> None:
        """Overwrite rows."""
        self._access(_SET_ROWS, keys, rows, False)

    def _summed(self, keys: Any, values: Any) -> tuple[Any, Any]:
        address, count = address_of_keys(keys)
        _, size = address_of_values(values, self._dtype, written=False)
        flat = torch.as_tensor(keys, device="cpu")
        unique, inverse = torch.unique(flat, return_inverse=True)
        if len(unique) == count:
            return keys, values
        elements = self.server.store.elements(False, address, count)
        if elements * self._dtype.itemsize != size:
            return keys, values  # the native core reports what is wrong
        if not self.server.has_one_length(unique):
            raise ArgumentError(
                "gradients with repeated keys need keys of one length; sum them before"
            )
        given = torch.as_tensor(values, device="cpu").detach().reshape(count, -1)
        return unique, sum_rows(inverse, given, len(unique))

    def pull_if_local(self, keys: Any, values: Any) -> bool:
        """Call :meth:`pull` if all keys are local.

        Else return ``False``, with ``values`` undefined.
        """
        self._check_open()
        key_address, count = address_of_keys(keys)
        address, size = address_of_values(values, self._dtype, written=True)
        return self._native.pull_if_local(key_address, count, address, size)

    def are_local(self, keys: torch.Tensor) -> bool:
        """Return whether this node owns or replicates all ``keys`` now."""
        self._check_open()
        return self.server.store.holds(*address_of_keys(keys))

    def wait_all(self) -> None:
        """Wait until all operations of this worker are done. Raises as :meth:`pull`."""
        self._check_open()
        self._native.wait_all()

    def wait_for(self, timestamp: int) -> None:
        """Wait for one operation; what :meth:`AccessHandle.wait` does."""
        self._check_open()
        self._native.wait(timestamp)

    def has_finished(self, timestamp: int) -> bool:
        """Return whether one operation is done; what :meth:`AccessHandle.is_completed` does."""
        self._check_open()
        return self._native.is_finished(timestamp)

    def close(self) -> None:
        """Complete unfinished operations and end the intents of this worker. Idempotent."""
        if not self._closed:
            self._closed = True
            self._end.detach()
            self._native.finalize()

    def _end_block(self, error: BaseException | None) -> None:
        """Close the worker; after an error, let those who wait for it raise PeerLostError."""
        if error is None:
            self.close()
        elif not self._closed:
            self._closed = True
            self._end()

    def get_key_size(self, key: int = 0) -> int:
        """Return the elements of the value of ``key``."""
        keys = np.array([key], dtype=np.int64)
        return self.server.store.elements(False, keys.ctypes.data, 1)

    @property
    def num_keys(self) -> int:
        return self.server.num_keys


class Worker(_KeyAccess):
    """Reads and writes any key of the table. For one thread at a time. A context manager.

    Operations of one worker on one key take effect in call order, including asynchronous ones: an
    operation first waits for unfinished ones on its keys. Added pushes do not wait for each other.
    Buffers of an asynchronous call must not change before it is finished, and are kept alive until
    then.

    Args:
        worker_id: the index of this worker in its node, below the topology's ``workers_per_node``.
        server: this process's part of the table.

    Raises:
        ArgumentError: the index is in use or too large.
    """

    def __init__(self, worker_id: int, server: Server) -> None:
        super().__init__(worker_id, server)
        # Workers of this node that died, and when that was first noticed.
        self._dead_since: dict[int, float] = {}
        self._samples: dict[int, Sample] = {}
        self._sample_ids = itertools.count()

    def intent(self, keys: Any, start: int, end: int = 0) -> None:
        """Announce that this worker will access ``keys`` in the clocks [``start``, ``end``).

        The keys, or replicas of them, arrive at this node in time. Does not block. ``end`` 0 means
        ``start + 1``.
        """
        self._check_open()
        address, count = address_of_keys(keys)
        self._native.intent(address, count, start, end or start + 1)

    def advance_clock(self) -> int:
        """End the current clock of this worker; return the next."""
        self._check_open()
        return self._native.advance_clock()

    def current_clock(self) -> int:
        self._check_open()
        return self._native.clock

    def prepare_sample(self, n: int, start: int, end: int = 0) -> int:
        """Prepare ``n`` samples for the clocks [``start``, ``end``); return their id.

        Raises:
            ArgumentError: sampling is not enabled, or there are not ``n`` distinct keys.
        """
        self._check_open()
        sample_id, sample = next(self._sample_ids), self._sampling().prepare(n)
        self._samples[sample_id] = sample
        if sample.announced and n:
            self.intent(sample.keys, start, end)
        return sample_id

    def pull_sample(
        self, sample_id: int, keys: Any, values: Any, async_op: bool = False
    ) -> AccessHandle | None:
        """Draw the next ``len(keys)`` samples of ``sample_id`` into ``keys``; pull into ``values``.

        May be called until the samples are used up. Returns as :meth:`pull`.

        Raises:
            ArgumentError: there is no such sample, or it has fewer keys left.
        """
        address_of_values(values, self._dtype, written=True)
        self._draw(sample_id, keys)
        return self._start(_PULL, keys, values, async_op)

    def draw_sample(self, keys: Any, start: int, end: int = 0) -> None:
        """Fill ``keys`` with a new sample.

        If the scheme announces, it is announced for [``start``, ``end``). Raises as
        :meth:`prepare_sample` and :meth:`pull_sample`.
        """
        _, count = address_of_keys(keys)
        sample_id = self.prepare_sample(count, start, end)
        try:
            self._draw(sample_id, keys)
        finally:
            self.finish_sample(sample_id)

    def finish_sample(self, sample_id: int) -> None:
        """Discard the remaining samples of ``sample_id``."""
        self._sample(sample_id)
        del self._samples[sample_id]

    def _draw(self, sample_id: int, keys: Any) -> None:
        address_of_keys(keys)
        self._check_open()
        self._sampling().draw(self._sample(sample_id), self.server.store, np.asarray(keys))

    def _sample(self, sample_id: int) -> Sample:
        if sample_id not in self._samples:
            raise ArgumentError(
                f"there is no sample {sample_id}: it was not prepared, or is finished"
            )
        return self._samples[sample_id]

    def _sampling(self) -> Sampling:
        if self.server.sampling is None:
            raise ArgumentError(
                "sampling was not enabled: call server.enable_sampling_support first"
            )
        return self.server.sampling

    def owned_keys(self) -> torch.Tensor:
        """Return the keys that this node owns now, int64."""
        self._check_open()
        return torch.from_numpy(np.asarray(self.server.store.owned_keys()))

    def wait_sync(self) -> None:
        """Wait until every node sees this node's earlier pushes. Not collective."""
        self._check_open()
        self._native.wait_sync()

    def barrier(self) -> None:
        """Wait for all workers of all nodes.

        Raises:
            OperationTimeoutError: some are missing.
            PeerLostError: a node was lost, or a worker of this node died and none has replaced it
                within ``transport.peer_timeout_s``.
        """
        self._check_open()
        topology = self.server.topology
        self._check()
        per_process = topology.workers_per_process
        topology.barrier(
            f"{self.server.table}/workers",
            "reach the barrier of all workers (Table.sync and state_dict wait at one)",
            self._check,
            self.server.ending.check_workers,
            part=(self.worker_id % per_process, per_process),
        )

    def _check(self) -> None:
        self.server.store.check_leader()
        now_s, peer_timeout_s = time.monotonic(), self.server.topology.transport.peer_timeout_s
        self._dead_since = {
            worker: self._dead_since.get(worker, now_s)
            for worker in self.server.store.dead_workers()
        }
        lost = [
            worker
            for worker, since_s in self._dead_since.items()
            if now_s - since_s > peer_timeout_s
        ]
        if lost:
            node = self.server.node
            self.server.store.lose_worker(lost[0])
            raise PeerLostError(
                f"parameters: workers {lost} of node {node} have died, and none has replaced them "
                f"within {peer_timeout_s:g} s; restart from the last checkpoint",
                ranks=[node],
            )


class AccessHandle:
    """An asynchronous operation of a :class:`Worker`."""

    __slots__ = ("_worker", "timestamp")

    def __init__(self, worker: _KeyAccess, timestamp: int) -> None:
        self._worker, self.timestamp = worker, timestamp

    def wait(self) -> None:
        """Block until the operation is done.

        Raises:
            UnavailableError: the worker is closed.
            OperationTimeoutError, PeerLostError: as for :meth:`Worker.pull`.
        """
        self._worker.wait_for(self.timestamp)

    def is_completed(self) -> bool:
        """Return whether the operation is done. Does not block."""
        return self._worker.has_finished(self.timestamp)

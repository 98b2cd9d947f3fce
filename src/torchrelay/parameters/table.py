"""One logical table of vectors over all nodes of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from torchrelay.errors import ArgumentError, MismatchError
from torchrelay.parameters import checkpoint, topology
from torchrelay.parameters.checkpoint import RowShard, key_range
from torchrelay.parameters.contract import KeyInit, UpdateRule
from torchrelay.parameters.metrics import Metrics
from torchrelay.parameters.server import Server
from torchrelay.parameters.worker import Worker

__all__ = ["Table"]

# Rows are written to and read from checkpoints in pieces, so that no piece takes a host's memory twice.
ROWS_AT_ONCE = 1 << 18


class Table:
    """``num_keys`` vectors of ``dim`` elements, owned by the nodes in shares that follow their use.

    One process has one worker; all its methods are for one thread at a time. Use :meth:`create`.

    Args:
        server: this node's part of the table.
        worker: this process's access to it.
        worker_index: this worker among the ``workers`` of all nodes.
    """

    def __init__(
        self,
        server: Server,
        worker: Worker,
        rule: UpdateRule,
        worker_index: int = 0,
        workers: int = 1,
    ) -> None:
        self.server = server
        self.worker = worker
        self.rule = rule
        self.worker_index = worker_index
        self.workers = workers
        self.dim = worker.get_key_size()
        self._closed = False

    @classmethod
    def create(
        cls,
        num_keys: int,
        dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        optimizer: UpdateRule | None = None,
        init: KeyInit | None = None,
        techniques: str = "all",
        name: str = "table",
        node_of_rank: Callable[[int], int] | None = None,
    ) -> Table:
        """Makes or joins the table ``name``; collective over all processes of the job.

        Under torchrun, mpirun or Slurm, the processes of one host form a node and share its memory; started
        alone, this process is the only node. Nothing need be set.

        Args:
            optimizer: how pushes are applied, see :mod:`torchrelay.parameters.optim`; default: added.
            init: the value of rows that nobody has set; default: zeros.
            techniques: ``all``, ``replication_only`` or ``relocation_only``.
            name: tells the tables of one job apart.
            node_of_rank: which node a rank belongs to; default: its host's. Ranks of one node share a host.

        Raises:
            ArgumentError: a size, dtype, rule or technique is not served.
            OperationTimeoutError: a process did not come.
        """
        rule = optimizer or UpdateRule()
        place = topology.start(
            num_keys,
            dim,
            dtype=dtype,
            rule=rule,
            init=init or KeyInit(),
            techniques=techniques,
            name=name,
            node_of_rank=node_of_rank,
        )
        return cls(place.server, place.worker, rule, place.world.rank, place.world.size)

    @property
    def num_keys(self) -> int:
        return self.server.num_keys

    @property
    def dtype(self) -> torch.dtype:
        return self.server.dtype

    @property
    def row_length(self) -> int:
        """Elements a row has: the vector's and its optimizer state's."""
        return self.server.row_length()

    def pull(self, keys: Tensor, out: Tensor | None = None) -> Tensor:
        """The vectors of ``keys`` (int64, any shape): ``(*keys.shape, dim)``, in the table's dtype, on the CPU.

        Raises:
            ArgumentError: a key is out of range, or ``out`` has not that shape and dtype.
            PeerLostError: a node was lost.
        """
        flat = _flat_keys(keys)
        values = torch.empty(*keys.shape, self.dim, dtype=self.dtype) if out is None else out
        self.worker.pull(flat, values.view(len(flat), self.dim))
        return values

    def push(self, keys: Tensor, values: Tensor, *, wait: bool = True) -> None:
        """Adds ``values`` to the vectors of ``keys``, or applies them as gradients where there is an optimizer.

        ``values`` is ``(*keys.shape, dim)``. Repeated keys accumulate. Without ``wait``, returns at once;
        this process's later pulls see the push all the same.
        """
        flat = _flat_keys(keys)
        self.worker.push(flat, self._flat_values(flat, values), not wait)

    def set(self, keys: Tensor, values: Tensor) -> None:
        """Overwrites the vectors of ``keys``; optimizer state stays. Of repeated keys, the last counts."""
        flat = _flat_keys(keys)
        self.worker.set(flat, self._flat_values(flat, values))

    def is_local(self, keys: Tensor) -> bool:
        """Whether this node has all ``keys`` (int64, any shape) now, as their owner or as replicas; does not wait."""
        flat = _flat_keys(keys)
        found = flat.clone()
        here = self.server.store.nearest_local(
            found.data_ptr(), len(found), 0, self.server.num_keys, [], False
        )
        return here == len(flat) and torch.equal(found, flat)

    def enable_sampling(
        self,
        scheme: str = "local",
        low: int = 0,
        high: int | None = None,
        *,
        weights: Tensor | None = None,
        with_replacement: bool = True,
        seed: int | None = None,
    ) -> None:
        """Makes :meth:`sample` draw from the keys [``low``, ``high``), uniformly or by ``weights``.

        Args:
            scheme: see :mod:`torchrelay.parameters.sampling`. ``local`` gives keys that are at this node.

        Raises:
            ArgumentError: a name or the range is wrong.
        """
        end = self.num_keys if high is None else high
        self.server.enable_sampling_support(
            scheme, with_replacement, "uniform", low, end, weights=weights, seed=seed
        )

    def sample(self, count: int, start: int | None = None) -> Tensor:
        """``count`` keys, int64, by the scheme that :meth:`enable_sampling` chose.

        Args:
            start: the clock in which they will be used, for schemes that announce what they draw; default: now.

        Raises:
            ArgumentError: sampling was not enabled, or there are not that many distinct keys.
            UnavailableError: the scheme is ``local`` and no key of the range is at this node.
        """
        keys = torch.empty(count, dtype=torch.int64)
        self.worker.draw_sample(keys, self.clock if start is None else start)
        return keys

    def intent(self, keys: Tensor, start: int, end: int | None = None) -> None:
        """Announces that this worker will use ``keys`` while its clock is from ``start`` to before ``end``."""
        self.worker.intent(_flat_keys(keys), start, start + 1 if end is None else end)

    def advance_clock(self) -> int:
        """This worker's step is done; returns the new clock. Intents that end at or before it end."""
        return self.worker.advance_clock()

    @property
    def clock(self) -> int:
        return self.worker.current_clock()

    def sync(self) -> None:
        """Waits until every worker sees every push any worker made before its own call; collective."""
        self.worker.waitall()
        self.worker.wait_sync()
        self.worker.barrier()

    def metrics(self) -> Metrics:
        """Counters of this node since the start; ``print(table.metrics())`` gives one line."""
        return Metrics.from_statistics(self.server.statistics())

    def set_learning_rate(self, lr: float) -> None:
        """Changes the optimizer's learning rate on this node; call it on all."""
        self.server.set_learning_rate(lr)

    def state_dict(self) -> dict[str, Any]:
        """This worker's share of the rows, optimizer state included; collective, ends in agreement on values.

        DCP saves it (``dcp.save({"table": table.state_dict()}, ...)``) and loads it on any number of nodes.
        """
        self.sync()
        state = self.empty_state_dict()
        shard: RowShard = state["rows"]
        for keys, rows in _pieces(shard):
            self.worker.pull_rows(keys, rows)
        self.worker.barrier()
        return state

    def empty_state_dict(self) -> dict[str, Any]:
        """What :meth:`state_dict` gives, with rows still to be filled: for ``dcp.load``."""
        start, end = key_range(self.num_keys, self.worker_index, self.workers)
        rows = torch.empty(end - start, self.row_length, dtype=self.dtype)
        return {"rows": RowShard.of(rows, start, self.num_keys)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets this worker's share of the rows; collective.

        Raises:
            MismatchError: the state is of a table with other keys, dimensions, dtype or optimizer.
        """
        shard = state["rows"]
        expected = (self.num_keys, self.row_length)
        if tuple(shard.size()) != expected or shard.dtype != self.dtype:
            raise MismatchError(
                f"the saved table has {tuple(shard.size())} keys and elements a row of {shard.dtype}, this one "
                f"{expected} of {self.dtype}; a row holds {self.dim} elements and the state of "
                f"'{self.rule.kind}'"
            )
        for keys, rows in _pieces(shard):
            self.worker.set_rows(keys, rows)
        self.sync()

    def save(self, path: str) -> None:
        """Writes the table to the folder ``path`` as a DCP checkpoint; collective."""
        checkpoint.save(self, path)

    def load(self, path: str) -> None:
        """Reads a checkpoint that :meth:`save` wrote on any number of nodes; collective."""
        checkpoint.load(self, path)

    def close(self) -> None:
        """Leaves the table; collective. Idempotent."""
        if not self._closed:
            self._closed = True
            self.worker.finalize()
            self.server.shutdown()

    def __enter__(self) -> Table:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Closing waits for the others, who will not come if they still work: an error must not wait for that.
        if error is None or self.workers == 1:
            self.close()
        else:
            self.server.stop()

    def _flat_values(self, keys: Tensor, values: Tensor) -> Tensor:
        if values.numel() != len(keys) * self.dim:
            raise ArgumentError(
                f"values of shape {tuple(values.shape)} for {len(keys)} keys of {self.dim} elements: they must "
                "have the keys' shape and one more dimension"
            )
        return values.detach().reshape(len(keys), self.dim).contiguous()


def _flat_keys(keys: Tensor | Sequence[int]) -> Tensor:
    tensor = torch.as_tensor(keys)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        raise ArgumentError(f"keys are {tensor.dtype}; they must be integers")
    return tensor.detach().to("cpu", torch.int64).reshape(-1).contiguous()


def _pieces(shard: RowShard) -> Iterator[tuple[Tensor, Tensor]]:
    for first in range(0, len(shard.rows), ROWS_AT_ONCE):
        rows = shard.rows[first : first + ROWS_AT_ONCE]
        yield torch.arange(shard.start + first, shard.start + first + len(rows)), rows

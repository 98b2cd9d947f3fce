"""One logical table of vectors over all nodes of a job."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrelay.errors import ArgumentError, UnavailableError, UnsupportedError
from torchrelay.parameters import _checkpoint, _starting
from torchrelay.parameters._contract import KeyInit, UpdateRule
from torchrelay.parameters._gradients import ApplyGradients, Gradients, Reduction
from torchrelay.parameters._metrics import Metrics
from torchrelay.parameters._optimizer import TableOptimizer
from torchrelay.parameters._server import Server
from torchrelay.parameters._weight import TableWeight
from torchrelay.parameters._worker import Worker

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint import StorageReader, StorageWriter  # type: ignore[attr-defined]

__all__ = ["Table"]

_open_tables: weakref.WeakValueDictionary[str, Table] = weakref.WeakValueDictionary()


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
        *,
        name: str = "table",
        apply_gradients: ApplyGradients | None = None,
        reduction: Reduction | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.server = server
        self.worker = worker
        self.rule = rule
        self.worker_index = worker_index
        self.workers = workers
        self.name = name
        self.process_group = process_group
        self.dim = worker.get_key_size()
        self.gradients = Gradients(self, apply_gradients, reduction)
        self._closed = False
        self._process = os.getpid()
        self._loads = itertools.count()

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
        name: str | None = None,
        node_of_rank: Callable[[int], int] | None = None,
        process_group: ProcessGroup | None = None,
        apply_gradients: ApplyGradients | None = None,
        reduction: Reduction | None = None,
    ) -> Table:
        """Makes or joins a table; collective over all processes of the job.

        The job is the default process group if there is one, else what torchrun, mpirun or Slurm started;
        a process started alone is the only node. The processes of one host form a node and share its memory.

        Args:
            optimizer: how gradients are applied, see :mod:`torchrelay.parameters.optim`; default: pushed
                values are added.
            init: the value of rows that nobody has set; default: zeros.
            techniques: ``all``, ``replication_only`` or ``relocation_only``.
            name: for messages. Tables are matched by name, tables without one by the order they are made in.
            node_of_rank: which node a rank belongs to; default: its host's. Ranks of one node share a host.
            process_group: the processes that share the table, instead of those of the default group.
            apply_gradients: when the gradients of modules over this table are applied. ``step``: when its
                :meth:`optimizer` steps, summed until then, as elsewhere in torch. ``backward``: as soon as they
                are computed, by each process for itself; this excludes gradient scaling, clipping and
                accumulation. Default: ``step`` once there is an optimizer; until then ``backward``, with
                a DeprecationWarning.
            reduction: of the gradients of several processes: ``mean``, as DistributedDataParallel's, or
                ``sum``; default: ``mean`` for ``step`` and ``sum`` for ``backward``.

        Raises:
            ArgumentError: a size, dtype, rule, technique or option is not served, or the name is taken.
            ConfigError: the default process group is not what the launcher's variables describe.
            MismatchError: the processes describe different tables; on every process.
            OperationTimeoutError: a process did not come.
        """
        if name is not None and name in _open_tables:
            raise ArgumentError(
                f"this process has a table {name!r} already; close it first, or give each its own name"
            )
        rule = optimizer or UpdateRule()
        place = _starting.start(
            num_keys,
            dim,
            dtype=dtype,
            rule=rule,
            init=init or KeyInit(),
            techniques=techniques,
            name=name or "table",
            node_of_rank=node_of_rank,
            process_group=process_group,
            description={"apply_gradients": apply_gradients, "reduction": reduction},
        )
        table = cls(
            place.server,
            place.worker,
            rule,
            place.world.rank,
            place.world.size,
            name=name or "table",
            apply_gradients=apply_gradients,
            reduction=reduction,
            process_group=process_group,
        )
        if name is not None:
            _open_tables[name] = table
        return table

    @cached_property
    def weight(self) -> TableWeight:
        """What stands for the rows among a model's parameters, and holds their gradient.

        Raises:
            ArgumentError: the table has no optimizer, so a gradient would be added: it would lead uphill.
        """
        if self.rule.kind == "add":
            raise ArgumentError(
                f"table {self.name!r} adds what is pushed, so gradients would lead uphill; create it with an "
                "optimizer, e.g. optimizer=torchrelay.parameters.optim.adagrad(0.1)"
            )
        return TableWeight(self)

    def optimizer(self, lr: float | None = None) -> TableOptimizer:
        """The optimizer that applies the gradients of modules over this table, when it steps.

        For the training loop it is one of ``torch.optim``'s: it takes schedulers and scalers, and
        ``clip_grad_norm_`` finds the gradients at the modules' parameters. Make it before the first backward
        pass. ``TableOptimizer`` makes one for several tables.

        Args:
            lr: learning rate; default: that of the table's own optimizer.

        Raises:
            ArgumentError: the table applies gradients in the backward pass.
        """
        return TableOptimizer([self.weight], lr)

    def check_open(self) -> None:
        """Raises UnavailableError if the table was closed, or belongs to another process."""
        if self._closed:
            raise UnavailableError(f"table {self.name!r} has been closed")
        if os.getpid() != self._process:
            raise UnavailableError(
                f"table {self.name!r} belongs to process {self._process}: a process forked from it, such as a "
                "DataLoader's, cannot use it; look keys up in the process that made the table"
            )

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
        self.check_open()
        flat = _flat_keys(keys)
        values = torch.empty(*keys.shape, self.dim, dtype=self.dtype) if out is None else out
        self.worker.pull(flat, values.view(len(flat), self.dim))
        return values

    def push(self, keys: Tensor, values: Tensor, *, wait: bool = True) -> None:
        """Adds ``values`` to the vectors of ``keys``, or applies them as gradients where there is an optimizer.

        ``values`` is ``(*keys.shape, dim)``. Repeated keys accumulate. Without ``wait``, returns at once;
        this process's later pulls see the push all the same.
        """
        self.check_open()
        flat = _flat_keys(keys)
        self.worker.push(flat, self._flat_values(flat, values), not wait)

    def set(self, keys: Tensor, values: Tensor) -> None:
        """Overwrites the vectors of ``keys``; optimizer state stays. Of repeated keys, the last counts."""
        self.check_open()
        flat = _flat_keys(keys)
        self.worker.set(flat, self._flat_values(flat, values))

    def is_local(self, keys: Tensor) -> bool:
        """Whether this node has all ``keys`` (int64, any shape) now, as their owner or as replicas; does not wait."""
        self.check_open()
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
            scheme: see :mod:`torchrelay.parameters._sampling`. ``local`` gives keys that are at this node.

        Raises:
            ArgumentError: a name or the range is wrong.
        """
        self.check_open()
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
        self.check_open()
        keys = torch.empty(count, dtype=torch.int64)
        self.worker.draw_sample(keys, self.clock if start is None else start)
        return keys

    def intent(self, keys: Tensor, start: int, end: int | None = None) -> None:
        """Announces that this worker will use ``keys`` while its clock is from ``start`` to before ``end``."""
        self.check_open()
        self.worker.intent(_flat_keys(keys), start, start + 1 if end is None else end)

    def advance_clock(self) -> int:
        """This worker's step is done; returns the new clock. Intents that end at or before it end."""
        self.check_open()
        return self.worker.advance_clock()

    @property
    def clock(self) -> int:
        self.check_open()
        return self.worker.current_clock()

    def sync(self) -> None:
        """Waits until every worker sees every push any worker made before its own call; collective."""
        self.check_open()
        self.worker.waitall()
        self.worker.wait_sync()
        self.worker.barrier()

    def metrics(self) -> Metrics:
        """Counters of this node since the start; ``print(table.metrics())`` gives one line."""
        self.check_open()
        return Metrics.from_statistics(self.server.statistics())

    def set_learning_rate(self, lr: float) -> None:
        """Changes the learning rate of pushed gradients on this node; call it on all.

        A table with an :meth:`optimizer` takes the rate from its parameter groups instead.

        Raises:
            ArgumentError: the rate is not a finite number from 0 up.
        """
        self.check_open()
        self.server.set_learning_rate(lr)

    def state_dict(self) -> dict[str, Any]:
        """This worker's share of the rows, optimizer state included; collective, ends in agreement on values.

        DCP saves it (``dcp.save({"table": table.state_dict()}, ...)``) and loads it on any number of nodes.
        """
        self.check_open()
        return {"rows": _checkpoint.shard_of(self)}

    def empty_state_dict(self) -> dict[str, Any]:
        """What :meth:`state_dict` gives, with rows still to be filled: for ``dcp.load``."""
        return {"rows": _checkpoint.empty_shard(self)}

    def rows(self) -> Tensor:
        """All rows, optimizer state included: ``(num_keys, row_length)`` in this process's memory.

        Not collective: call :meth:`sync` first where other processes push asynchronously.
        """
        self.check_open()
        return _checkpoint.all_rows(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the rows; collective: every process gives its own share, or all rows.

        Args:
            state: of :meth:`state_dict`; or all rows, ``{"rows": (num_keys, row_length)}``; or the state dict
                of an ``nn.Embedding``, ``{"weight": (num_keys, dim)}``, which leaves optimizer state as it is.

        Raises:
            MismatchError: the state is of a table with other keys, dimensions, dtype or optimizer, or a
                process was given another's share; on every process.
        """
        self.check_open()
        _checkpoint.load_rows(self, state)

    def save(self, path: str, *, storage_writer: StorageWriter | None = None) -> None:
        """Write the table to the folder `path` as a DCP checkpoint; collective.

        Args:
            storage_writer: DCP's storage layer; by default its `FileSystemWriter`. A
                :class:`torchrelay.checkpoint.Writer` commits in one step, with checksums.
        """
        self.check_open()
        _checkpoint.save(self, path, storage_writer)

    def load(self, path: str, *, storage_reader: StorageReader | None = None) -> None:
        """Read a checkpoint that :meth:`save` wrote on any number of nodes; collective.

        Args:
            storage_reader: DCP's storage layer, as for :meth:`save`. A :class:`torchrelay.checkpoint.Reader` reads
                what either wrote, and verifies it first.

        Raises:
            MismatchError: the checkpoint is of another table.
            CorruptionError, StorageError: what a Reader of ours finds.
        """
        self.check_open()
        _checkpoint.load(self, path, storage_reader)

    def close(self) -> None:
        """Leaves the table; collective. Idempotent. Afterwards every use of the table is an error."""
        if self._forget():
            self.worker.finalize()
            self.server.shutdown()

    def _forget(self) -> bool:
        """Marks the table as closed; whether it was open and this process's."""
        was_open, self._closed = not self._closed and os.getpid() == self._process, True
        if _open_tables.get(self.name) is self:
            del _open_tables[self.name]
        return was_open

    def __enter__(self) -> Table:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Closing waits for the others, who will not come if they still work: an error must not wait for that.
        if error is None or self.workers == 1:
            self.close()
        elif self._forget():
            self.server.stop()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"table {self.name!r} cannot be copied or pickled: the processes of a job share its rows. Save "
            "state_dict(), or table.save(folder); a module's to_torch() makes an nn.Embedding of its own"
        )

    def _flat_values(self, keys: Tensor, values: Tensor) -> Tensor:
        if values.numel() != len(keys) * self.dim:
            raise ArgumentError(
                f"values of shape {tuple(values.shape)} for {len(keys)} keys of {self.dim} elements: they must "
                "have the keys' shape and one more dimension"
            )
        return values.detach().cpu().reshape(len(keys), self.dim).contiguous()


def _flat_keys(keys: Tensor | Sequence[int]) -> Tensor:
    tensor = torch.as_tensor(keys)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        raise ArgumentError(f"keys are {tensor.dtype}; they must be integers")
    return tensor.detach().to("cpu", torch.int64).reshape(-1).contiguous()

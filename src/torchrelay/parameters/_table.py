"""A table of vectors over all nodes of a job."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from torchrelay._resource import Resource
from torchrelay.errors import ArgumentError, UnavailableError, UnsupportedError
from torchrelay.parameters import _checkpoint
from torchrelay.parameters._contract import KeyInit, Metrics, UpdateRule
from torchrelay.parameters._gradients import ApplyGradients, Gradients, Reduction
from torchrelay.parameters._server import Server
from torchrelay.parameters._topology import meet
from torchrelay.parameters._weight import TableOptimizer, TableWeight
from torchrelay.parameters._worker import Worker

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Table", "TableOptions"]


class TableOptions(TypedDict, total=False):
    """Options of a new table; see :meth:`Table.create`."""

    optimizer: UpdateRule | None
    init: KeyInit | None
    name: str | None
    apply_gradients: ApplyGradients | None
    reduction: Reduction | None
    process_group: ProcessGroup | None


def _check_types(optimizer: object, init: object) -> None:
    if not isinstance(optimizer, UpdateRule | None):
        raise ArgumentError(
            f"optimizer = {optimizer!r}: it must be one of torchrelay.parameters.optim, e.g. "
            "optim.adam()"
        )
    if not isinstance(init, KeyInit | None):
        raise ArgumentError(
            f"init = {init!r}: it must be a torchrelay.parameters.KeyInit, e.g. "
            'KeyInit("normal", 0.0, 0.02)'
        )


_open_tables: weakref.WeakValueDictionary[str, Table] = weakref.WeakValueDictionary()


class Table(Resource):
    """``num_keys`` vectors of ``dim`` elements, distributed over the nodes by their use.

    Use :meth:`create`. A process has one worker, whose methods are for one thread at a time.

    Args:
        server: this node's part of the table.
        worker: this process's access to it.

    Attributes:
        worker_index: the index of this process among the ``workers`` of all nodes.
        row_length: elements of a row: of the vector and its optimizer state.
    """

    def __init__(
        self,
        server: Server,
        worker: Worker,
        *,
        name: str = "table",
        apply_gradients: ApplyGradients | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        self._server, self._worker = server, worker
        ranks = server.topology.ranks
        self.worker_index, self.workers = ranks.rank, ranks.size
        self.rule, self.dtype, self.num_keys = server.rule, server.dtype, server.num_keys
        self.dim, self.row_length = worker.get_key_size(), server.row_length()
        self.name = name
        self.gradients = Gradients(name, server, worker, apply_gradients, reduction)
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
        name: str | None = None,
        node_of_rank: Callable[[int], int] | None = None,
        process_group: ProcessGroup | None = None,
        apply_gradients: ApplyGradients | None = None,
        reduction: Reduction | None = None,
    ) -> Table:
        """Create or join a table. Collective over all processes of the job.

        The job is the default process group if there is one, else that of torchrun, mpirun or
        Slurm; a process started alone is the only node. The processes of one host form a node and
        share its memory.

        Args:
            optimizer: how gradients are applied, see :mod:`torchrelay.parameters.optim`; default:
                pushed values are added.
            init: the initial value of rows; default: zeros.
            techniques: ``all``, ``replication_only`` or ``relocation_only``.
            name: for messages. Named tables are matched by name, others by the order of creation.
            node_of_rank: the node of a rank; default: its host's. Ranks of one node share a host.
            process_group: the processes that share the table, instead of those of the default
                group.
            apply_gradients: when the gradients of modules over this table are applied. ``step``
                (default): when its :meth:`optimizer` steps, accumulated until then. ``backward``:
                as soon as they are computed, by each process separately; this excludes gradient
                scaling, clipping and accumulation.
            reduction: of the gradients of several processes, ``mean`` or ``sum``; default: ``mean``
                for ``step`` and ``sum`` for ``backward``.

        Raises:
            ArgumentError: a size, dtype, rule, technique or option is not supported, or the name is
                taken.
            ConfigError: the default process group contradicts the launcher's variables.
            MismatchError: the processes describe different tables; on every process.
            OperationTimeoutError: a process is missing.
        """
        if name is not None and name in _open_tables:
            raise ArgumentError(
                f"this process has a table {name!r} already; close it first, or give each its own "
                "name"
            )
        _check_types(optimizer, init)
        topology = meet(name or "table", techniques, node_of_rank, process_group)
        server = Server(
            num_keys,
            length=dim,
            dtype=dtype,
            rule=optimizer,
            init=init,
            topology=topology,
            description={"apply_gradients": apply_gradients, "reduction": reduction},
        )
        table = cls(
            server,
            Worker(topology.member, server),
            name=name or "table",
            apply_gradients=apply_gradients,
            reduction=reduction,
        )
        if name is not None:
            _open_tables[name] = table
        return table

    @property
    def server(self) -> Server:
        """This node's part of the table.

        Raises:
            UnavailableError: the table is closed.
        """
        self._check_open()
        return self._server

    @property
    def worker(self) -> Worker:
        """This process's access to the table. Raises as :attr:`server`."""
        self._check_open()
        return self._worker

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError(f"table {self.name!r} has been closed")

    @cached_property
    def weight(self) -> TableWeight:
        """The parameter that represents the rows in a model and holds their gradient.

        Raises:
            ArgumentError: the table has no optimizer, so gradients would be added.
        """
        if self.rule.kind == "add":
            raise ArgumentError(
                f"table {self.name!r} adds what is pushed, so gradients would increase the loss; "
                "create it with an optimizer, e.g. "
                "optimizer=torchrelay.parameters.optim.adagrad(0.1)"
            )
        return TableWeight(self.gradients, self.dim, self.dtype)

    def optimizer(self, lr: float | None = None) -> TableOptimizer:
        """Return the optimizer that applies the gradients of modules over this table.

        It is a ``torch.optim.Optimizer``: schedulers, scalers and ``clip_grad_norm_`` work with it.
        Create it before the first backward pass. ``TableOptimizer`` makes one for several tables.

        Args:
            lr: learning rate; default: that of the table's own optimizer.

        Raises:
            ArgumentError: the table applies gradients in the backward pass.
        """
        return TableOptimizer([self.weight], lr)

    def pull(self, keys: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the vectors of ``keys``. Blocks until all have arrived.

        Args:
            keys: int64, any shape.
            out: a tensor to fill.

        Returns:
            A CPU tensor of shape ``(*keys.shape, dim)`` and the table's dtype.

        Raises:
            ArgumentError: a key is out of range, or ``out`` has another shape or dtype.
            PeerLostError: a node was lost.
        """
        flat = _flat_keys(keys)
        values = out
        if values is None:
            values = torch.empty(*keys.shape, self.dim, dtype=self.dtype, device="cpu")
        _check_shape(keys, values, self.dim)
        self.worker.pull(flat, values)
        return values

    def push(self, keys: Tensor, values: Tensor, *, wait: bool = True) -> None:
        """Add ``values`` to the vectors of ``keys``, or apply them as gradients with an optimizer.

        NaN and infinite gradients raise ArgumentError, and none is applied.

        Args:
            keys: int64, any shape; repeated keys accumulate.
            values: of shape ``(*keys.shape, dim)``.
            wait: if False, return at once; later pulls of this process include the push.
        """
        self.worker.push(_flat_keys(keys), _flat_values(keys, values, self.dim), not wait)

    def set(self, keys: Tensor, values: Tensor) -> None:
        """Overwrite the vectors of ``keys``; optimizer state stays. The last key wins."""
        self.worker.set(_flat_keys(keys), _flat_values(keys, values, self.dim))

    def is_local(self, keys: Tensor) -> bool:
        """Return whether this node owns or replicates all ``keys`` now. Does not block.

        Raises:
            ArgumentError: a key is out of range.
        """
        flat = _flat_keys(keys)
        return self.server.store.holds(flat.data_ptr(), len(flat))

    def sample(self, count: int, start: int | None = None) -> Tensor:
        """Draw ``count`` keys, int64, by the scheme of ``table.server.enable_sampling_support``.

        Args:
            start: the clock in which they will be used, for schemes that announce; default: now.

        Raises:
            ArgumentError: sampling is not enabled, or there are not that many distinct keys.
            UnavailableError: the scheme is ``local`` and no key of the range is at this node.
        """
        keys = torch.empty(count, dtype=torch.int64, device="cpu")
        self.worker.draw_sample(keys, self.clock if start is None else start)
        return keys

    def intent(self, keys: Tensor, start: int, end: int | None = None) -> None:
        """Announce that this worker will use ``keys`` in the clocks [``start``, ``end``)."""
        self.worker.intent(_flat_keys(keys), start, start + 1 if end is None else end)

    def advance_clock(self) -> int:
        """End the current clock, and the intents that end by then. Return the new clock."""
        return self.worker.advance_clock()

    @property
    def clock(self) -> int:
        return self.worker.current_clock()

    def sync(self) -> None:
        """Wait until every worker sees every push made before this call. Collective."""
        self.worker.wait_all()
        self.worker.wait_sync()
        self.worker.barrier()

    def metrics(self) -> Metrics:
        """Return the statistics of this node since its start; printed as one line."""
        return Metrics(self.server.statistics())

    def set_learning_rate(self, lr: float) -> None:
        """Change the learning rate of pushed gradients on this node; call it on all.

        A table with an :meth:`optimizer` takes the rate from its parameter groups instead.

        Raises:
            ArgumentError: the rate is negative or not finite.
        """
        self.server.set_learning_rate(lr)

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's share of the rows, with optimizer state. Collective.

        ``torchrelay.checkpoint.save({"table": table}, folder)`` saves it, as does DCP with
        ``dcp.save({"table": table.state_dict()}, ...)``; both load it on any number of nodes.
        """
        return {"rows": _checkpoint.shard_of(self)}

    def rows(self) -> Tensor:
        """Return all rows, with optimizer state: ``(num_keys, row_length)``.

        They are copied to this process's memory. Not collective: call :meth:`sync` first if other
        processes push asynchronously.
        """
        self.worker.wait_all()
        return _checkpoint.rows_of(self, 0, self.num_keys)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the rows. Collective: every process passes its own share, or all rows.

        Args:
            state: from :meth:`state_dict`; or all rows, ``{"rows": (num_keys, row_length)}``; or
                the state dict of an ``nn.Embedding``, ``{"weight": (num_keys, dim)}``, which keeps
                optimizer state.

        Raises:
            MismatchError: the state is of a table with other keys, dimensions, dtype or optimizer,
                or of another process; on every process.
        """
        _checkpoint.load_rows(self, state)

    def close(self) -> None:
        """Leave the table. Collective and idempotent. Every later use raises UnavailableError."""
        if self._forget():
            try:
                self._worker.close()
            except BaseException:
                self._server.abort()
                raise
            self._server.close()

    def _forget(self) -> bool:
        """Mark the table as closed; return whether it was open."""
        was_open, self._closed = not self._closed, True
        if _open_tables.get(self.name) is self:
            del _open_tables[self.name]
        return was_open

    def _end_block(self, error: BaseException | None) -> None:
        # Closing waits for the others, who will not come if they still work: an error must not wait
        # for that.
        if error is None or self.workers == 1:
            self.close()
        elif self._forget():
            self._server.abort()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"table {self.name!r} cannot be copied or pickled: the processes of a job share its "
            "rows. Save it with torchrelay.checkpoint.save; a module's to_torch() makes an "
            "nn.Embedding of its own"
        )


def _check_shape(keys: Tensor | Sequence[int], values: Tensor, dim: int) -> None:
    shape = np.shape(keys)
    if values.shape != (*shape, dim):
        raise ArgumentError(
            f"values of shape {tuple(values.shape)} for keys of shape {tuple(shape)}: they must "
            f"have the shape {(*shape, dim)}"
        )


def _flat_values(keys: Tensor | Sequence[int], values: Tensor, dim: int) -> Tensor:
    _check_shape(keys, values, dim)
    return values.detach().cpu().reshape(-1, dim).contiguous()


def _flat_keys(keys: Tensor | Sequence[int]) -> Tensor:
    tensor = torch.as_tensor(keys, device="cpu")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        raise ArgumentError(f"keys are {tensor.dtype}; they must be integers")
    return tensor.detach().to(torch.int64).reshape(-1).contiguous()

"""A table of vectors over all nodes of a job."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchrelay._names import names_options
from torchrelay._resource import Resource
from torchrelay.errors import ArgumentError, UnavailableError, UnsupportedError
from torchrelay.parameters import _checkpoint
from torchrelay.parameters._arrays import (
    Keys,
    check_range,
    check_shape,
    empty,
    keys_of,
    values_of,
    whole_number,
)
from torchrelay.parameters._contract import KeyInit, Metrics, UpdateRule
from torchrelay.parameters._gradients import ApplyGradients, Gradients, Reduction, check_choices
from torchrelay.parameters._server import Server
from torchrelay.parameters._topology import meet
from torchrelay.parameters._weight import TableOptimizer, TableWeight
from torchrelay.parameters._worker import Worker

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Table", "TableOptions"]


R = TypeVar("R")


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

    Attributes:
        worker_index: the index of this process among the ``workers`` of all nodes.
        num_nodes: the groups of processes that share a host's memory.
        row_length: elements of a row: of the vector and its optimizer state.
        lookup_dtype: of what modules over this table return; ``model.half()`` changes it, and
            neither the rows nor what :meth:`pull` returns.
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
        self.num_nodes = server.num_nodes
        self.rule, self.dtype, self.num_keys = server.rule, server.dtype, server.num_keys
        self.lookup_dtype = self.dtype
        self.dim, self.row_length = worker.get_key_size(), server.row_length()
        self.name = name
        self.gradients = Gradients(name, server, worker, apply_gradients, reduction)
        self._closed = False

    @classmethod
    @names_options()
    def create(
        cls,
        num_keys: int,
        dim: int,
        *,
        capacity: int = 0,
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
            num_keys: the keys are 0 to ``num_keys - 1``. If it is 0, any key is created at its
                first use. Such a table is in no checkpoint.
            capacity: if keys are created at first use: the rows that each node can hold. The least
                recently used are evicted, and initialised again at their next use.
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
        try:
            whole_number("num_keys", num_keys)
            whole_number("dim", dim, 1)
            _check_types(optimizer, init)
            check_choices(apply_gradients, reduction)
            problem = None
        except ArgumentError as error:
            problem = error  # of this process; the others wait for it
        topology = meet(name or "table", techniques, node_of_rank, process_group)
        server = Server(
            num_keys,
            length=dim,
            capacity=capacity,
            dtype=dtype,
            rule=optimizer,
            init=init,
            topology=topology,
            description={"apply_gradients": apply_gradients, "reduction": reduction},
            problem=problem,
        )
        try:
            with topology.opening(server.table) as gather:
                worker = Worker(topology.member, server)
                gather("workers", None)
        except BaseException:
            server.abort()
            raise
        table = cls(
            server,
            worker,
            name=name or "table",
            apply_gradients=apply_gradients,
            reduction=reduction,
        )
        if name is not None:
            _open_tables[name] = table
        return table

    @property
    def _open_worker(self) -> Worker:
        """This process's access to the rows, for the modules of this component.

        Raises:
            UnavailableError: the table is closed.
        """
        if self._closed:
            raise UnavailableError(f"table {self.name!r} has been closed")
        return self._worker

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

    def pull(self, keys: Keys, out: Tensor | None = None) -> Tensor:
        """Return the vectors of ``keys``. Blocks until all have arrived.

        Args:
            keys: integers of any shape: a tensor, an array, or (nested) lists.
            out: a contiguous CPU tensor to fill.

        Returns:
            A CPU tensor of shape ``(*keys.shape, dim)`` and the table's dtype.

        Raises:
            ArgumentError: a key is out of range, or ``out`` has another shape or dtype.
            PeerLostError: a node was lost.
        """
        found = keys_of(keys)
        if out is None:
            out = empty(*found.shape, self.dim, dtype=self.dtype)
        check_shape(found, out, self.dim)
        self._access(found, self._open_worker.pull, out)
        return out

    def push(self, keys: Keys, values: Any, *, wait: bool = True) -> None:
        """Add ``values`` to the vectors of ``keys``, or apply them as gradients with an optimizer.

        NaN and infinite gradients raise ArgumentError, and none is applied.

        Args:
            keys: as for :meth:`pull`; repeated keys accumulate.
            values: of shape ``(*keys.shape, dim)``: a tensor or an array of the table's dtype, or
                lists of numbers.
            wait: if False, return at once; later pulls of this process include the push.
        """
        found = keys_of(keys)
        self._access(
            found, self._open_worker.push, values_of(values, found, self.dim, self.dtype), not wait
        )

    def set(self, keys: Keys, values: Any) -> None:
        """Overwrite the vectors of ``keys``; optimizer state stays. The last key wins.

        Arguments as for :meth:`push`.
        """
        found = keys_of(keys)
        self._access(found, self._open_worker.set, values_of(values, found, self.dim, self.dtype))

    def is_local(self, keys: Keys) -> bool:
        """Return whether this node owns or replicates all ``keys`` now. Does not block.

        Raises:
            ArgumentError: a key is out of range.
        """
        return self._access(keys_of(keys), self._open_worker.are_local)

    def _access(self, keys: Tensor, access: Callable[..., R], *rest: Any) -> R:
        """Call ``access`` with flat keys; an error names a key by its index in ``keys``."""
        try:
            return access(keys.reshape(-1), *rest)
        except ArgumentError:
            check_range(keys, self.num_keys)
            raise

    def enable_sampling_support(
        self,
        scheme: str = "local",
        with_replacement: bool = True,
        distribution: str = "uniform",
        min: int = 0,
        max: int = 0,
        *,
        weights: Tensor | np.ndarray[Any, Any] | None = None,
        seed: int | None = None,
    ) -> None:
        """Let :meth:`sample` draw keys from [``min``, ``max``).

        Args:
            scheme: ``naive`` draws independently; ``preloc`` draws and announces; ``pool`` reuses a
                drawn pool; ``local`` takes the nearest key of this node.
            with_replacement: whether a key may occur twice in a sample.
            distribution: ``uniform`` or ``log-uniform``; ``weights`` (one per key of the range)
                replace it.
            max: 0 means the number of keys.
            seed: of this node's draws; default: random.

        Raises:
            ArgumentError: a name or the range is invalid.
        """
        self._open_worker.server.enable_sampling_support(
            scheme, with_replacement, distribution, min, max, weights=weights, seed=seed
        )

    def sample(self, count: int, start: int | None = None) -> Tensor:
        """Draw ``count`` keys, int64, by the scheme of :meth:`enable_sampling_support`.

        Args:
            start: the clock in which they will be used, for schemes that announce; default: now.

        Raises:
            ArgumentError: sampling is not enabled, or there are not that many distinct keys.
            UnavailableError: the scheme is ``local`` and no key of the range is at this node.
        """
        worker = self._open_worker
        keys = empty(whole_number("count", count), dtype=torch.int64)
        worker.draw_sample(keys, self.clock if start is None else whole_number("start", start))
        return keys

    def intent(self, keys: Keys, start: int, end: int | None = None) -> None:
        """Announce that this worker will use ``keys`` in the clocks [``start``, ``end``).

        Args:
            end: default: ``start + 1``.

        Raises:
            ArgumentError: a key is out of range, or the clocks are none.
        """
        first = whole_number("start", start)
        last = first + 1 if end is None else whole_number("end", end, first + 1)
        self._access(keys_of(keys), self._open_worker.intent, first, last)

    def advance_clock(self) -> int:
        """End the current clock, and the intents that end by then. Return the new clock."""
        return self._open_worker.advance_clock()

    @property
    def clock(self) -> int:
        return self._open_worker.current_clock()

    def sync(self) -> None:
        """Wait until every worker sees every push made before this call. Collective."""
        worker = self._open_worker
        worker.wait_all()
        worker.wait_sync()
        worker.barrier()

    def metrics(self) -> Metrics:
        """Return the statistics of this node since its start; printed as one line."""
        return Metrics(self._open_worker.server.statistics())

    def set_learning_rate(self, lr: float) -> None:
        """Change the learning rate of pushed gradients on this node; call it on all.

        A table with an :meth:`optimizer` takes the rate from its parameter groups instead.

        Raises:
            ArgumentError: the rate is negative or not finite.
        """
        self._open_worker.server.set_learning_rate(lr)

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's share of the rows, with optimizer state. Collective.

        ``torchrelay.checkpoint.save({"table": table}, folder)`` saves it, as does DCP with
        ``dcp.save({"table": table.state_dict()}, ...)``; both load it on any number of nodes.
        """
        self._check_numbered()
        return {"rows": _checkpoint.shard_of(self)}

    def _check_numbered(self) -> None:
        if self.num_keys == 0:
            raise UnsupportedError(
                f"table {self.name!r} has no number of keys, so it cannot be saved, loaded or read "
                "as a whole: pull the keys that you know"
            )

    def rows(self) -> Tensor:
        """Return all rows, with optimizer state: ``(num_keys, row_length)``.

        They are copied to this process's memory. Not collective: call :meth:`sync` first if other
        processes push asynchronously.
        """
        self._open_worker.wait_all()
        self._check_numbered()
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
        self._check_numbered()
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

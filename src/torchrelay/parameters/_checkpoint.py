"""A table in checkpoints of PyTorch (DCP): one tensor, with a shard for each worker.

Each worker saves and loads a contiguous range of keys, whichever node owns them at that moment. The
checkpoint holds whole rows, optimizer state included, as one logical tensor ``(num_keys,
row_length)``, so that it loads onto any other number of workers and nodes, and any DCP tool reads
it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from torchrelay import _torch
from torchrelay.errors import MismatchError, TorchRelayError, UnavailableError

if TYPE_CHECKING:
    from torch.distributed.checkpoint import StorageReader, StorageWriter

    from torchrelay.parameters._table import Table

__all__ = ["RowShard", "key_range"]

# Rows are written to and read from checkpoints in pieces, so that no piece takes a host's memory
# twice.
ROWS_AT_ONCE = 1 << 18


def key_range(num_keys: int, worker: int, workers: int) -> tuple[int, int]:
    """Return the first key that ``worker`` of ``workers`` saves, and the end of its range.

    The sizes of ranges differ by at most one key.
    """
    return num_keys * worker // workers, num_keys * (worker + 1) // workers


class RowShard(_torch.CheckpointShard):
    """Rows of a table, as the ``state_dict`` holds them: ``rows`` are those from ``start`` of all
    ``num_keys``.

    ``rows`` is ``(n, row_length)``, the table's dtype: each key's value, then its optimizer state.
    """

    @classmethod
    def of(cls, rows: torch.Tensor, start: int, num_keys: int) -> RowShard:
        return cls(rows, (start, 0), torch.Size((num_keys, rows.shape[1])))

    @property
    def rows(self) -> torch.Tensor:
        return self.local

    @property
    def start(self) -> int:
        return self.offsets[0]

    @property
    def num_keys(self) -> int:
        return self.size()[0]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _row_shard, (self.rows, self.start, self.num_keys)


def _row_shard(rows: torch.Tensor, start: int, num_keys: int) -> RowShard:
    return RowShard.of(rows, start, num_keys)


# So that torch.load(weights_only=True) reads a shard.
torch.serialization.add_safe_globals([_row_shard])


def empty_shard(table: Table) -> RowShard:
    """Return the share of the rows that this process saves and loads, not filled."""
    start, end = key_range(table.num_keys, table.worker_index, table.workers)
    rows = torch.empty(end - start, table.row_length, dtype=table.dtype)
    return RowShard.of(rows, start, table.num_keys)


def shard_of(table: Table) -> RowShard:
    """Return this process's share of the rows. Collective."""
    table.sync()
    shard = empty_shard(table)
    for keys, rows in _pieces(shard.start, shard.rows):
        table.worker.pull_rows(keys, rows)
    table.worker.barrier()
    return shard


def all_rows(table: Table) -> torch.Tensor:
    """Return all rows, ``(num_keys, row_length)``. Not collective."""
    table.worker.wait_all()
    everything = torch.empty(table.num_keys, table.row_length, dtype=table.dtype)
    for keys, rows in _pieces(0, everything):
        table.worker.pull_rows(keys, rows)
    return everything


def load_rows(table: Table, state: dict[str, Any]) -> None:
    """Set this process's share of the rows from its own shard, or from all rows. Collective.

    Raises:
        MismatchError: the state of some process does not fit; on every process.
    """
    values_only = "rows" not in state
    given = state["weight" if values_only else "rows"]
    _refuse_together(table, _misfit(table, given, values_only))
    start, end = key_range(table.num_keys, table.worker_index, table.workers)
    mine = (
        given.rows
        if isinstance(given, RowShard)
        else given.detach()[start:end].to("cpu", table.dtype)
    )
    for keys, rows in _pieces(start, mine.contiguous()):
        (table.worker.set if values_only else table.worker.set_rows)(keys, rows)
    table.sync()


def _refuse_together(table: Table, problem: str | None) -> None:
    server = table.server
    problems = server.topology.gather(
        f"{server.table}/loads/{next(server.loads)}",
        problem,
        "pass the state to load",
        server.store.check_leader,
    )
    if any(problems):
        raise MismatchError("; ".join(dict.fromkeys(text for text in problems if text)))


def _misfit(table: Table, given: torch.Tensor, values_only: bool) -> str | None:
    """Return why ``given`` is not the state of ``table``, or not this process's share of it."""
    if values_only:
        if tuple(given.shape) != (table.num_keys, table.dim):
            return (
                f"weight is {tuple(given.shape)}; the table holds {table.num_keys} vectors of "
                f"{table.dim}"
            )
        return None
    expected = (table.num_keys, table.row_length)
    if tuple(given.size()) != expected or given.dtype != table.dtype:
        return (
            f"the saved table has {tuple(given.size())} keys and elements a row of {given.dtype}, "
            f"this one {expected} of {table.dtype}; a row holds {table.dim} elements and the state "
            f"of '{table.rule.kind}'"
        )
    if not isinstance(given, RowShard):
        return None
    share = key_range(table.num_keys, table.worker_index, table.workers)
    held = (given.start, given.start + len(given.rows))
    if held != share:
        return (
            f"worker {table.worker_index} of {table.workers} was given the rows {held[0]} to "
            f"{held[1] - 1}, but loads {share[0]} to {share[1] - 1}: table.state_dict() is one "
            "process's share. Save it with DCP (dcp.save, table.save), or save the module's "
            "state_dict(), which has all rows"
        )
    return None


def save(table: Table, path: str, storage_writer: StorageWriter | None) -> None:
    """Write the table to the folder ``path``. Collective over all workers.

    Raises:
        UnavailableError: there are several workers and no default process group, over which DCP
            coordinates.
    """
    from torch.distributed import checkpoint as dcp  # noqa: PLC0415 - takes long to import

    state = {"table": table.state_dict()}
    group = table.process_group
    with _coordinated(table):
        dcp.save(state, checkpoint_id=path, storage_writer=storage_writer, process_group=group)


def load(table: Table, path: str, storage_reader: StorageReader | None) -> None:
    """Read what :func:`save` wrote, on any number of workers. Collective over all workers.

    Raises:
        UnavailableError: as :func:`save`.
        MismatchError: the checkpoint is of another table.
    """
    from torch.distributed import checkpoint as dcp  # noqa: PLC0415

    state = {"table": {"rows": empty_shard(table)}}
    group = table.process_group
    try:
        with _coordinated(table):
            dcp.load(state, checkpoint_id=path, storage_reader=storage_reader, process_group=group)
    except dcp.CheckpointException as error:
        raise MismatchError(
            f"the checkpoint in {path} does not fit a table of {table.num_keys} rows of "
            f"{table.row_length} elements with optimizer '{table.rule.kind}': "
            f"{next(iter(error.failures.values()))[0]}"
        ) from error
    table.load_state_dict(state["table"])


@contextmanager
def _coordinated(table: Table) -> Iterator[None]:
    """Check the process group of a call of DCP, and give its errors our types where a rank's
    failure has one.

    One worker needs no process group, and DCP need not warn that there is none.
    """
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed import checkpoint as dcp  # noqa: PLC0415

    size = dist.get_world_size(table.process_group) if dist.is_initialized() else 1
    if size != table.workers:
        raise UnavailableError(
            f"the table has {table.workers} workers, but the default process group has {size} "
            "ranks: checkpoints are coordinated over it; call "
            'torch.distributed.init_process_group("gloo") in every worker first'
        )
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "torch.distributed is disabled, unavailable or uninitialized"
        )
        try:
            yield
        except dcp.CheckpointException as error:
            for failure, _ in error.failures.values():
                if isinstance(failure, TorchRelayError):
                    raise failure from error
            raise


def _pieces(start: int, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the keys from ``start`` on with their rows, some at a time."""
    for first in range(0, len(rows), ROWS_AT_ONCE):
        piece = rows[first : first + ROWS_AT_ONCE]
        yield torch.arange(start + first, start + first + len(piece)), piece

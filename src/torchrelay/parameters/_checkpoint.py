"""A table in checkpoints of PyTorch (DCP): one tensor, with a shard for each worker.

Each worker saves and loads a contiguous range of keys, whichever node owns them at that moment. The
checkpoint holds whole rows, optimizer state included, as one logical tensor ``(num_keys,
row_length)``, so that it loads onto any other number of workers and nodes, and any DCP tool reads
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchrelay import _torch
from torchrelay.deferred import is_deferred, materialize_tensor
from torchrelay.errors import MismatchError
from torchrelay.parameters._arrays import describe, empty, is_dense, keys_of

if TYPE_CHECKING:
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


def shard_of(table: Table) -> RowShard:
    """Return this process's share of the rows. Collective."""
    table.sync()
    start, end = key_range(table.num_keys, table.worker_index, table.workers)
    shard = RowShard.of(rows_of(table, start, end), start, table.num_keys)
    table._open_worker.barrier()
    return shard


def rows_of(table: Table, start: int, end: int) -> torch.Tensor:
    """Return the rows of the keys [``start``, ``end``), ``(n, row_length)``. Not collective."""
    everything = empty(end - start, table.row_length, dtype=table.dtype)
    for keys, rows in _pieces(start, everything):
        table._open_worker.pull_rows(keys, rows)
    return everything


def load_rows(table: Table, state: dict[str, Any]) -> None:
    """Set this process's share of the rows from its own shard, or from all rows. Collective.

    Raises:
        MismatchError: the state of some process does not fit; on every process.
    """
    _refuse_together(table, _misfit(table, state))
    values_only = "rows" not in state
    given = state["weight" if values_only else "rows"]
    if is_deferred(given):
        given = materialize_tensor(given)
    table.sync()  # earlier pushes are not applied to the new rows
    start, end = key_range(table.num_keys, table.worker_index, table.workers)
    mine = (
        given.rows
        if isinstance(given, RowShard)
        else given.detach()[start:end].to("cpu", table.dtype)
    )
    write = table._open_worker.set if values_only else table._open_worker.set_rows
    for keys, rows in _pieces(start, mine.contiguous()):
        write(keys, rows)
    table.sync()


def _refuse_together(table: Table, problem: str | None) -> None:
    server = table._open_worker.server
    problems = server.topology.gather(
        f"{server.table}/loads/{next(server.loads)}",
        problem,
        "pass the state to load",
        server.store.check_leader,
    )
    if any(problems):
        raise MismatchError("; ".join(dict.fromkeys(text for text in problems if text)))


def _misfit(table: Table, state: Any) -> str | None:
    """Return why ``state`` is not that of ``table``, or not this process's share of it."""
    names = [name for name in ("rows", "weight") if isinstance(state, Mapping) and name in state]
    if not names:
        return "the state of a table is a dict with its 'rows', or the 'weight' of an nn.Embedding"
    given = state[names[0]]
    if not isinstance(given, RowShard) and not (
        isinstance(given, torch.Tensor) and (is_dense(given) or is_deferred(given))
    ):
        return f"{names[0]} must be a dense tensor with values of its own, not a {describe(given)}"
    return _misfit_of(table, given, values_only=names[0] == "weight")


def _misfit_of(table: Table, given: torch.Tensor, values_only: bool) -> str | None:
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
            f"the saved table has rows and elements {tuple(given.size())} of {given.dtype}, this "
            f"one {expected} of {table.dtype}; a row holds {table.dim} elements and the state of "
            f"'{table.rule.kind}'"
        )
    if not isinstance(given, RowShard):
        return None
    share = key_range(table.num_keys, table.worker_index, table.workers)
    held = (given.start, given.start + len(given.rows))
    if held != share:
        return (
            f"worker {table.worker_index} of {table.workers} was given the rows {held[0]} to "
            f"{held[1] - 1}, but loads {share[0]} to {share[1] - 1}: table.state_dict() is one "
            "process's share. Save it with torchrelay.checkpoint.save or dcp.save, or save the "
            "module's state_dict(), which has all rows"
        )
    return None


def _pieces(start: int, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the keys from ``start`` on with their rows, some at a time."""
    for first in range(0, len(rows), ROWS_AT_ONCE):
        piece = rows[first : first + ROWS_AT_ONCE]
        yield keys_of(np.arange(start + first, start + first + len(piece))), piece

"""A table as PyTorch Distributed Checkpoint (DCP) sees it: one tensor, saved in as many shards as there are workers.

Each worker saves and loads a contiguous range of keys, whoever owns them at that moment. The checkpoint holds
whole rows, optimizer state included, as one logical tensor ``(num_keys, row_length)``, so that it loads onto
any other number of workers and nodes, and any DCP tool reads it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from torchrelay import _torch
from torchrelay.errors import MismatchError, UnavailableError

if TYPE_CHECKING:
    from torchrelay.parameters.table import Table

__all__ = ["RowShard", "key_range"]


def key_range(num_keys: int, worker: int, workers: int) -> tuple[int, int]:
    """The keys, from and up to, that ``worker`` of ``workers`` saves: ranges differ by at most one key."""
    return num_keys * worker // workers, num_keys * (worker + 1) // workers


class RowShard(_torch.CheckpointShard):
    """Rows of a table, as the ``state_dict`` holds them: ``rows`` are those from ``start`` of all ``num_keys``.

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


def save(table: Table, path: str) -> None:
    """Writes the table to the folder ``path``; collective over all workers.

    Raises:
        UnavailableError: there are several workers and no default process group, over which DCP coordinates.
    """
    from torch.distributed import checkpoint as dcp  # noqa: PLC0415 - takes long to import

    with _group_of(table.workers):
        dcp.save(  # type: ignore[attr-defined]
            {"table": table.state_dict()}, checkpoint_id=path
        )


def load(table: Table, path: str) -> None:
    """Reads what :func:`save` wrote, on any number of workers; collective over all workers.

    Raises:
        UnavailableError: as :func:`save`.
        MismatchError: the checkpoint is of another table.
    """
    from torch.distributed import checkpoint as dcp  # noqa: PLC0415

    state = {"table": table.empty_state_dict()}
    try:
        with _group_of(table.workers):
            dcp.load(state, checkpoint_id=path)  # type: ignore[attr-defined]
    except dcp.CheckpointException as error:  # type: ignore[attr-defined]
        raise MismatchError(
            f"the checkpoint in {path} does not fit a table of {table.num_keys} rows of {table.row_length} elements "
            f"with optimizer '{table.rule.kind}': {next(iter(error.failures.values()))[0]}"
        ) from error
    table.load_state_dict(state["table"])


@contextmanager
def _group_of(workers: int) -> Iterator[None]:
    """One worker needs no process group, and DCP need not warn that there is none."""
    import torch.distributed as dist  # noqa: PLC0415

    size = dist.get_world_size() if dist.is_initialized() else 1
    if size != workers:
        raise UnavailableError(
            f"the table has {workers} workers, but the default process group has {size} ranks: checkpoints are "
            'coordinated over it; call torch.distributed.init_process_group("gloo") in every worker first'
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield

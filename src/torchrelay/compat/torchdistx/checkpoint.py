"""``torchdistx.checkpoint``: state dicts with sharded tensors, written and read by all ranks.

>>> import torch
>>> from torchrelay.compat.torchdistx import checkpoint as cp
>>> fs_writer = cp.FileSystemWriter(path="/checkpoint/")
>>> cp.save_state_dict(state_dict=model.state_dict(), storage_writer=fs_writer)

The planning is that of ``torch.distributed.checkpoint``, the files those of
:mod:`torchrelay.checkpoint`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from torchrelay.checkpoint import Reader as FileSystemReader
from torchrelay.checkpoint import Writer as FileSystemWriter
from torchrelay.errors import UnsupportedError

__all__ = ["FileSystemReader", "FileSystemWriter", "load_state_dict", "save_state_dict"]


def save_state_dict(
    state_dict: dict[str, Any],
    storage_writer: StorageWriter,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
) -> None:
    """Write ``state_dict`` from all ranks; returns once it is committed.

    Raises:
        UnsupportedError: ``coordinator_rank`` is not 0.
        torch.distributed.checkpoint.CheckpointException: some rank failed; it holds each rank's
        error.
    """
    _check_coordinator(coordinator_rank)
    with _alone_without_warning():
        dcp.save(
            state_dict, storage_writer=storage_writer, process_group=process_group, no_dist=no_dist
        )


def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
) -> None:
    """Read into the tensors of ``state_dict``, on any number of ranks and in any layout.

    Raises:
        UnsupportedError: ``coordinator_rank`` is not 0.
        torch.distributed.checkpoint.CheckpointException: some rank failed; it holds each rank's
        error.
    """
    _check_coordinator(coordinator_rank)
    with _alone_without_warning():
        dcp.load(
            state_dict, storage_reader=storage_reader, process_group=process_group, no_dist=no_dist
        )


def _check_coordinator(rank: int) -> None:
    if rank != 0:
        raise UnsupportedError(f"coordinator_rank = {rank}: rank 0 coordinates")


@contextmanager
def _alone_without_warning() -> Iterator[None]:
    """Ignore DCP's warning that there is no process group, which a single process needs not."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "torch.distributed is disabled, unavailable or uninitialized"
        )
        yield

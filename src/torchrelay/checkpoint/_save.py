"""Saving of a state by all ranks: agree, write, commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrelay import _telemetry
from torchrelay._progress import Progress, tracking
from torchrelay.checkpoint._catalog import Keep
from torchrelay.checkpoint._group import savers_of
from torchrelay.checkpoint._inventory import gather_inventory, plan_chunks
from torchrelay.checkpoint._saving import Saving
from torchrelay.checkpoint._storage import Path, text_of
from torchrelay.checkpoint._tensors import data_of
from torchrelay.checkpoint._write import MAX_STAGING_BYTES, Part, SaveOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["save"]


def save(
    state: Any,
    path: Path,
    *,
    keep: int | Keep | None = None,
    threads: int | None = None,
    fsync: bool = True,
    checksum: bool = True,
    max_staging_bytes: int = MAX_STAGING_BYTES,
    progress: Progress = False,
    group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Write a checkpoint. Collective over ``group``. Returns on every rank once it is committed.

    Each rank writes the shards that it holds; what several ranks hold is written by one of them,
    distributed by size. Tensors that share their memory are stored once. A checkpoint that is at
    ``path`` already is replaced in one step (on object stores: refused).

    Args:
        state: a module, or a dictionary, nested as you like, of tensors (plain, DTensor,
            ShardedTensor), plain values, modules and optimizers. A tensor that is not sharded, and
            a value, is taken to be the same on all ranks that have its key.
        path: the folder to write, or any fsspec URL; all ranks must see the same.
        keep: once this checkpoint is committed, remove older ones of its series, which are those
            in the same folder whose names differ in the last number only: all but the newest
            ``keep``, or but those that a :class:`Keep` names.
        threads: how many write at once on each rank; by default the usable cores, at most 4.
        fsync: whether the checkpoint must be on the disk when this returns.
        checksum: whether to store CRC32C checksums.
        max_staging_bytes: host memory for copies of tensors that are not contiguous in host memory.
        progress: True for a progress bar on the coordinator, or a function (bytes done, bytes in
            all).
        group: the ranks that take part; by default the default process group, or this process
            alone.
        no_dist: whether this process is alone, although there is a process group or a launcher.

    Raises:
        ArgumentError: a value that a checkpoint cannot hold; the message names its key.
        UnsupportedError: a tensor that it cannot hold.
        MismatchError: ranks disagree on the shape or dtype of a tensor, or on a value.
        StorageError: the disk is full, the path cannot be written, or another save to it is under
            way.
        PeerLostError: a rank died. The checkpoint that was at ``path`` before is intact.
    """
    with _telemetry.event("checkpoint", "save", text_of(path)) as running:
        saving = Saving(path, SaveOptions(threads, fsync, checksum, keep, max_staging_bytes))
        ranks = savers_of(group, no_dist)
        mine, everyone = gather_inventory(state, ranks)
        chunks = plan_chunks(mine, everyone, ranks)

        def write() -> Part:
            saving.check_shared(saving.transaction.seen_id(), save_id)
            running.size_bytes = size_bytes = sum(chunk.size_bytes for chunk in chunks)
            data = [data_of(mine.blocks[chunk.block]) for chunk in chunks]
            with tracking(progress, size_bytes, "saving", shown=ranks.is_coordinator) as advance:
                return saving.write(ranks.global_rank, chunks, data, advance)

        save_id = ranks.coordinate(saving.transaction.begin)
        try:
            ranks.conclude(write, lambda parts: saving.commit(everyone, parts))
        finally:
            if ranks.is_coordinator:
                saving.transaction.discard()  # does nothing after a commit
        if saving.retains:
            ranks.coordinate(saving.retain)

"""Saving of a state by all ranks: agree, write, commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint._assemble import Description, PartRecord, assemble, record_of
from torchrelay.checkpoint._catalog import Keep, check_keep, retain
from torchrelay.checkpoint._group import Group, group_of
from torchrelay.checkpoint._inventory import Inventory, agree, sources_of, take_inventory
from torchrelay.checkpoint._progress import Progress, tracking
from torchrelay.checkpoint._storage import Path, open_transaction, split
from torchrelay.checkpoint._write import MAX_STAGING_BYTES, default_threads, write_part
from torchrelay.errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["check_count", "gather_inventory", "save"]


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
        no_dist: whether this process is alone, although there is a process group.

    Raises:
        ArgumentError: a value that a checkpoint cannot hold; the message names its key.
        UnsupportedError: a tensor that it cannot hold.
        MismatchError: ranks disagree on the shape or dtype of a tensor, or on a value.
        StorageError: the disk is full, the path cannot be written, or another save to it is under
            way.
        PeerLostError: a rank died. The checkpoint that was at ``path`` before is intact.
    """
    threads = check_count("threads", threads, default_threads())
    rule = check_keep(keep, path)
    check_count("max_staging_bytes", max_staging_bytes, 1)
    ranks = group_of(group, no_dist)
    mine, everyone = gather_inventory(state, ranks)
    sources = sources_of(mine, everyone, ranks)
    transaction = open_transaction(path, fsync=fsync)
    _, name = split(path)

    def write() -> PartRecord:
        transaction.join(save_id)
        size_bytes = sum(source.size_bytes for source in sources)
        with tracking(progress, size_bytes, "saving", shown=ranks.is_coordinator) as advance:
            part = write_part(
                transaction,
                ranks.global_rank,
                sources,
                threads=threads,
                checksum=checksum,
                max_staging_bytes=max_staging_bytes,
                progress=advance,
            )
        return record_of(part)

    save_id = ranks.coordinate(transaction.begin)
    try:
        ranks.conclude(
            write, lambda records: transaction.commit(*assemble(everyone, records, name=name))
        )
    finally:
        if ranks.is_coordinator:
            transaction.discard()  # does nothing after a commit
    if rule is not None:
        ranks.coordinate(lambda: retain(path, rule))


def check_count(name: str, value: int | None, default: int) -> int:
    """Return ``value``, or the default for None.

    Raises:
        ArgumentError: it is less than 1.
    """
    if value is None:
        return default
    if value < 1:
        raise ArgumentError(f"{name} must be at least 1, not {value}")
    return value


def gather_inventory(
    state: Any, ranks: Group, before: Callable[[], None] = lambda: None
) -> tuple[Inventory, list[Description]]:
    """Return this rank's inventory, and the descriptions of all ranks (see :func:`agree`).

    An error on one rank is raised on all.

    ``before`` is called first, in the same round of messages.
    """
    found: list[Inventory] = []

    def take() -> bytes:
        before()
        found.append(take_inventory(state))
        return found[0].description.fingerprint()

    fingerprints = ranks.together(take)
    return found[0], agree(found[0].description, fingerprints, ranks)

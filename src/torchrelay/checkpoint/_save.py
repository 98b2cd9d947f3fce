"""Saves of a state by all ranks: agree, write, commit; or copy the state, return, and let another
process write it.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrelay import _telemetry, config
from torchrelay._names import names_options
from torchrelay._progress import Progress, tracking
from torchrelay.checkpoint.engine._background import SaveHandle, saver
from torchrelay.checkpoint.engine._engine import MAX_STAGING_BYTES, Save, SaveOptions
from torchrelay.checkpoint.engine._group import Group, group_of
from torchrelay.checkpoint.engine._writer_process import WriteJob
from torchrelay.checkpoint.engine._written import Written
from torchrelay.checkpoint.plan._export import Layout, exported, layout_of
from torchrelay.checkpoint.state._tensors import data_of
from torchrelay.checkpoint.storage._catalog import Keep
from torchrelay.checkpoint.storage._contract import Path, storage_errors, text_of
from torchrelay.errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["async_save", "save"]


@names_options()
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
    layout: Layout = None,
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
            ``keep``, or but those that a :class:`Keep` names, and those that a symbolic link beside
            them points to. Checkpoints that were copied or renamed stay.
        threads: how many write at once on each rank; by default the usable cores, at most 4.
        fsync: whether the checkpoint must be on the disk when this returns.
        checksum: whether to store CRC32C checksums.
        max_staging_bytes: host memory for copies of tensors that are not contiguous in host memory.
        progress: True for a progress bar on the coordinator, or a function (bytes done, bytes in
            all).
        layout: ``"huggingface"``, or a :class:`HuggingFace` with options: the model lies in files
            that ``from_pretrained`` reads.
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
        TorchRelayError: an asynchronous save before has failed, and its handle has not raised that;
            nothing is saved.
    """
    with _telemetry.event("checkpoint", "save", text_of(path)) as running:
        options = SaveOptions(threads, fsync, checksum, keep, max_staging_bytes)
        ranks = group_of(group, no_dist, for_save=True)
        state, options = _laid_out(state, options, layout, ranks)
        one = Save(path, options)

        def write() -> Written:
            one.check_shared(save_id)
            running.size_bytes = size_bytes = int(plan.sizes.sum())
            data = [data_of(mine.blocks[chunk.block]) for chunk in plan.chunks]
            with tracking(progress, size_bytes, "saving", shown=ranks.is_coordinator) as advance:
                return one.write(ranks.global_rank, plan.chunks, data, advance)

        with one.discarding(ranks):
            save_id, mine, descriptions = saver.planner.begin(
                state, one.transaction.begin, ranks, saver.raise_failure
            )
            plan = saver.planner.plan(mine, descriptions, ranks)
            one.complete(ranks, write, descriptions)


@names_options()
def async_save(
    state: Any,
    path: Path,
    *,
    keep: int | Keep | None = None,
    threads: int | None = None,
    fsync: bool = True,
    checksum: bool = True,
    max_staging_bytes: int | None = None,
    layout: Layout = None,
    group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> SaveHandle:
    """Start a checkpoint. Collective over ``group``. Returns once the state is copied; it may then
    change.

    The copy is in shared memory that the next save uses again, and a process of its own writes it,
    so that the trainer is not disturbed. If the trainer is killed, that process still finishes the
    checkpoint, or discards it if another rank's part never comes. One save is in progress at a
    time: a second call waits for the first, but not with several ranks for one in another thread.

    Args:
        state: as for :func:`save`.
        path: the folder to write, or any fsspec URL.
        keep: how many checkpoints of its series to keep, as for :func:`save`.
        threads: how many write at once; by default the usable cores, at most 4.
        fsync: whether the checkpoint must be on the disk before it is committed.
        checksum: whether to store CRC32C checksums.
        max_staging_bytes: the most memory that this rank's copy may take; by default no limit.
        layout: as for :func:`save`.
        group: the ranks that take part; by default the default process group, or this process
            alone.
        no_dist: whether this process is alone, although there is a process group or a launcher.

    Raises:
        ArgumentError: a value that a checkpoint cannot hold, or a copy larger than
            ``max_staging_bytes``; or another call has not returned, in this thread or, with several
            ranks, in another one.
        MismatchError, UnsupportedError, StorageError, PeerLostError: as for :func:`save`; also what
            ended the previous save, unless its handle has raised it.
    """
    event = _telemetry.event("checkpoint", "async_save", text_of(path))
    with event as running, ExitStack() as held:
        options = SaveOptions(threads, fsync, checksum, keep, max_staging_bytes)
        ranks = group_of(group, no_dist, for_save=True)
        state, options = _laid_out(state, options, layout, ranks)
        one = Save(path, options)

        def begin() -> None:
            held.enter_context(saver.turn(one.path, waits=ranks.size == 1))

        def stage() -> float:
            commit_timeout_s = config.load(config.Checkpoint).commit_timeout_s
            one.check_shared(save_id)
            saver.start()
            running.size_bytes = int(plan.sizes.sum())
            if max_staging_bytes is not None and running.size_bytes > max_staging_bytes:
                raise ArgumentError(
                    f"rank {ranks.global_rank}: the copy of its part needs {running.size_bytes} "
                    f"bytes, and max_staging_bytes is {max_staging_bytes}; allow more, or use "
                    "save()"
                )
            blocks = [mine.blocks[chunk.block] for chunk in plan.chunks]
            saver.staging.copy(blocks, plan.starts, plan.sizes)
            return commit_timeout_s

        with one.discarding(ranks):  # until another process has it
            save_id, mine, descriptions = saver.planner.begin(
                state, one.transaction.begin, ranks, begin
            )
            plan = saver.planner.plan(mine, descriptions, ranks)
            commit_timeout_s = ranks.together(stage)[ranks.rank]
            if not ranks.is_coordinator:
                descriptions = []
            fds = one.transaction.hand_over() if ranks.is_coordinator else ()
        place = (ranks.ranks, ranks.rank)
        objects = [description.objects for description in descriptions]
        job = WriteJob(one.path, options, save_id, *place, objects, commit_timeout_s)
        try:
            with storage_errors(f"starting to save {one.path}"):
                return saver.submit(one, job, plan, fds)
        finally:
            for fd in fds:
                os.close(fd)


def _laid_out(
    state: Any, options: SaveOptions, layout: Layout, ranks: Group
) -> tuple[Any, SaveOptions]:
    """Return the state and the options of a save for ``layout``."""
    found = layout_of(layout)
    if found is None:
        return state, options
    state, exports = exported(state, found, ranks)
    return state, replace(options, exports=exports)

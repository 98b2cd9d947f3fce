"""Saves of a state by all ranks: agree, write, commit; or copy the state, return, and let another
process write it.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchrelay import _native, _telemetry, config
from torchrelay._helper import HelperProcess, module_command
from torchrelay._progress import Progress, tracking
from torchrelay.buffers import Segment
from torchrelay.checkpoint._catalog import Keep
from torchrelay.checkpoint._group import group_of
from torchrelay.checkpoint._inventory import begin_save, plan_save
from torchrelay.checkpoint._saving import (
    MAX_STAGING_BYTES,
    Part,
    Plan,
    SaveOptions,
    Saving,
)
from torchrelay.checkpoint._storage import Path, split, storage_errors, text_of
from torchrelay.checkpoint._tensors import address_of, data_of, plain
from torchrelay.checkpoint._types import Sizes
from torchrelay.checkpoint._writer_process import WriteJob
from torchrelay.errors import ArgumentError, OperationTimeoutError, PeerLostError, from_json

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SaveHandle", "async_save", "save"]

_logger = logging.getLogger("torchrelay.checkpoint")
_SMALL_BYTES = 256 << 10  # of a copy that is not worth several threads


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
            ``keep``, or but those that a :class:`Keep` names, and those that a symbolic link beside
            them points to. Checkpoints that were copied or renamed stay.
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
        ranks = group_of(group, no_dist, for_save=True)

        def write() -> Part:
            saving.check_shared(save_id)
            running.size_bytes = size_bytes = int(plan.sizes.sum())
            data = [data_of(mine.blocks[chunk.block]) for chunk in plan.chunks]
            with tracking(progress, size_bytes, "saving", shown=ranks.is_coordinator) as advance:
                return saving.write(ranks.global_rank, plan.chunks, data, advance)

        try:
            save_id, mine, everyone = begin_save(state, saving, ranks)
            plan = plan_save(mine, everyone, ranks)
            ranks.conclude(write, lambda parts: saving.commit(everyone, parts))
        finally:
            if ranks.is_coordinator:
                saving.transaction.discard()  # does nothing after a commit


class SaveHandle:
    """A save in progress. If the handle is dropped, the next save raises its error."""

    def __init__(self, path: str, rank: int, helper: HelperProcess) -> None:
        self.path = path
        self._rank = rank
        self._helper = helper
        self._origin = _native.Origin()
        self._lock, self._is_waiting = threading.RLock(), False
        self._done = threading.Event()
        self._error: Exception | None = None
        self._raised = False
        self._is_left = False

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not. Does not block."""
        return self._wait(0.0)

    def result(self, timeout_s: float | None = None) -> str:
        """Wait until the checkpoint is committed by all ranks; return its path.

        Raises:
            ArgumentError: another process has begun the save, and forked this one; or this thread
                is waiting for it already, as where a signal interrupts it.
            OperationTimeoutError: it is not within ``timeout_s``; it goes on.
            PeerLostError: the writer process, or another rank's, was killed. The checkpoint is
                discarded. Or this process has left the writer to itself, as it does when it exits.
            StorageError: it could not be written, here or on another rank.
        """
        if not self._wait(timeout_s):
            raise OperationTimeoutError(
                f"{self.path}: the save has not ended within {timeout_s:g} s; it goes on"
            )
        if self._error is not None:
            self._raised = True
            raise self._error
        return self.path

    def _wait(self, timeout_s: float | None) -> bool:
        """Wait for the result; return whether it has arrived."""
        if self._done.is_set():
            return True
        if self._origin.is_forked:
            raise ArgumentError(
                f"{self.path}: process {self._origin.pid} started the save; only it can wait for it"
            )
        begun = time.monotonic()
        if not self._lock.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            return False  # another thread waits, too
        was_waiting, self._is_waiting = self._is_waiting, True
        try:
            if self._done.is_set():
                return True
            if was_waiting:
                if timeout_s == 0:
                    return False
                raise ArgumentError(
                    f"{self.path}: this thread is waiting for the save already, and a signal has "
                    "interrupted it; wait, or start the next save, after the handler has returned"
                )
            left_s = timeout_s and max(0.0, timeout_s - (time.monotonic() - begun))
            try:
                received = self._helper.channel.receive(left_s)
            except PeerLostError:
                self._error = self._lost()
            else:
                if received is None:
                    return False
                failure, _ = received
                if failure is None:
                    _logger.info("%s is committed", self.path)
                else:
                    self._error = from_json(failure)
            self._done.set()
            return True
        finally:
            self._is_waiting = was_waiting
            self._lock.release()

    def _lost(self) -> PeerLostError:
        """Return the error for a channel that has ended; kill the process unless it was left."""
        if self._is_left:
            return PeerLostError(
                f"{self.path}: the writer process was left before it reported the end of the save; "
                f"if it is committed, 'torchrelay checkpoint ls {split(self.path)[0]}' lists it"
            )
        reason = self._helper.exit_reason()
        self._helper.kill()  # if it has only closed its end
        return PeerLostError(
            f"{self.path}: rank {self._rank}: the writer process has died (it {reason}); the "
            "checkpoint is discarded by the next save",
            ranks=(self._rank,),
        )

    def _leave(self) -> None:
        """End the channel and all waiting; the process goes on with the save."""
        self._is_left = True
        self._helper.channel.shut_down()
        self._wait(None)


class Staging:
    """A shared segment that is reused from save to save, and replaced when a save needs more.

    It is page-locked for copies from CUDA tensors, which then run at the rate of the link.
    """

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self.is_new = False  # until the writer process has the segment
        self._locked: torch.Tensor | None = None  # over all of the segment, if it is page-locked

    @property
    def fd(self) -> int:
        assert self._segment is not None
        return self._segment.fd

    def copy(self, tensors: Sequence[torch.Tensor], starts: Sizes, sizes: Sizes) -> None:
        """Copy tensors of ``sizes`` bytes to ``starts``. Blocks until they may change."""
        addresses = np.array([*map(address_of, tensors)], np.uint64)
        devices = {
            tensors[i].device for i in np.flatnonzero(addresses == 0).tolist() if tensors[i].is_cuda
        }
        end = int((starts + sizes).max(initial=0))
        self.reserve(end, locked=bool(devices))
        if self._segment is None:
            return  # there are no bytes
        small = (addresses != 0) & (sizes <= _SMALL_BYTES)
        whole = self._segment.tensor((self._segment.size_bytes,), torch.uint8)
        targets = starts[small] + np.uint64(whole.data_ptr())
        _native.copy_memory(targets, addresses[small], sizes[small])
        with torch.no_grad():
            for i in np.flatnonzero(~small).tolist():
                tensor = plain(tensors[i])
                target = self._segment.tensor(tensor.shape, tensor.dtype, int(starts[i]))
                target.copy_(tensor, non_blocking=tensor.is_cuda)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def reserve(self, size_bytes: int, *, locked: bool) -> None:
        """Ensure that the segment has ``size_bytes``."""
        if size_bytes > 0 and (self._segment is None or self._segment.size_bytes < size_bytes):
            self.close()  # before the new one is made, so that there are never two
            self._segment = Segment.create(size_bytes, "torchrelay-checkpoint")
            self.is_new = True
        if locked and self._locked is None and self._segment is not None:
            memory = self._segment.tensor((self._segment.size_bytes,), torch.uint8)
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
            if code:
                _logger.warning(
                    "the copy for asynchronous saves, %d bytes, cannot be page-locked (CUDA error "
                    "%d); saves are right, but stall longer",
                    memory.nbytes,
                    code,
                )
            else:
                self._locked = memory

    def close(self) -> None:
        """Release the memory."""
        locked, self._locked = self._locked, None
        if locked is not None:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(locked.data_ptr())
        self._segment = None


class _Writer:
    """The writer process of this trainer, which runs one save at a time, and the staging memory
    that both map.
    """

    def __init__(self) -> None:
        self._lock, self._is_starting = threading.RLock(), False
        self._reset()

    def _reset(self) -> None:
        self.helper: HelperProcess | None = None
        self.staging = Staging()
        self.last: SaveHandle | None = None
        self._sent: Plan | None = None  # what the process has

    @contextmanager
    def turn(self, path: str, *, waits: bool) -> Iterator[None]:
        """Let no other thread start a save. First waits for the previous save, and raises its error
        unless its handle already has.

        Raises:
            ArgumentError: this thread is starting one already, as where a signal interrupts it; or
                another one is, and this one does not wait.
        """
        lock = self._lock
        has_lock = lock.acquire(blocking=waits)
        if not has_lock or self._is_starting:
            if has_lock:
                lock.release()
            raise ArgumentError(
                f"{path}: another async_save() has not returned in this thread, or in another one, "
                "for which several ranks do not wait, as they could block each other; let one "
                "thread start one save at a time"
            )
        self._is_starting = True
        try:
            if self.last is not None and not self.last._raised:
                self.last.result()
            self.last = None  # not before: until then the process reads the staging memory
            yield
        finally:
            self._is_starting = False
            lock.release()

    def start(self) -> HelperProcess:
        """Start the process, unless it runs."""
        if self.helper is not None:
            self.helper.wait(0)
            if self.helper.exit_code is not None:
                self.close()
        if self.helper is None:
            # new session: Ctrl-C is for the trainer; what is staged is still written
            command = module_command("torchrelay.checkpoint._writer_process")
            self.helper = HelperProcess(command, new_session=True)
        return self.helper

    def submit(self, job: WriteJob, plan: Plan, fds: Sequence[int]) -> SaveHandle:
        """Send a job, duplicates of the descriptors ``fds``, and what the process lacks."""
        assert self.helper is not None
        if plan is not self._sent:
            job = replace(job, plan=plan)
        if self.staging.is_new:
            job, fds = replace(job, new_staging=True), (self.staging.fd, *fds)
        handle = SaveHandle(job.path, job.rank, self.helper)
        try:
            self.helper.channel.send(job, fds)
        except PeerLostError:
            self.helper.kill()  # if it has not died: the handle finds its end closed
        self.last, self._sent, self.staging.is_new = handle, plan, False
        return handle

    def close(self) -> None:
        """Let the process finish its current job and end."""
        helper, staging, last = self.helper, self.staging, self.last
        self._reset()
        if helper is not None:
            if last is not None:
                last._leave()
            helper.channel.shut_down()  # also if a forked child has it open
            helper.channel.close()
            helper.wait(None)
            staging.close()

    def forget(self) -> None:
        """In a forked child: the process is the parent's."""
        if self.helper is not None:
            self.helper.abandon()
        self._lock, self._is_starting = threading.RLock(), False  # a thread that had it is not here
        self._reset()


_writer = _Writer()
atexit.register(_writer.close)
os.register_at_fork(after_in_child=_writer.forget)


def async_save(
    state: Any,
    path: Path,
    *,
    keep: int | Keep | None = None,
    threads: int | None = None,
    fsync: bool = True,
    checksum: bool = True,
    max_staging_bytes: int | None = None,
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
        saving = Saving(path, options)
        ranks = group_of(group, no_dist, for_save=True)
        transaction = saving.transaction

        def begin() -> None:
            held.enter_context(_writer.turn(saving.path, waits=ranks.size == 1))

        def stage() -> float:
            commit_timeout_s = config.load(config.Checkpoint).commit_timeout_s
            saving.check_shared(save_id)
            _writer.start()
            running.size_bytes = int(plan.sizes.sum())
            if max_staging_bytes is not None and running.size_bytes > max_staging_bytes:
                raise ArgumentError(
                    f"rank {ranks.global_rank}: the copy of its part needs {running.size_bytes} "
                    f"bytes, and max_staging_bytes is {max_staging_bytes}; allow more, or use "
                    "save()"
                )
            blocks = [mine.blocks[chunk.block] for chunk in plan.chunks]
            _writer.staging.copy(blocks, plan.starts, plan.sizes)
            return commit_timeout_s

        try:
            save_id, mine, everyone = begin_save(state, saving, ranks, begin)
            plan = plan_save(mine, everyone, ranks)
            commit_timeout_s = ranks.together(stage)[ranks.rank]
        except BaseException:
            if ranks.is_coordinator:
                transaction.discard()
            raise
        job = WriteJob(
            saving.path,
            options,
            save_id,
            ranks.ranks,
            ranks.rank,
            mine.description.objects,
            commit_timeout_s,
        )
        fds = transaction.hand_over() if ranks.is_coordinator else ()
        try:
            with storage_errors(f"starting to save {saving.path}"):
                return _writer.submit(job, plan, fds)
        finally:
            for fd in fds:
                os.close(fd)

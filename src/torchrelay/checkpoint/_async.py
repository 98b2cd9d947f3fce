"""Asynchronous saves: copy the state, return, and let another process write it."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import TYPE_CHECKING, Any

from torchrelay import _native, config
from torchrelay._python import module_command
from torchrelay.checkpoint._catalog import Keep
from torchrelay.checkpoint._group import group_of
from torchrelay.checkpoint._inventory import gather_inventory, sources_of
from torchrelay.checkpoint._saving import SaveOptions, Saving
from torchrelay.checkpoint._staging import Staging
from torchrelay.checkpoint._storage import Path
from torchrelay.checkpoint._write import Source
from torchrelay.checkpoint._writer_process import Job
from torchrelay.errors import ArgumentError, OperationTimeoutError, PeerLostError, from_json

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SaveHandle", "async_save"]


class SaveHandle:
    """A save in progress. If the handle is dropped, the next save raises its error."""

    def __init__(self, path: str, rank: int, writer: _Writer | None) -> None:
        self.path = path
        self._rank = rank
        self._writer = writer
        self._error: Exception | None = None
        self._raised = False

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not. Does not block."""
        return self._writer is None or self._writer.poll(self, 0.0)

    def result(self, timeout_s: float | None = None) -> str:
        """Wait until the checkpoint is committed by all ranks; return its path.

        Raises:
            ArgumentError: another process has begun the save, and forked this one.
            OperationTimeoutError: it is not within ``timeout_s``; it goes on.
            PeerLostError: the writer process, or another rank's, was killed. The checkpoint is
                discarded.
            StorageError: it could not be written, here or on another rank.
        """
        if self._writer is not None and not self._writer.poll(self, timeout_s):
            raise OperationTimeoutError(
                f"{self.path}: the save has not ended within {timeout_s:g} s; it goes on"
            )
        if self._error is not None:
            self._raised = True
            raise self._error
        return self.path

    def _settle(self, error: Exception | None) -> None:
        self._error, self._writer = error, None


class _Writer:
    """The writer process of this trainer, and the staging memory that both map."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            self._process = subprocess.Popen(
                [
                    *module_command("torchrelay.checkpoint._writer_process"),
                    str(theirs.fileno()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Ctrl-C is for the trainer; what is staged is still written
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self.staging = Staging()
        self._handle: SaveHandle | None = None
        self._lock = threading.Lock()
        self._origin = _native.Origin()
        self.pid = self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def submit(self, handle: SaveHandle, job: Job, fds: Sequence[int]) -> None:
        """Send a job and duplicates of the descriptors ``fds``."""
        self._handle = handle
        with suppress(ConnectionError):  # it has died: poll() finds its end closed
            self._connection.send(job)
            for fd in fds:
                send_handle(self._connection, fd, self.pid)

    def poll(self, handle: SaveHandle, timeout_s: float | None) -> bool:
        """Wait for the result of ``handle``; return whether it has arrived."""
        if self._origin.is_forked:
            raise ArgumentError(
                f"{handle.path}: process {self._origin.pid} started the save; only it can "
                "wait for it"
            )
        with self._lock:
            if handle is not self._handle:
                return True
            if not self._connection.poll(timeout_s):
                return False
            self._handle = None
            try:
                failure = self._connection.recv()
            except (EOFError, ConnectionError):
                code = self._process.wait()
                handle._settle(
                    PeerLostError(
                        f"{handle.path}: rank {handle._rank}: the writer process has died (exit "
                        f"code {code}); the checkpoint is discarded by the next save",
                        ranks=(handle._rank,),
                    )
                )
                return True
            handle._settle(None if failure is None else from_json(failure))
            return True

    def close(self) -> None:
        """Let the process end after its current job."""
        with socket.fromfd(self._connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as ours:
            ours.shutdown(socket.SHUT_RDWR)  # also if a forked child has it open
        self._connection.close()
        self._process.wait()
        self.staging.close()

    def abandon(self) -> None:
        """Forget the writer, which belongs to the process that forked this one."""
        self._connection.close()
        self._process.returncode = 0  # nothing to wait for here


class _State:
    """One writer process and one save at a time in this process."""

    def __init__(self) -> None:
        self.writer: _Writer | None = None
        self.last: SaveHandle | None = None

    def finish_last(self) -> None:
        """Wait for the previous save, and raise its error unless its handle already has."""
        last, self.last = self.last, None
        if last is not None and not last._raised:
            last.result()

    def ready(self) -> _Writer:
        if self.writer is None or not self.writer.alive:
            self.close()
            self.writer = _Writer()
        return self.writer

    def forget(self) -> None:
        """In a forked child: the writer is the parent's."""
        writer, self.writer, self.last = self.writer, None, None
        if writer is not None:
            writer.abandon()

    def close(self) -> None:
        """Let the writer process finish and end."""
        writer, self.writer, self.last = self.writer, None, None
        if writer is not None:
            writer.close()


_state = _State()
atexit.register(_state.close)
os.register_at_fork(after_in_child=_state.forget)


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
    time: a second call waits for the first.

    Args:
        state: as for :func:`save`.
        path: the folder to write, or any fsspec URL.
        keep: which older checkpoints of its series to keep, as for :func:`save`.
        threads: how many write at once; by default the usable cores, at most 4.
        fsync: whether the checkpoint must be on the disk before it is committed.
        checksum: whether to store CRC32C checksums.
        max_staging_bytes: the most memory that this rank's copy may take; by default no limit.
        group: the ranks that take part; by default the default process group, or this process
            alone.
        no_dist: whether this process is alone, although there is a process group.

    Raises:
        ArgumentError: a value that a checkpoint cannot hold, or a copy larger than
            ``max_staging_bytes``.
        MismatchError, UnsupportedError, StorageError, PeerLostError: as for :func:`save`; also what
            ended the previous save, unless its handle has raised it.
    """
    options = SaveOptions(threads, fsync, checksum, keep, max_staging_bytes)
    saving = Saving(path, options)
    ranks = group_of(group, no_dist)
    mine, everyone = gather_inventory(state, ranks, before=_state.finish_last)
    sources = sources_of(mine, everyone, ranks)
    transaction = saving.transaction

    save_id = ranks.coordinate(transaction.begin)
    staged: list[tuple[_Writer, list[int], bool]] = []

    def stage() -> None:
        _check_size(sources, max_staging_bytes, ranks.global_rank)
        saving.check_shared(transaction.seen_id(), save_id)
        writer = _state.ready()
        staged.append((writer, *writer.staging.copy(sources)))

    try:
        ranks.together(stage)
        ((writer, starts, is_new),) = staged
    except BaseException:
        if ranks.is_coordinator:
            transaction.discard()
        raise
    fds = [writer.staging.fd] if is_new else []
    fds += transaction.hand_over() if ranks.is_coordinator else ()
    job = Job(
        saving.path,
        options,
        save_id,
        ranks.ranks,
        ranks.rank,
        [(*source[:5], start) for source, start in zip(sources, starts, strict=True)],
        everyone if ranks.is_coordinator else (),
        config.load(config.Checkpoint).commit_timeout_s,
        is_new,
        len(fds),
    )
    handle = SaveHandle(saving.path, ranks.global_rank, writer)
    writer.submit(handle, job, fds)
    transaction.release()
    _state.last = handle
    return handle


def _check_size(sources: list[Source], max_staging_bytes: int | None, rank: int) -> None:
    size_bytes = sum(source.size_bytes for source in sources)
    if max_staging_bytes is not None and size_bytes > max_staging_bytes:
        raise ArgumentError(
            f"rank {rank}: the copy of its part needs {size_bytes} bytes, and max_staging_bytes is "
            f"{max_staging_bytes}; allow more, or use save()"
        )

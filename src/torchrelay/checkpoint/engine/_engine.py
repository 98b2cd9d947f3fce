"""The engine below every way to save: this rank's part is written, the ranks agree that all are,
and the coordinator assembles the manifest, commits, and removes old checkpoints. Imports no torch.

The same code runs in the trainer (a synchronous save) and in the writer process (an asynchronous
one); what differs is the :class:`Coordinator`.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol

from torchrelay import _native
from torchrelay._progress import no_progress
from torchrelay.checkpoint._tasks import no_collection, run_tasks, usable_threads
from torchrelay.checkpoint._types import DataFile, check_count
from torchrelay.checkpoint.engine._output import (
    Data,
    OutputFile,
    Progress,
    Task,
    grouped,
)
from torchrelay.checkpoint.engine._written import Written, assemble
from torchrelay.checkpoint.format import _manifest
from torchrelay.checkpoint.format._manifest import Head
from torchrelay.checkpoint.plan._plan import Description, Exports, PlannedChunk
from torchrelay.checkpoint.storage._catalog import (
    Keep,
    check_keep,
    commit_time_ns,
    heads_in,
    open_folder,
    open_transaction,
    retain,
)
from torchrelay.checkpoint.storage._contract import Path, split
from torchrelay.errors import (
    MismatchError,
    StorageError,
    TorchRelayError,
    UnsupportedError,
    to_json,
)

__all__ = [
    "MAX_STAGING_BYTES",
    "Coordinator",
    "Save",
    "SaveOptions",
    "described",
]

_NAMES_RANK = re.compile(r"rank \d+: ")
_MAX_FILE_CHUNKS = 1 << 17  # so that readers take the header of a file
MAX_STAGING_BYTES = 1 << 30


class Coordinator(Protocol):
    """How the ranks of a save agree that all have written their parts: by collectives of the
    trainers (:class:`._group.Group`), or by notes of their writer processes
    (:class:`._writer_process.Notes`).
    """

    @property
    def is_coordinator(self) -> bool:
        """Return whether this rank is the one that commits."""

    def conclude(
        self, local: Callable[[], Written], finish: Callable[[list[Written]], None]
    ) -> None:
        """Call ``local`` on every rank, and ``finish`` with all results on the coordinator. Blocks;
        returns when ``finish`` has.

        Raises:
            TorchRelayError: ``local`` raised on some rank, or ``finish``; the first error, on every
                rank.
        """


@dataclass(frozen=True)
class SaveOptions:
    """Arguments of every way to save; see :func:`torchrelay.checkpoint.save`.

    Raises:
        ArgumentError: one is out of range.
    """

    threads: int | None = None
    fsync: bool = True
    checksum: bool = True
    keep: int | Keep | None = None
    max_staging_bytes: int | None = MAX_STAGING_BYTES
    exports: Exports | None = None

    def __post_init__(self) -> None:
        check_count("threads", self.threads)
        check_count("max_staging_bytes", self.max_staging_bytes)


class Save:
    """One save, as a rank takes part in it.

    Raises:
        ArgumentError: ``path`` cannot be the path of a checkpoint, or not of one with ``keep=``.
    """

    def __init__(self, path: Path, options: SaveOptions) -> None:
        self._options = options
        self._keep = check_keep(options.keep, path)
        self.transaction = open_transaction(path, fsync=options.fsync)
        self.path = self.transaction.location
        if options.exports is not None and not self.transaction.can_rename:
            raise UnsupportedError(
                f"{self.path}: layout= needs a mounted file system; save there, and copy the folder"
            )

    def check_shared(self, save_id: str) -> None:
        """Check that this rank finds the coordinator's save at its path.

        Raises:
            StorageError: it does not.
        """
        if not self.transaction.is_marked(save_id):
            raise StorageError(
                errno.ENOENT,
                f"this rank saves to {self.path}, but does not find the coordinator's save there: "
                "all ranks must save to the same path, on storage that they share",
            )

    def is_committed(self, save_id: str) -> bool | None:
        """Return whether the save was committed; None while the coordinator has not ended it, and
        lives, as far as can be seen.
        """
        is_marked = self.transaction.is_marked(save_id)  # asked first: removed after a commit
        is_committed = _manifest.is_of(partial(open_folder, self.path), save_id)
        return None if is_marked and not is_committed else is_committed

    def complete(
        self,
        ranks: Coordinator,
        write: Callable[[], Written],
        descriptions: Sequence[Description],
    ) -> None:
        """Write all parts, and commit. Blocks; returns on every rank once it is committed.

        Args:
            write: calls :meth:`write` for this rank.
            descriptions: as for :func:`assemble`; used on the coordinator.

        Raises:
            TorchRelayError: it failed, on whichever rank; nothing is left of it.
        """
        with self.discarding(ranks):
            ranks.conclude(write, lambda parts: self.commit(descriptions, parts))

    @contextmanager
    def discarding(self, ranks: Coordinator) -> Iterator[None]:
        """At the end, remove what was written, unless it is committed or left to a process."""
        try:
            yield
        finally:
            if ranks.is_coordinator:
                self.transaction.discard()

    def write(
        self,
        rank: int,
        chunks: Sequence[PlannedChunk],
        data: Sequence[Data],
        progress: Progress = no_progress,
    ) -> Written:
        """Write this rank's part, chunks and the data of each, to new files. Blocks until they are
        durable.

        ``progress`` is called with bytes written since the last call, from several threads.

        Raises:
            StorageError: a file cannot be written.
        """
        copied = (
            chunk.size_bytes
            for chunk, source in zip(chunks, data, strict=True)
            if not isinstance(source, int)
        )
        # Each thread copies one chunk at a time.
        copies = (self._options.max_staging_bytes or MAX_STAGING_BYTES) // max(copied, default=1)
        threads = min(usable_threads(self._options.threads), max(1, copies))
        outputs: list[OutputFile] = []
        exported: dict[str, Sequence[str]] = {}
        try:
            with no_collection():
                for pairs, exports, limit_bytes in self._divided(chunks, data):
                    least = limit_bytes // _MAX_FILE_CHUNKS
                    sizes = (max(chunk.size_bytes, least) for chunk, _ in pairs)
                    for group in grouped(pairs, sizes, limit_bytes):
                        place = f"{rank:05d}-{len(outputs):05d}"
                        name = (
                            f"torchrelay-export-{place}" if exports else f"data-{place}.safetensors"
                        )
                        sink = self.transaction.create(name)
                        checksum = self._options.checksum
                        output = OutputFile(name, sink, group, checksum, progress, exports)
                        outputs.append(output)
                        if exports is not None:
                            exported[name] = output.names
            if self.transaction.sequential:
                # Until it is closed, an upload has its last part in memory.
                uploads = [chain(output.tasks(), [output.sink.close]) for output in outputs]
                run_tasks([partial(_run_in_order, tasks) for tasks in uploads], threads)
            else:
                run_tasks([task for output in outputs for task in output.tasks()], threads)
                run_tasks([output.sink.close for output in outputs], threads)
        except BaseException:
            for output in outputs:
                output.sink.abort()
            raise
        files = {output.name: output.file for output in outputs}
        with no_collection():
            records = [record for output in outputs for record in output.records()]
            return Written(files, records, exported=exported)

    def _divided(
        self, chunks: Sequence[PlannedChunk], data: Sequence[Data]
    ) -> list[tuple[list[tuple[PlannedChunk, Data]], Exports | None, int]]:
        """Return what is exported and what is not, with the largest size of such a file."""
        pairs, limit_bytes = [*zip(chunks, data, strict=True)], self.transaction.max_file_bytes
        exports = self._options.exports
        if exports is None:
            return [(pairs, None, limit_bytes)]
        names = [exports.name_of(chunk) for chunk in chunks]
        rest = [pair for pair, name in zip(pairs, names, strict=True) if name is None]
        taken = [pair for pair, name in zip(pairs, names, strict=True) if name is not None]
        return [(rest, None, limit_bytes), (taken, exports, exports.max_file_bytes)]

    def commit(self, descriptions: Sequence[Description], parts: Sequence[Written]) -> None:
        """Commit the checkpoint, and remove what ``keep=`` does not keep. Coordinator only.
        Arguments as for :func:`assemble`.

        Raises:
            ArgumentError, MismatchError: as for :func:`assemble`.
            StorageError: it cannot be committed, or an older one not removed.
        """
        parent, name = split(self.path)
        heads: dict[str, Head] = {}
        with suppress(StorageError):  # one may be allowed to write there, but not to list
            heads = heads_in(parent)
        head = Head(commit_time_ns(heads), self.transaction.save_id, name)
        names, small = self._exported(parts)
        manifest, sizes = assemble(descriptions, parts, head, names, small)
        self.transaction.commit(manifest, sizes, names)
        self._retain({**heads, self.path: head})

    def _exported(self, parts: Sequence[Written]) -> tuple[dict[str, str], dict[str, DataFile]]:
        """Write the files beside what the parts export. Return the names that files have in the
        checkpoint, by those under which they were written, and the files of no part.
        """
        exports = self._options.exports
        if exports is None:
            return {}, {}
        found = {name: part for part in parts for name in part.exported}
        count, names = len(found), {}
        weights: dict[str, str] = {}
        for number, (name, part) in enumerate(found.items(), 1):
            divided = f"-{number:05d}-of-{count:05d}" if count > 1 else ""
            names[name] = f"{exports.stem}{divided}.safetensors"
            for key in part.exported[name]:
                if weights.setdefault(key, names[name]) != names[name]:
                    raise MismatchError(
                        f"layout=: two ranks have different tensors with the name {key!r}"
                    )
        total = sum(
            part.files[name].size_bytes - part.files[name].header_bytes
            for name, part in found.items()
        )
        # Also of one file: readers that list the folder then leave out what is not the model.
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        small: dict[str, DataFile] = {}
        index_name = f"{exports.stem}.safetensors.index.json"
        contents = {**exports.files, index_name: json.dumps(index).encode()}
        for number, (name, content) in enumerate(contents.items()):
            written = f"torchrelay-export-00000-{10**5 + number}"  # after those of ranks
            sink = self.transaction.create(written)
            sink.write(0, memoryview(content))
            sink.close()
            small[written] = DataFile(len(content), len(content), _native.crc32c(content))
            names[written] = name
        return names, small

    def _retain(self, known: dict[str, Head]) -> None:
        if self._keep is not None:
            try:
                retain(self.path, self._keep, known)
            except StorageError as error:
                raise StorageError(
                    error.errno,
                    f"{self.path} is committed, but of what keep= does not keep, something could "
                    f"not be removed: {error.strerror}",
                ) from error


def described(error: Exception, rank: int) -> dict[str, Any]:
    """Return an error as JSON values, with a message that names the rank it happened on."""
    found = to_json(error)
    if not _NAMES_RANK.match(found["message"]):
        found["message"] = f"rank {rank}: {found['message']}"
    if not isinstance(error, TorchRelayError):
        found["ranks"] = [rank]
    return found


def _run_in_order(tasks: Iterable[Task]) -> None:
    for task in tasks:
        task()

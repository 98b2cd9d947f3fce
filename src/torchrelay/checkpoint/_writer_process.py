"""The process that writes what an asynchronous save has staged. It outlives a killed trainer.

It is started once per trainer with the file descriptor of a socket, receives jobs from it one after
another, and exits when the trainer does. It imports no torch, so it starts fast and stays small.

The writers of several ranks communicate through the folder that is being written: each leaves a
note there when its part is durable; the coordinator's writer waits for all notes, and commits.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from torchrelay import _native
from torchrelay.checkpoint._failures import described
from torchrelay.checkpoint._saving import Description, SaveOptions, Saving
from torchrelay.checkpoint._types import Box, DataFile, Dtype
from torchrelay.checkpoint._write import ChunkRecord, Part, Source
from torchrelay.errors import OperationTimeoutError, PeerLostError, from_json

__all__ = ["Job"]

_POLL_S = 0.02
# keys, dtype, shape and box of what is staged, its size in bytes, and where it begins
Staged = tuple[tuple[str, ...], Dtype, tuple[int, ...], Box, int, int]


@dataclass(frozen=True)
class Job:
    """A save, as a trainer sends it to its writer process. File descriptors follow: of the staging
    memory if it is new, and those of the transaction.
    """

    path: str
    options: SaveOptions
    save_id: str
    ranks: Sequence[int]
    index: int  # of this rank among them
    sources: Sequence[Staged]
    everyone: Sequence[Description]  # for the coordinator
    timeout_s: float
    new_staging: bool
    descriptors: int

    @property
    def rank(self) -> int:
        return self.ranks[self.index]


def main(fd: int) -> None:
    """Serve one trainer until it closes its end."""
    staging: _native.SharedMemory | None = None
    with Connection(fd) as connection:
        while True:
            try:
                job: Job = connection.recv()
                fds = [recv_handle(connection) for _ in range(job.descriptors)]
            except (EOFError, ConnectionError):
                return
            if job.new_staging:
                staging = _native.SharedMemory.from_fd(fds[0], True)
                os.close(fds.pop(0))
            answer: dict[str, Any] | None = None
            try:
                _Writing(job, staging, fds).run()
            except Exception as error:
                answer = described(error, job.rank)
            try:
                connection.send(answer)
            except ConnectionError:
                # The trainer is gone; the checkpoint is committed or discarded all the same.
                return


class _Writing:
    """One save: this rank's part and, on the coordinator, the commit."""

    def __init__(self, job: Job, staging: _native.SharedMemory | None, fds: list[int]) -> None:
        self._job = job
        self._staging = staging
        self._saving = Saving(job.path, job.options)
        self._transaction = self._saving.transaction
        self._coordinates = job.index == 0
        if self._coordinates:
            self._transaction.take_over(job.save_id, fds)

    def run(self) -> None:
        """Run the save. Returns when the checkpoint is committed.

        Raises:
            TorchRelayError: it failed, on whichever rank.
        """
        if self._coordinates:
            try:
                self._coordinate()
            finally:
                self._transaction.discard()  # does nothing after a commit
            self._saving.retain()
            return
        note = self._transaction.open_note(self._note(self._job.index))
        note.finish(json.dumps(self._outcome()).encode())
        self._await_commit()

    @staticmethod
    def _note(index: int) -> str:
        return f"torchrelay-part-{index:05d}.json"

    def _coordinate(self) -> None:
        outcomes = {0: self._outcome()}
        self._until(lambda: self._collect(outcomes), lambda: self._missing(outcomes))
        parts = []
        for index in range(len(self._job.ranks)):
            if "error" in outcomes[index]:
                raise from_json(outcomes[index]["error"])
            parts.append(_part(outcomes[index]))
        self._saving.commit(self._job.everyone, parts, self._job.save_id)

    def _outcome(self) -> dict[str, Any]:
        """Write this rank's part; return it, or the error, as JSON."""
        try:
            part = self._saving.write(
                self._job.rank, [self._source(*source) for source in self._job.sources]
            )
        except Exception as error:
            return {"error": described(error, self._job.rank)}
        files = {name: asdict(file) for name, file in part.files.items()}
        return {"files": files, "chunks": part.chunks}

    def _source(
        self,
        keys: tuple[str, ...],
        dtype: Dtype,
        shape: tuple[int, ...],
        box: Box,
        size_bytes: int,
        start: int,
    ) -> Source:
        assert self._staging is not None
        data = memoryview(self._staging)[start : start + size_bytes]  # type: ignore[arg-type]
        return Source(keys, dtype, shape, box, size_bytes, lambda: data)

    def _collect(self, outcomes: dict[int, dict[str, Any]]) -> bool:
        for index in range(1, len(self._job.ranks)):
            if index not in outcomes:
                note = self._transaction.read_note(self._note(index))
                if note is not None:
                    outcomes[index] = json.loads(note)
        return len(outcomes) == len(self._job.ranks)

    def _missing(self, outcomes: dict[int, dict[str, Any]]) -> list[int]:
        return [rank for index, rank in enumerate(self._job.ranks) if index not in outcomes]

    def _await_commit(self) -> None:
        note = self._note(self._job.index)
        self._until(lambda: not self._transaction.under_way(note), lambda: [self._job.ranks[0]])
        if self._transaction.committed_id() != self._job.save_id:
            coordinator = self._job.ranks[0]
            raise PeerLostError(
                f"{self._job.path}: the checkpoint was discarded; look at the output of rank "
                f"{coordinator}, which coordinates the save, for the reason",
                ranks=(coordinator,),
            )

    def _until(self, condition: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        deadline = time.monotonic() + self._job.timeout_s
        while not condition():
            if time.monotonic() > deadline:
                ranks = missing()
                raise OperationTimeoutError(
                    f"{self._job.path}: the writers of ranks {ranks} did not finish their parts "
                    f"within {self._job.timeout_s:g} s; the checkpoint is discarded",
                    ranks=ranks,
                )
            time.sleep(_POLL_S)


def _part(outcome: dict[str, Any]) -> Part:
    chunks = [
        ChunkRecord(tuple(keys), Box(tuple(offsets), tuple(sizes)), text)
        for keys, (offsets, sizes), text in outcome["chunks"]
    ]
    return Part({name: DataFile(**file) for name, file in outcome["files"].items()}, chunks)


if __name__ == "__main__":
    main(int(sys.argv[1]))

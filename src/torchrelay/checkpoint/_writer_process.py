"""The process that writes what an asynchronous save has staged. It outlives a killed trainer.

It is started once per trainer with the file descriptor of a socket, receives jobs from it one after
another, and exits when the trainer does. It imports no torch, so it starts fast and stays small.

The writers of several ranks communicate through the folder that is being written: each leaves a
note there when its part is durable; the coordinator's writer waits for all notes, and commits.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchrelay import _native
from torchrelay._helper import Channel
from torchrelay.checkpoint._saving import (
    ChunkRecord,
    Part,
    Plan,
    SaveOptions,
    Saving,
    described,
)
from torchrelay.checkpoint._storage import split
from torchrelay.checkpoint._types import Box, DataFile
from torchrelay.errors import OperationTimeoutError, PeerLostError, from_json

__all__ = ["WriteJob"]

_POLL_S = 0.02
_NOTE = "torchrelay-part-{:05d}.json"  # NOTE_NAME, of the rank with this index


@dataclass(frozen=True)
class WriteJob:
    """A save, as a trainer sends it to its writer process. File descriptors come with it: of the
    staging memory if it is new, and those of the transaction.

    Without a plan, the last one is meant. ``objects`` are the values, if they are equal on all
    ranks.
    """

    path: str
    options: SaveOptions
    save_id: str
    ranks: Sequence[int]
    index: int  # of this rank among them
    objects: Mapping[str, Any]
    timeout_s: float
    plan: Plan | None = None
    new_staging: bool = False

    @property
    def rank(self) -> int:
        return self.ranks[self.index]


def main(fd: int) -> None:
    """Serve one trainer until it closes its end."""
    staging: _native.SharedMemory | None = None
    plan: Plan | None = None
    channel = Channel(socket.socket(fileno=fd))
    # Once the trainer is gone; what it has sent is committed or discarded all the same.
    with suppress(PeerLostError):
        while received := channel.receive():
            job: WriteJob = received[0]
            fds = received[1]
            if job.new_staging:
                staging = _native.SharedMemory.from_fd(fds[0], True)
                os.close(fds.pop(0))
            plan = job.plan or plan
            assert plan is not None
            if len(plan.everyone) == 1:  # and maybe that of an earlier save, with other values
                everyone = [plan.everyone[0]._replace(objects=job.objects)]
                plan = replace(plan, everyone=everyone)
            failure: dict[str, Any] | None = None
            try:
                _Writing(job, plan, staging, Saving(job.path, job.options)).run(fds)
            except Exception as error:
                failure = described(error, job.rank)
            channel.send(failure)


@dataclass
class _Writing:
    """One save: this rank's part and, on the coordinator, the commit."""

    job: WriteJob
    plan: Plan
    staging: _native.SharedMemory | None
    saving: Saving

    def run(self, fds: Sequence[int]) -> None:
        """Run the save. Returns when the checkpoint is committed.

        Raises:
            TorchRelayError: it failed, on whichever rank.
        """
        transaction = self.saving.transaction
        if self.job.index == 0:
            transaction.take_over(self.job.save_id, fds)
            try:
                self._coordinate()
            finally:
                transaction.discard()  # does nothing after a commit
            return
        finish = transaction.open_note(_NOTE.format(self.job.index))
        outcome = self._outcome()
        try:
            finish(json.dumps(outcome).encode())
        finally:  # its own error comes first
            _raise_error(outcome)
        self._await_commit()

    def _coordinate(self) -> None:
        ranks, outcomes = self.job.ranks, {0: self._outcome()}

        def missing() -> list[int]:
            for index in range(1, len(ranks)):
                if index not in outcomes:
                    note = self.saving.transaction.read_note(_NOTE.format(index))
                    if note is not None:
                        outcomes[index] = json.loads(note)
            return [rank for index, rank in enumerate(ranks) if index not in outcomes]

        try:
            self._wait(missing, "the checkpoint is discarded")
        finally:  # a rank's error comes before that another is missing
            for index in sorted(outcomes):
                _raise_error(outcomes[index])
        parts = [_part(outcomes[index]) for index in range(len(ranks))]
        self.saving.commit(self.plan.everyone, parts)

    def _outcome(self) -> dict[str, Any]:
        """Write this rank's part; return it, or the error, as JSON."""
        try:
            memory: Any = self.staging
            base = 0 if memory is None else np.frombuffer(memory, "u1").ctypes.data
            data = (self.plan.starts + np.uint64(base)).tolist()
            part = self.saving.write(self.job.rank, self.plan.chunks, data)
        except Exception as error:
            return {"error": described(error, self.job.rank)}
        return {"files": part.files, "chunks": part.chunks}

    def _await_commit(self) -> None:
        save_id, coordinator = self.job.save_id, self.job.ranks[0]
        is_committed = self.saving.is_committed
        self._wait(
            lambda: [coordinator] if is_committed(save_id) is None else [],
            f"if it is committed, 'torchrelay checkpoint ls {split(self.job.path)[0]}' lists it",
        )
        if not is_committed(save_id):
            raise PeerLostError(
                f"{self.job.path}: the checkpoint was discarded; look at the output of rank "
                f"{coordinator}, which coordinates the save, for the reason",
                ranks=(coordinator,),
            )

    def _wait(self, missing: Callable[[], list[int]], otherwise: str) -> None:
        """Wait until no ranks are ``missing``; ``otherwise`` ends the message of the error."""
        deadline = time.monotonic() + self.job.timeout_s
        while ranks := missing():
            if time.monotonic() > deadline:
                raise OperationTimeoutError(
                    f"{self.job.path}: the writers of ranks {ranks} did not finish their parts "
                    f"within {self.job.timeout_s:g} s; {otherwise}",
                    ranks=ranks,
                )
            time.sleep(_POLL_S)


def _raise_error(outcome: dict[str, Any]) -> None:
    if "error" in outcome:
        raise from_json(outcome["error"])


def _part(outcome: dict[str, Any]) -> Part:
    """Return what a rank has written, from JSON."""
    chunks = [
        ChunkRecord(tuple(keys), Box(tuple(offsets), tuple(sizes)), text)
        for keys, (offsets, sizes), text in outcome["chunks"]
    ]
    return Part({name: DataFile(*file) for name, file in outcome["files"].items()}, chunks)


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""The process that writes what an asynchronous save has staged. It outlives a killed trainer.

It is started once per trainer with the file descriptor of a socket, receives jobs from it one after
another, and exits when the trainer does. It imports no torch, so it starts fast and stays small.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrelay import _native
from torchrelay._helper import Channel
from torchrelay.checkpoint.engine._engine import Save, SaveOptions, described
from torchrelay.checkpoint.engine._written import Written
from torchrelay.checkpoint.plan._plan import Description, Plan
from torchrelay.checkpoint.storage._contract import split
from torchrelay.errors import OperationTimeoutError, PeerLostError, from_json

__all__ = ["WriteJob"]

_logger = logging.getLogger("torchrelay.checkpoint")  # the output of the trainer
_POLL_S = 0.02
_NOTE = "torchrelay-part-{:05d}.json"  # NOTE_NAME, of the rank with this index


@dataclass(frozen=True)
class WriteJob:
    """A save, as a trainer sends it to its writer process. File descriptors come with it: of the
    staging memory if it is new, and those of the transaction.

    Without a plan, the last one is meant. ``objects`` are, on the coordinator, the values of each
    rank, or of one if they are equal on all.
    """

    path: str
    options: SaveOptions
    save_id: str
    ranks: Sequence[int]
    index: int  # of this rank among them
    objects: Sequence[Mapping[str, Any]]
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
            failure: dict[str, Any] | None = None
            try:
                _run(job, plan, staging, fds)
            except Exception as error:
                failure = described(error, job.rank)
                # At once, and if the trainer is gone, too.
                _logger.error("an asynchronous save has failed: %s", failure["message"])
            channel.send(failure)


def _run(
    job: WriteJob, plan: Plan, staging: _native.SharedMemory | None, fds: Sequence[int]
) -> None:
    """Run a save. Returns when the checkpoint is committed."""
    save = Save(job.path, job.options)
    notes = Notes(job, save)
    if notes.is_coordinator:
        save.transaction.take_over(job.save_id, fds)

    def write() -> Written:
        memory: Any = staging
        base = 0 if memory is None else np.frombuffer(memory, "u1").ctypes.data
        data = (plan.starts + np.uint64(base)).tolist()
        return save.write(job.rank, plan.chunks, data)

    descriptions = [*map(Description, plan.layouts, job.objects)] if notes.is_coordinator else []
    save.complete(notes, write, descriptions)


class Notes:
    """The coordinator of an asynchronous save. The writers of several ranks communicate through the
    folder that is being written: each leaves a note there when its part is durable; the
    coordinator's writer waits for all notes, and commits.
    """

    def __init__(self, job: WriteJob, save: Save) -> None:
        self._job = job
        self._save = save
        self.is_coordinator = job.index == 0

    def conclude(
        self, local: Callable[[], Written], finish: Callable[[list[Written]], None]
    ) -> None:
        if self.is_coordinator:
            finish(self._gathered(self._outcome(local)))
            return
        note = self._save.transaction.open_note(_NOTE.format(self._job.index))
        outcome = self._outcome(local)
        try:
            note(json.dumps(outcome).encode())
        finally:  # its own error comes first
            _raise_error(outcome)
        self._await_commit()

    def _outcome(self, local: Callable[[], Written]) -> dict[str, Any]:
        """Return what ``local`` returns, or the error, as JSON."""
        try:
            part = local()
        except Exception as error:
            return {"error": described(error, self._job.rank)}
        return vars(part)

    def _gathered(self, mine: dict[str, Any]) -> list[Written]:
        ranks, outcomes = self._job.ranks, {0: mine}

        def missing() -> list[int]:
            for index in range(1, len(ranks)):
                if index not in outcomes:
                    note = self._save.transaction.read_note(_NOTE.format(index))
                    if note is not None:
                        outcomes[index] = json.loads(note)
            return [rank for index, rank in enumerate(ranks) if index not in outcomes]

        try:
            self._wait(missing, "the checkpoint is discarded")
        finally:  # a rank's error comes before that another is missing
            for index in sorted(outcomes):
                _raise_error(outcomes[index])
        return [Written.from_json(outcomes[index]) for index in range(len(ranks))]

    def _await_commit(self) -> None:
        job, coordinator = self._job, self._job.ranks[0]
        self._wait(
            lambda: [coordinator] if self._save.is_committed(job.save_id) is None else [],
            f"if it is committed, 'torchrelay checkpoint ls {split(job.path)[0]}' lists it",
        )
        if not self._save.is_committed(job.save_id):
            raise PeerLostError(
                f"{job.path}: the checkpoint was discarded; look at the output of rank "
                f"{coordinator}, which coordinates the save, for the reason",
                ranks=(coordinator,),
            )

    def _wait(self, missing: Callable[[], list[int]], otherwise: str) -> None:
        """Wait until no ranks are ``missing``; ``otherwise`` ends the message of the error."""
        timeout_s = self._job.timeout_s
        deadline = time.monotonic() + timeout_s
        while ranks := missing():
            if time.monotonic() > deadline:
                raise OperationTimeoutError(
                    f"{self._job.path}: the writers of ranks {ranks} did not finish their parts "
                    f"within {timeout_s:g} s; {otherwise}",
                    ranks=ranks,
                )
            time.sleep(_POLL_S)


def _raise_error(outcome: dict[str, Any]) -> None:
    if "error" in outcome:
        raise from_json(outcome["error"])


if __name__ == "__main__":
    main(int(sys.argv[1]))

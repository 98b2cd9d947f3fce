"""The rendezvous of a group's ranks, through a store that may outlive them."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from typing_extensions import Self

from torchrelay._processes import Process
from torchrelay._ranks import Ranks, are_there, values_of
from torchrelay._waiting import wait_for_others
from torchrelay.errors import (
    MismatchError,
    PeerLostError,
    UnavailableError,
)

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["Meeting"]

_LONGEST_LOOK_S = 1.0  # interval at which a waiting rank looks who has come
_FIRST_LOOK_S = 0.02  # how long a rank waits for others that were there before to come again
_TWO_JOBS = "do two jobs use one MASTER_ADDR and MASTER_PORT, or was a rank started twice?"


class Meeting(Ranks):
    """Rendezvous of the ranks of a group through a store, which may outlive processes.

    Creation is collective over all ranks, and may be repeated over the same store.

    torchrun's agent keeps its store when it restarts the ranks, so there may be keys of processes
    that have exited. Each rank draws a random name, registers under it, and is done once all ranks
    have seen the same names: what an earlier process saw lacks the name of a later one.

    Args:
        store: used by the group's ranks only.
        names: the ranks as users know them, for messages; default: the group's own ranks.
        known: processes of other ranks from earlier rendezvous, by name.

    Attributes:
        processes: of the ranks, in their order.
        store: for this rendezvous only: no key is there at first.

    Raises:
        OperationTimeoutError: ranks are missing after ``timeout_s``; ``ranks`` names them.
        PeerLostError: a rank, or the process that serves the store, has died.
        MismatchError: processes of two jobs claim to be ranks of this group.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float,
        names: Sequence[int] = (),
        known: Mapping[int, Process] | None = None,
    ) -> None:
        import torch.distributed as dist  # noqa: PLC0415 - as above

        self._whole: Store = dist.PrefixStore("torchrelay", store)
        super().__init__(self._whole, rank, size, names)
        self._known = dict(known or {})
        self._agreed = False
        self.processes: list[Process] = []
        with self._store_errors():
            self._me = self._register()
            self._await_all(timeout_s)
        self.store = dist.PrefixStore(self.attempt, self._whole)
        self._check_jobs()

    def among(self, ranks: Sequence[int]) -> Self:
        part = super().among(ranks)
        part.processes = [self.processes[rank] for rank in ranks]
        return part

    def _set_trouble(self, text: str) -> None:
        self._whole.set("trouble", json.dumps(asdict(replace(self._me, trouble=text))))

    # --- the rendezvous

    def _register(self) -> Process:
        """Take this rank's place in the store.

        Raises:
            MismatchError: a running process of this host has it.
        """
        key = f"rank/{self.rank}"
        try:
            me = Process.current(self.rank)
        except UnavailableError as error:
            draw = secrets.token_hex(8)
            self._me = Process(self.rank, "", os.getpid(), 0, 0, "", draw)
            self.refuse(error)
            raise
        if self._whole.check([key]):
            before = Process.parse(self._whole.get(key))
            if before.pid != me.pid and before.is_alive_here():
                message = (
                    f"rank {self.names[self.rank]} is already claimed by process {before.pid}, and "
                    f"process {me.pid} claims it too: {_TWO_JOBS}"
                )
                self._whole.set("refused", json.dumps({"draw": before.draw, "message": message}))
                raise MismatchError(message)
        if self._whole.check(["trouble"]):
            trouble = self._whole.get("trouble")
            if trouble and Process.parse(trouble).rank == self.rank:  # of an earlier attempt
                self._whole.set("trouble", "")
        self._whole.set(key, json.dumps(asdict(me)))
        return me

    def _await_all(self, timeout_s: float) -> None:
        """Wait until all ranks have seen the same registrations."""
        keys = [f"rank/{rank}" for rank in range(self.size)]
        awaited = list(keys)
        next_look_s, interval_s = 0.0, _FIRST_LOOK_S

        def is_complete() -> bool:
            nonlocal next_look_s, interval_s
            now_s = time.monotonic()
            if not self.processes and not are_there(self._whole, awaited):
                return False
            if now_s >= next_look_s:
                present = [Process.parse(text) for text in values_of(self._whole, keys)]
                # If it is complete, another rank may be at its next rendezvous over this store.
                if present != self.processes and not self._is_complete():
                    self._see(present)
                    interval_s = _FIRST_LOOK_S
                next_look_s, interval_s = now_s + interval_s, min(2 * interval_s, _LONGEST_LOOK_S)
            return self._is_complete()

        def missing() -> list[int]:
            return self.missing(f"{self.attempt}/seen" if self.processes else "rank")

        wait_for_others(
            is_complete,
            lambda: [self.names[rank] for rank in missing()],
            self._late,
            lambda: self._check_processes(missing),
            timeout_s,
        )
        self._agreed = True

    def _is_complete(self) -> bool:
        return bool(self.attempt) and self._whole.check([f"{self.attempt}/complete"])

    def _see(self, present: list[Process]) -> None:
        """Publish which processes this rank has seen."""
        other = present[self.rank]
        if other != self._me:
            raise MismatchError(
                f"rank {self.names[self.rank]} is claimed by process {self._me.pid}, and "
                f"process {other.pid}{'' if other.is_alive_here() else ' of another host'} claims "
                f"it too: {_TWO_JOBS}"
            )
        draws = " ".join(process.draw for process in present)
        self.attempt = hashlib.blake2b(draws.encode(), digest_size=8).hexdigest()
        self.processes = present
        self._whole.set(f"{self.attempt}/seen/{self.rank}", "")
        if self._whole.add(f"{self.attempt}/count", 1) == self.size:
            self._whole.set(f"{self.attempt}/complete", "")

    def _check_jobs(self) -> None:
        named = zip(self.names, self.processes, strict=True)
        jobs = {process.job: name for name, process in named if process.job}
        if len(jobs) > 1:
            found = ", ".join(f"rank {name} to {job}" for job, name in jobs.items())
            raise MismatchError(
                f"{self.name}: the ranks belong to different jobs ({found}); give each job a "
                "MASTER_PORT of its own"
            )

    def _check_processes(self, missing: Callable[[], Sequence[int]]) -> None:
        """Raise if a rank was refused, or one of the ranks ``missing`` can no longer join."""
        if self._whole.check(["refused"]):
            refused = json.loads(self._whole.get("refused"))
            if any(each.draw == refused["draw"] for each in self.processes):
                raise MismatchError(f"{self.name}: {refused['message']}")
        self._check_trouble()
        for rank in missing():
            process, cause = self._lost(rank)
            if process is not None and rank in missing():
                raise PeerLostError(
                    f"{self.name}: rank {self.names[rank]} (process {process.pid}) {cause} before "
                    "it joined the group; look at its own output for the cause",
                    ranks=(self.names[rank],),
                )

    def _check_trouble(self) -> None:
        """Raise if a process of this attempt cannot be in the group, once for each."""
        text = self._whole.get("trouble") if self._whole.check(["trouble"]) else b""
        process = Process.parse(text) if text else self._me
        is_older = process.host == self._me.host and process.joined_ticks < self._me.start_ticks
        if process.draw not in {self._me.draw, *_troubles} and not is_older:
            _troubles.add(process.draw)
            raise UnavailableError(f"{self.name}: {process.trouble}")

    def _lost(self, rank: int) -> tuple[Process | None, str]:
        """Return the process of a rank and what happened to it if it is lost in this attempt."""
        seen = self.processes[rank] if self.processes else self._known.get(self.names[rank])
        if seen is None:
            return None, ""
        if seen.has_died():
            # A rank that registered before this process started may be of an earlier attempt.
            is_of_this_attempt = (
                not self.processes or self._agreed or seen.joined_ticks >= self._me.start_ticks
            )
            return (seen if is_of_this_attempt else None), "died"
        if self._agreed and Process.parse(self._whole.get(f"rank/{seen.rank}")) != seen:
            return seen, "was started again"
        return None, ""


# The draws of processes whose troubles were reported: their ranks may try again.
_troubles: set[str] = set()

"""A member of an elastic job, with its clock and its process group."""

from __future__ import annotations

import hashlib
import logging
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchrelay._platform import seconds_since_boot
from torchrelay.config import ElasticSettings
from torchrelay.errors import (
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    UnsupportedError,
)
from torchrelay.training._delegate import Delegate, Follower
from torchrelay.training._membership import Formation, Record, resolve
from torchrelay.training._replica import Replica

__all__ = ["Agreement", "Losses"]

_logger = logging.getLogger("torchrelay.training")
Losses = (PeerLostError, OperationTimeoutError)


class Met(NamedTuple):
    """Members that have met, by rank, with what each knows of the job."""

    formation: Formation
    records: Sequence[Record]
    dead: Sequence[str]  # of those that were known before


class Agreement:
    """This member: it forms groups with the others, as :class:`Membership` says.

    Args:
        about: what must be equal on all members, described for messages.
        ranks: of this member, if it is a replica of several. The first one has connections to
            other members; all have the same formation, and each a group of its own with the ranks
            of the same number of other members.

    Attributes:
        group: the process group.
        met: the current formation.
    """

    def __init__(
        self,
        settings: ElasticSettings,
        about: Mapping[str, str],
        ranks: dist.ProcessGroup | None = None,
    ) -> None:
        self.settings = settings
        self.replica = Replica(ranks, settings.wait_s + settings.timeout_s)
        self.replica.on_loss = self.close
        has_default = dist.is_initialized()
        self.group = _new_group(settings.timeout_s, ranks)
        # The default group, if such an object has made it: the last of them destroys it.
        self._default: Any = (
            next((one._default for one in _living), None) if has_default else self.group
        )
        _living.add(self)
        self.delegate = Follower()

        def listen() -> str:
            self.delegate = Delegate(settings, about, self.replica.size)
            return self.delegate.member

        self.member: str = self.replica.from_first(listen)
        self.met = Met(Formation(0, ()), (), ())
        self._lease, self._entered_s = (0, 0.0), 0.0
        self._completed_s, self._met_s, self._returned_s = 0.0, 0.0, math.inf

    def close(self) -> None:
        self.group.abort()
        self.delegate.close()
        _living.discard(self)
        if not _living and self._default is not None and dist.group.WORLD is self._default:
            dist.destroy_process_group()

    def collective(self, call: Callable[[Any], Any]) -> None:
        """Run a collective of the group; blocks. Once the next one has completed, all members have
        completed this one, and none can have waited a timeout for this member since it began.
        """
        former_s, self._entered_s = self._entered_s, seconds_since_boot()
        away_s, timeout_s = self._entered_s - self._returned_s, self.settings.timeout_s
        if away_s > timeout_s:
            _logger.warning(
                "%s was busy, or frozen, for %.1f s between two collectives, and the others wait "
                "for timeout_s = %g only: make that longer than the slowest step, on all members",
                self.member,
                away_s,
                timeout_s,
            )
        self.delegate.peers.waits_since_s = time.monotonic()
        call(self.group).wait()
        self.delegate.peers.waits_since_s = 0.0
        self._completed_s, self._returned_s = former_s, seconds_since_boot()
        if self.replica.size == 1:
            self._lease = self.met.formation.number, former_s

    def any(self, *flags: bool) -> list[bool]:
        """Return of each of ``flags`` whether a rank of this replica has it; blocks."""
        if self.replica.size == 1:
            return [*flags]
        former_s, self._met_s = self._met_s, seconds_since_boot()
        *found, age_s = self.replica.largest(*flags, self._met_s - self._completed_s)
        # Others entered this call after the former one; their clocks may be of other hosts.
        self._lease = self.met.formation.number, former_s - age_s
        return [bool(one) for one in found]

    def agree(self, record: Record) -> Met:
        """Form a group with those that are there, and meet them; blocks. Returns what they know.

        Raises:
            MismatchError: the others refuse this member.
            OperationTimeoutError: this member must not go on, and waited ``wait_s``.
            UnavailableError: all members that had the state are lost.
        """
        self.delegate.begin(record.is_whole)
        started_s = time.monotonic()
        while True:
            handles = self.replica.gather(self.group.get_reconfigure_handle())
            chosen = self.replica.from_first(partial(self._choose, handles, started_s))
            formation = Formation(chosen["number"], tuple(chosen["members"]))
            try:
                records = self._form(formation, chosen["handles"], record)
            except (*Losses, MismatchError) as error:
                _logger.info("%s: %s could not form: %s", self.member, formation.members, error)
                self.delegate.fail()
                continue
            self.delegate.end(formation)
            self._returned_s = seconds_since_boot()
            self.met = Met(formation, records, chosen["dead"])
            return self.met

    def _choose(self, handles: list[str], started_s: float) -> dict[str, Any]:
        assert isinstance(self.delegate, Delegate), "the first rank of a replica agrees"
        return self.delegate.choose(handles, started_s, self._lease, self._entered_s)

    def _form(self, formation: Formation, handles: list[list[str]], record: Record) -> list[Record]:
        """Form the group of each rank of this replica, and let the members meet."""
        rank, entered_s = self.replica.rank, seconds_since_boot()
        digest = hashlib.blake2b(repr((formation, rank)).encode(), digest_size=8).digest()
        uuid = int.from_bytes(digest, "big", signed=True)
        timeout_s = self.settings.timeout_s
        self._together(lambda: self.group.form(uuid, [one[rank] for one in handles], timeout_s))
        self.delegate.install(formation)
        mine = torch.tensor([record.version, record.is_in_doubt, record.is_whole])
        every = [torch.zeros_like(mine) for _ in formation.members]
        self._completed_s, self._entered_s = entered_s, seconds_since_boot()
        self._together(lambda: self.group.allgather([every], [mine]).wait())
        if self.replica.size == 1:
            self._lease = formation.number, entered_s
        return resolve(Record(int(v), bool(d), bool(w)) for v, d, w in every)

    def _together(self, call: Callable[[], Any]) -> None:
        """Call on all ranks of this replica; raise on all if one of them raises."""
        failure: Exception | None = None
        try:
            call()
        except (*Losses, MismatchError) as error:
            failure = error
        if self.any(failure is not None)[0]:
            raise failure or PeerLostError("another rank of this replica has lost a member")


_living: weakref.WeakSet[Agreement] = weakref.WeakSet()


def _new_group(timeout_s: float, ranks: dist.ProcessGroup | None) -> Any:
    """Return a group of this process alone, which :class:`Agreement` gives other members."""
    timeout = timedelta(seconds=timeout_s)
    if ranks is not None:
        return dist.new_group(
            [dist.get_rank()], backend="sml", timeout=timeout, use_local_synchronization=True
        )
    if not dist.is_initialized():
        dist.init_process_group(
            "sml", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
        return dist.group.WORLD
    if (size := dist.get_world_size()) > 1:
        raise UnsupportedError(
            f"Elastic: this process is in a default process group of {size} ranks: pass "
            "replica=GROUP if these, or some of them, are one replica together, as with FSDP; else "
            "start each process on its own, without init_process_group"
        )
    return dist.new_group([0], backend="sml", timeout=timeout)

"""A member of an elastic job, with its connections, its clock and its process group."""

from __future__ import annotations

import hashlib
import logging
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import torchrelay
from torchrelay import config, transport
from torchrelay._addresses import address_for_anyone, is_loopback, network_identity
from torchrelay._platform import seconds_since_boot
from torchrelay._processes import remedy_of
from torchrelay.config import ElasticSettings
from torchrelay.errors import (
    ConfigError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    UnavailableError,
    UnsupportedError,
)
from torchrelay.training._membership import (
    Formation,
    Membership,
    Record,
    State,
    address_of,
    resolve,
)
from torchrelay.training._peers import Peers, join, resolved, split

__all__ = ["Agreement", "Losses"]

_logger = logging.getLogger("torchrelay.training")
Losses = (PeerLostError, OperationTimeoutError)
_POLL_S = 0.05
_LONGER = 1.5  # each wait than the one before, for hosts that are slower than thought
_FLUSH_S = 1.0  # how long one that enters a formation tries to tell the others
_LEASE = 0.8  # of a timeout, in which nobody can have gone on without this member
_IGNORED_TIMEOUTS = 3  # how long the requests of one that could not be taken in are ignored


class Met(NamedTuple):
    """Members that have met, by rank, with what each knows of the job."""

    formation: Formation
    records: Sequence[Record]


class Agreement:
    """This member: it forms groups with the others, as :class:`Membership` says.

    Args:
        layout: the tensors of the model, which must be equal on all members.

    Attributes:
        group: the process group.
        met: the current formation.
    """

    def __init__(self, settings: ElasticSettings, layout: Sequence[str]) -> None:
        self.settings = settings
        self._has_made_default = not dist.is_initialized()
        self.group = _new_group(settings.timeout_s)
        self._peers = _listen(settings, layout)
        founders = _resolve(settings.peers, "peers") or [self._peers.address]
        breaker = _resolve(settings.tie_breaker, "tie_breaker")
        self.member = self._peers.member
        self.machine = Membership(
            self.member, founders, settings.min_size, breaker[0] if breaker else ""
        )
        self.met = Met(Formation(0, ()), ())
        self._knocks: dict[str, dict[str, Any]] = {}  # what others published between rounds
        self._published: dict[str, dict[str, Any]] = {}  # what others published last
        self._known_s: dict[str, float] = {}  # since when, in this round
        self._ignored: dict[str, float] = {}
        self._lease, self._entered_s = (0, 0.0), 0.0

    def close(self) -> None:
        self.group.abort()
        self._peers.close()
        if self._has_made_default and dist.group.WORLD is self.group:
            dist.destroy_process_group()

    def collective(self, call: Callable[[Any], Any]) -> None:
        """Run a collective of the group; blocks. Once the next one has completed, all members have
        completed this one, and none can have waited a timeout for this member since it began.
        """
        former_s, self._entered_s = self._entered_s, seconds_since_boot()
        self._peers.waits_since_s = time.monotonic()
        call(self.group).wait()
        self._peers.waits_since_s = 0.0
        self._lease = self.met.formation.number, former_s

    def has_knocks(self) -> bool:
        """Return whether someone outside of the formation wants to be in it. Does not block."""
        for member, value in self._received():
            is_member = member in self.met.formation.members
            if not is_member and self._ignored.get(member, 0.0) < time.monotonic():
                self._knocks[member] = value
        return bool(self._knocks)

    def agree(self, record: Record) -> Met:
        """Form a group with those that are there, and meet them; blocks. Returns what they know.

        Raises:
            MismatchError: the others refuse this member.
            OperationTimeoutError: this member must not go on, and waited ``wait_s``.
            UnavailableError: all members that had the state are lost.
        """
        started_s = time.monotonic()
        self._peers.begin()
        self._known_s.clear()
        self.machine.begin()
        for value in self._knocks.values():
            self._take(value)
        self._knocks.clear()
        while True:
            formation = self._decide(started_s)
            try:
                self.met = self._form(formation, record)
            except (*Losses, MismatchError) as error:
                _logger.info("%s: %s could not form: %s", self.member, formation.members, error)
                self.machine.fail()
                continue
            left_out = self.machine.left_out(formation)
            until_s = time.monotonic() + _IGNORED_TIMEOUTS * self.settings.timeout_s
            self._ignored = dict.fromkeys(left_out, until_s)
            self._peers.others = {*map(address_of, formation.members)} - {self._peers.address}
            late = self.machine.states.keys() - left_out - {*formation.members}
            self._knocks |= {member: self._published[member] for member in late}
            return self.met

    def _decide(self, started_s: float) -> Formation:
        """Publish what this member knows until there is a formation that it can enter."""
        machine, peers, waited_s = self.machine, self._peers, time.monotonic()
        patience_s = self.settings.timeout_s
        while True:
            self._look()
            formation = machine.decide()
            value = {
                "state": machine.state.to_json(),
                "handle": self.group.get_reconfigure_handle(),
            }
            peers.publish(value, map(address_of, machine.known()))
            if formation is not None:
                peers.flush(value, map(address_of, formation.members), _FLUSH_S)
                return formation
            peers.wait(_POLL_S)
            for _, received in self._received():
                self._take(received)
            self._check(started_s)
            if time.monotonic() - waited_s > patience_s:
                _logger.warning("%s waits: %s", self.member, self._reason())
                waited_s, patience_s = time.monotonic(), _LONGER * patience_s
                machine.wait_no_longer()

    def _received(self) -> Iterator[tuple[str, dict[str, Any]]]:
        with suppress(queue.Empty):
            while True:
                yield self._peers.received.get_nowait()

    def _look(self) -> None:
        """Take note of this member's lease, and of those that have ended."""
        machine, peers = self.machine, self._peers
        number, since_s = self._lease
        is_lent = seconds_since_boot() - since_s < _LEASE * self.settings.timeout_s
        machine.is_fresh = is_lent and number == machine.bases[0].number > 0
        for member in machine.known():
            known_s = self._known_s.setdefault(member, time.monotonic())
            found, seen_s = peers.found.get(address_of(member), (member, 0.0))
            if member == address_of(member):
                is_lost = not found
            else:  # it listened there when it became known, and does no more
                is_lost = found != member and seen_s > known_s
            if is_lost:
                machine.lose(member)
        timeout_s = self.settings.timeout_s  # since the last collective began, at least
        if seconds_since_boot() - self._entered_s > timeout_s:
            silent = peers.unanswered(timeout_s / 4)
            machine.miss(one for one in self.met.formation.members if address_of(one) in silent)

    def _take(self, value: dict[str, Any]) -> None:
        try:
            state = State.from_json(value["state"])
            self._published[state.member] = {
                "state": value["state"],
                "handle": str(value["handle"]),
            }
        except (KeyError, TypeError, ValueError) as error:
            _logger.warning("ignored what a member published: %r", error)
        else:
            self.machine.receive(state)

    def _check(self, started_s: float) -> None:
        machine, peers = self.machine, self._peers
        if peers.refusals and not machine.is_whole:
            raise MismatchError("; ".join(f"{a}: {why}" for a, why in peers.refusals.items()))
        if machine.is_orphan():
            raise UnavailableError(
                f"{self.member}: all members that had the state of the job have ended"
            )
        waited_s = time.monotonic() - started_s
        if waited_s > self.settings.wait_s:
            raise OperationTimeoutError(
                f"{self.member} has waited {waited_s:.1f} s to go on: {self._reason()}"
            )

    def _reason(self) -> str:
        awaited = ", ".join(sorted(self.machine.awaited()))
        return self.machine.objection() or f"for {awaited or 'a proposal'}"

    def _form(self, formation: Formation, record: Record) -> Met:
        """Form the group, and let its members meet."""
        own = {self.member: {"handle": self.group.get_reconfigure_handle()}}
        handles = [(self._published | own)[member]["handle"] for member in formation.members]
        digest = hashlib.blake2b(repr(formation).encode(), digest_size=8).digest()
        entered_s = seconds_since_boot()
        uuid = int.from_bytes(digest, "big", signed=True)
        self.group.form(uuid, handles, self.settings.timeout_s)
        self.machine.install(formation)
        self._entered_s = entered_s
        mine = torch.tensor([record.version, record.is_in_doubt, record.is_whole])
        every = [torch.zeros_like(mine) for _ in formation.members]
        former_s, self._entered_s = entered_s, seconds_since_boot()
        self.group.allgather([every], [mine]).wait()
        self.machine.confirm()
        self._lease = formation.number, former_s
        known = [Record(int(v), bool(d), bool(w)) for v, d, w in every]
        return Met(formation, resolve(known))


def _new_group(timeout_s: float) -> Any:
    """Return a group of this process alone, which :class:`Agreement` gives other members."""
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        dist.init_process_group(
            "sml", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
        return dist.group.WORLD
    if (size := dist.get_world_size()) > 1:
        raise UnsupportedError(
            f"Elastic: this process is in a default process group of {size} ranks, and a replica "
            "is one process: start each on its own, without init_process_group"
        )
    return dist.new_group([0], backend="sml", timeout=timeout)


def _listen(settings: ElasticSettings, layout: Sequence[str]) -> Peers:
    sockets = config.load(config.TransportSettings)
    key = transport.read_key(sockets)
    address = settings.address or join(address_for_anyone(sockets.interface), 0)
    (address,) = _resolve(address, "address")[:1]
    is_local = is_loopback(split(address)[0])
    if not (key or settings.token or is_local):
        raise ConfigError(
            f"Elastic: this member listens at {address}, where others could join: set "
            f"TORCHRELAY_ELASTIC_TOKEN, or {transport.KEY_VARIABLES}"
        )
    secret = hashlib.blake2b(settings.token.encode(), key=key or b"").digest()
    tensors = hashlib.blake2b("\n".join(layout).encode(), digest_size=6).hexdigest()
    about = {
        "the version of torchrelay": torchrelay.__version__,
        "the version of torch": torch.__version__.partition("+")[0],
        "the model": f"{len(layout)} tensors ({tensors})",
        "timeout_s": f"{settings.timeout_s:g}",
        "min_size": str(settings.min_size),
        "tie_breaker": settings.tie_breaker or "none",
        "the network of its loopback address": network_identity() if is_local else "none",
    }
    try:
        return Peers(
            address, secret, transport.key_name(secret[:32]), about, settings.timeout_s / 4
        )
    except OSError as error:
        raise UnavailableError(f"listening at {address}: {error}; {remedy_of(error)}") from error


def _resolve(text: str, name: str) -> list[str]:
    try:
        return resolved(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Elastic: {name} = {text!r}: {error}; use host:port") from error

"""What the first rank of a replica agrees with other replicas, for all of its ranks."""

from __future__ import annotations

import hashlib
import logging
import queue
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch

import torchrelay
from torchrelay import config, transport
from torchrelay._addresses import (
    address_for_anyone,
    is_loopback,
    is_unspecified,
    network_identity,
)
from torchrelay._platform import seconds_since_boot
from torchrelay._processes import remedy_of
from torchrelay.config import ElasticSettings
from torchrelay.errors import (
    ConfigError,
    MismatchError,
    OperationTimeoutError,
    UnavailableError,
)
from torchrelay.training._membership import Formation, Membership, State, address_of
from torchrelay.training._peers import Peers, join, resolved, split

__all__ = ["Delegate", "Follower"]

_logger = logging.getLogger("torchrelay.training")
_POLL_S = 0.05
_LONGER = 1.5  # each wait than the one before, for hosts that are slower than thought
_FLUSH_S = 1.0  # how long one that enters a formation tries to tell the others
_LEASE = 0.8  # of a timeout, in which nobody can have gone on without this member
_IGNORED_TIMEOUTS = 3  # how long the requests of one that could not be taken in are ignored


class Follower:
    """A rank that has no connections to other replicas: it does as the first of its own does."""

    peers: Any = SimpleNamespace(waits_since_s=0.0)  # set as that of :class:`Peers`

    def close(self) -> None: ...

    def has_knocks(self) -> bool:
        return False

    def begin(self, is_whole: bool) -> None: ...

    def install(self, formation: Formation) -> None: ...

    def fail(self) -> None: ...

    def end(self, formation: Formation) -> None: ...


class Delegate(Follower):
    """The first rank, with its connections, as :class:`Membership` says."""

    def __init__(self, settings: ElasticSettings, about: Mapping[str, str], size: int) -> None:
        self.settings = settings
        founders = _resolve(settings.peers, "peers")
        breaker = next(iter(_resolve(settings.tie_breaker, "tie_breaker")), "")
        self.peers: Peers = _listen(settings, about, size)
        self.member = self.peers.member
        self.machine = Membership(
            self.member, founders or [self.peers.address], settings.min_size, breaker
        )
        self.formation = Formation(0, ())
        self._knocks: dict[str, dict[str, Any]] = {}  # what others published between rounds
        self._published: dict[str, dict[str, Any]] = {}  # what others published last
        self._known_s: dict[str, float] = {}  # since when, in this round
        self._ignored: dict[str, float] = {}

    def close(self) -> None:
        self.peers.close()

    def has_knocks(self) -> bool:
        for member, value in self._received():
            is_member = member in self.formation.members
            if not is_member and self._ignored.get(member, 0.0) < time.monotonic():
                self._knocks[member] = value
        return bool(self._knocks)

    def begin(self, is_whole: bool) -> None:
        """Enter a round, with the state of the job or without."""
        self.peers.begin()
        self._known_s.clear()
        self.machine.is_whole = is_whole
        self.machine.begin()
        for value in self._knocks.values():
            self._take(value)
        self._knocks.clear()

    def install(self, formation: Formation) -> None:
        self.machine.install(formation)

    def fail(self) -> None:
        self.machine.fail()

    def end(self, formation: Formation) -> None:
        """Take note that the members have met."""
        self.machine.confirm()
        self.formation = formation
        left_out = self.machine.left_out(formation)
        until_s = time.monotonic() + _IGNORED_TIMEOUTS * self.settings.timeout_s
        self._ignored = dict.fromkeys(left_out, until_s)
        self.peers.others = {*map(address_of, formation.members)} - {self.peers.address}
        late = self.machine.states.keys() - left_out - {*formation.members}
        self._knocks |= {member: self._published[member] for member in late}

    def choose(
        self, handles: list[str], started_s: float, lease: tuple[int, float], entered_s: float
    ) -> dict[str, Any]:
        """Publish what this member knows until there is a formation that it can enter. Return that,
        the handles of its members' ranks, and who is known to be dead.

        Args:
            started_s: when the round began, by ``time.monotonic``.
            lease: a formation's number, and since when this member has been in touch with all of
                it, by ``seconds_since_boot``, as is ``entered_s``: when it began to wait for them.
        """
        machine, peers, waited_s = self.machine, self.peers, time.monotonic()
        patience_s = self.settings.timeout_s
        while True:
            self._look(lease, entered_s)
            formation = machine.decide()
            value = {"state": machine.state.to_json(), "handles": handles}
            peers.publish(value, map(address_of, machine.known()))
            if formation is not None:
                peers.flush(value, map(address_of, formation.members), _FLUSH_S)
                known = {**self._published, self.member: value}
                return {
                    "number": formation.number,
                    "members": formation.members,
                    "handles": [known[member]["handles"] for member in formation.members],
                    "dead": sorted(machine.dead),
                }
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
                yield self.peers.received.get_nowait()

    def _look(self, lease: tuple[int, float], entered_s: float) -> None:
        """Take note of this member's lease, and of those that have ended."""
        machine, peers = self.machine, self.peers
        number, since_s = lease
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
        if seconds_since_boot() - entered_s > timeout_s:
            silent = peers.unanswered(timeout_s / 4)
            machine.miss(one for one in self.formation.members if address_of(one) in silent)

    def _take(self, value: dict[str, Any]) -> None:
        try:
            state = State.from_json(value["state"])
            self._published[state.member] = {
                "state": value["state"],
                "handles": [str(one) for one in value["handles"]],
            }
        except (KeyError, TypeError, ValueError) as error:
            _logger.warning("ignored what a member published: %r", error)
        else:
            self.machine.receive(state)

    def _check(self, started_s: float) -> None:
        machine, peers = self.machine, self.peers
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


def _listen(settings: ElasticSettings, about: Mapping[str, str], size: int) -> Peers:
    sockets = config.load(config.TransportSettings)
    key = transport.read_key(sockets)
    address = settings.address or join(address_for_anyone(sockets.interface), 0)
    (address,) = _resolve(address, "address")[:1]
    if is_unspecified(split(address)[0]):
        raise ConfigError(
            f"Elastic: address = {address!r} is no address at which others reach this member: use "
            "that of a network device of this host"
        )
    is_local = is_loopback(split(address)[0])
    if not (key or settings.token or is_local):
        raise ConfigError(
            f"Elastic: this member listens at {address}, where others could join: set "
            f"TORCHRELAY_ELASTIC_TOKEN, or {transport.KEY_VARIABLES}"
        )
    secret = hashlib.blake2b(settings.token.encode(), key=key or b"").digest()
    compared = {
        **about,
        "the version of torchrelay": torchrelay.__version__,
        "the version of torch": torch.__version__.partition("+")[0],
        "the number of ranks of a replica": str(size),
        "timeout_s": f"{settings.timeout_s:g}",
        "min_size": str(settings.min_size),
        "tie_breaker": settings.tie_breaker or "none",
        "the network of its loopback address": network_identity() if is_local else "none",
    }
    try:
        return Peers(
            address, secret, transport.key_name(secret[:32]), compared, settings.timeout_s / 4
        )
    except OSError as error:
        raise UnavailableError(f"listening at {address}: {error}; {remedy_of(error)}") from error


def _resolve(text: str, name: str) -> list[str]:
    try:
        return resolved(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Elastic: {name} = {text!r}: {error}; use host:port") from error

"""Who goes on with whom: one member's part in the agreement, without sockets and clocks.

Members agree in rounds. In a round each publishes a :class:`State`, to all that it knows, whenever
that changes; only the newest counts, so states may be lost. The member that is first in order among
those that a member is in contact with proposes a formation, and each member of it either enters the
formation or waits. It forms if all enter it. What holds, whatever is lost or late:

- A member enters a formation only with a quorum of each of its ``bases``: the last formation of
  which it knows that all its members formed it, and those that formed since, perhaps not on all.
- A quorum is more than half of the members that are not known to be dead, or half of them with the
  tie-breaker. It is enough that a death was learned by a member that is *fresh*: of which no other
  one can have believed meanwhile that it is silent, because that takes a timeout.
- After a formation, all its members meet once more (:meth:`Membership.confirm`), after which it is
  their only base. Two formations that a member of each confirms are therefore a chain.

A member's name is ``address/random``. Names are sorted, so ranks follow addresses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from typing_extensions import Self

__all__ = ["Formation", "Membership", "Record", "State", "address_of", "resolve"]


@dataclass(frozen=True, order=True)
class Formation:
    """Members that form a group, by rank. ``number`` is that of the round; 0: the addresses at
    which a job can be founded.
    """

    number: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class State:
    """What a member publishes in a round. Of two, that with the higher ``serial`` counts."""

    member: str
    serial: int
    number: int
    bases: tuple[Formation, ...]
    seen: tuple[str, ...]  # others that have published in this round, or wanted it
    contacts: tuple[str, ...]  # those of them that are in it
    dead: tuple[str, ...]
    witnessed: tuple[str, ...]  # deaths that it learned while it was fresh
    silent: tuple[str, ...]
    is_whole: bool  # it has the job's state
    proposal: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Raise TypeError, KeyError or ValueError if ``fields`` are no state."""
        lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
        bases = tuple(Formation(int(b["number"]), tuple(b["members"])) for b in fields["bases"])
        return cls(**{**fields, **lists, "bases": bases})


@dataclass(frozen=True)
class Record:
    """What a member knows of the job when a formation has formed.

    Args:
        version: the number of steps that were committed.
        is_in_doubt: it voted for the next step, and does not know whether all others did.
    """

    version: int
    is_in_doubt: bool
    is_whole: bool


def resolve(records: Iterable[Record]) -> list[Record]:
    """Return the members' records once they know each other's: a step is committed if one of those
    that go on knows so; if there is no job yet, the first member founds it.
    """
    known = list(records)
    if not any(record.is_whole for record in known):
        known[0] = replace(known[0], is_whole=True)
    version = max(record.version for record in known if record.is_whole)
    return [
        Record(version, False, record.is_whole and record.version + record.is_in_doubt >= version)
        for record in known
    ]


def address_of(member: str) -> str:
    return member.partition("/")[0]


class Membership:
    """One member. ``dead`` and ``silent`` contain names of members, or addresses where founders are
    expected.

    Args:
        founders: the addresses at which a job may be founded.
        min_size: the fewest members that go on.
        tie_breaker: the address whose half goes on where the members are cut in halves.

    Attributes:
        is_fresh: set by the caller: whether less than a timeout has passed since this member began
            a collective of ``bases[0]`` that all its members have completed.
    """

    def __init__(
        self, member: str, founders: Iterable[str], min_size: int = 1, tie_breaker: str = ""
    ) -> None:
        self.member, self.min_size, self.tie_breaker = member, min_size, tie_breaker
        self.bases: tuple[Formation, ...] = (Formation(0, tuple(sorted(founders))),)
        self.number, self.is_whole, self.is_fresh = 0, False, False
        self.states: dict[str, State] = {}  # of others, in this round
        self.dead: set[str] = set()
        self.witnessed: set[str] = set()
        self.silent: set[str] = set()
        self._is_settled = False
        self._published = State(member, 0, 0, self.bases, (), (), (), (), (), False)

    # --- what happens

    def begin(self) -> None:
        """Enter a round."""
        self.states.clear()
        self.silent.clear()
        self._advance(self.number + 1)

    def receive(self, state: State) -> None:
        """Take what another member has published."""
        former = self.states.get(state.member)
        if former is not None and former.serial >= state.serial:
            return
        self.states[state.member] = state
        self._advance(state.number)
        self.silent -= _names([state.member])
        self.dead.discard(address_of(state.member))
        for one in state.dead:
            if one != address_of(one):
                self.lose(one)
        self._learn(state.bases[0])
        is_peer = state.is_whole and state.member in self.bases[0].members
        if is_peer and state.number == self.number:  # it has waited as long as this one would
            self.silent.update({*state.silent} - _names(self._contacts()))

    def lose(self, name: str) -> None:
        """Take note that a member has certainly died, or that nobody is at an address."""
        self.dead.add(name)
        self.states.pop(name, None)

    def wait_no_longer(self) -> None:
        """Take note that a timeout has passed since the round began, or since the last call."""
        if self._is_settled:  # one of the contacts may have become silent
            self._advance(self.number + 1)
        else:
            self.silent |= self.awaited()
            self._is_settled = True

    def miss(self, members: Iterable[str]) -> None:
        """Take note that these have been silent for a timeout, however they were asked."""
        self.silent |= {*members} & self.awaited() - self.states.keys()

    def fail(self) -> None:
        """Take note that the formation that this member entered has not formed."""
        self._advance(self.number + 1)

    def install(self, formation: Formation) -> None:
        """Take note that all members of ``formation`` have entered it."""
        known = {formation}.union(*(self._of(member).bases for member in formation.members))
        oldest = max(self._of(member).bases[0].number for member in formation.members)
        self.bases = tuple(sorted(base for base in known if base.number >= oldest))

    def confirm(self) -> None:
        """Take note that the members of the last formation have met in it: all have formed it."""
        self._learn(self.bases[-1])

    # --- what follows

    @property
    def state(self) -> State:
        """What this member publishes."""
        proposal = self._published.proposal if self._published.number == self.number else ()
        return self._publish(proposal)

    def decide(self) -> Formation | None:
        """Return the formation to enter, once there is one. After that, the caller calls
        :meth:`install` or :meth:`fail`.
        """
        state, contacts = self.state, self._contacts()
        first = min(contacts, key=lambda name: (not contacts[name].is_whole, name))
        if first == self.member:
            state = self._publish(self._proposed(contacts))
        proposal = contacts[first].proposal if first != self.member else state.proposal
        is_known = self.member in proposal and contacts.keys() >= {*proposal}
        if is_known and not self._objection(proposal, self.bases, contacts):
            return Formation(self.number, proposal)
        return None

    def awaited(self) -> set[str]:
        """Return who has to come, or die, before this member can propose a formation."""
        contacts = self._contacts()
        found = {member for one in contacts.values() for member in (*_members(one), *one.seen)}
        return (found | {*self.states}) - _names(contacts) - self.dead - self.silent

    def known(self) -> set[str]:
        """Return the members, and addresses of founders, that this member knows of."""
        states = [self.state, *self.states.values()]
        return {name for one in states for name in (*_members(one), *one.seen)} - _names(
            [self.member]
        )

    def left_out(self, formation: Formation) -> set[str]:
        """Return those that could not be in ``formation``, and should not be tried again soon."""
        return {*self._contacts()} - _names(formation.members)

    def objection(self) -> str:
        """Return why this member does not go on with those that it is in contact with."""
        contacts = self._contacts()
        return self._objection([*contacts], self.bases, contacts)

    def is_orphan(self) -> bool:
        """Return whether nobody who lives has the state of the job."""
        contacts = self._contacts()
        left = {*self.bases[-1].members} - self.dead - {*contacts}
        is_job = self.bases[0].number > 0
        return is_job and not left and not any(one.is_whole for one in contacts.values())

    # --- inside

    def _publish(self, proposal: tuple[str, ...]) -> State:
        if self.is_fresh:
            self.witnessed |= self.dead
        now = State(
            self.member,
            self._published.serial,
            self.number,
            self.bases,
            tuple(sorted(self.states)),
            tuple(sorted(self._contacts())),
            tuple(sorted(self.dead)),
            tuple(sorted(self.witnessed)),
            tuple(sorted(self.silent)),
            self.is_whole,
            proposal,
        )
        if now != self._published:
            self._published = replace(now, serial=now.serial + 1)
        return self._published

    def _advance(self, number: int) -> None:
        if number > self.number:
            self.number, self._is_settled = number, False

    def _of(self, member: str) -> State:
        return self.states[member] if member != self.member else self.state

    def _contacts(self) -> dict[str, State]:
        """Return those in this round, among them this member as it last published itself."""
        found = {name: one for name, one in self.states.items() if one.number == self.number}
        return {**found, self.member: self._published}

    def _learn(self, confirmed: Formation) -> None:
        """Take note of a formation that all its members have formed."""
        if confirmed == self.bases[0] or confirmed.number < self.bases[0].number:
            return
        if confirmed in self.bases:
            self.bases = self.bases[self.bases.index(confirmed) :]
        else:  # the others went on without this member
            self.bases, self.is_whole = (confirmed,), False
        self.is_fresh = False  # it was that of a collective of the former base
        self.witnessed.clear()

    def _proposed(self, contacts: Mapping[str, State]) -> tuple[str, ...]:
        if self.awaited():
            return ()
        chosen: list[str] = []
        for name in sorted(contacts, key=lambda name: (not contacts[name].is_whole, name)):
            if all(
                name in contacts[other].contacts and other in contacts[name].contacts
                for other in chosen
            ):
                chosen.append(name)
        if len(chosen) < len(contacts) and not self._is_settled:
            return ()  # what they are in contact with may be on its way
        bases = {base for name in chosen for base in contacts[name].bases}
        return () if self._objection(chosen, bases, contacts) else tuple(sorted(chosen))

    def _objection(
        self,
        chosen: Collection[str],
        bases: Iterable[Formation],
        contacts: Mapping[str, State],
    ) -> str:
        """Return why ``chosen`` must not go on, empty if they may."""
        if len(chosen) < self.min_size:
            return f"{len(chosen)} of the {self.min_size} members that it needs (min_size) are here"
        known = [contacts[name] for name in chosen]
        if any(one.bases[0].number for one in known) and not any(one.is_whole for one in known):
            return "nobody here has the state of the job"
        return next(filter(None, (self._minority(chosen, base, known) for base in bases)), "")

    def _minority(self, chosen: Collection[str], base: Formation, known: list[State]) -> str:
        here = _names(chosen)
        if base.number == 0:
            absent = [one for one in base.members if one not in here and one not in self.dead]
            if here.isdisjoint(base.members):
                return f"no member answers at {', '.join(base.members)}"
            what = "a job is founded once each address answers or refuses connections"
            return f"{what}; no sign of {', '.join(absent)}" if absent else ""
        dead = {one for s in known if s.member in base.members for one in s.witnessed}
        electors = [member for member in base.members if member in here or member not in dead]
        present = [member for member in electors if member in here]
        is_tie_broken = any(address_of(member) == self.tie_breaker for member in present)
        if 2 * len(present) + is_tie_broken > len(electors):
            return ""
        absent = [member for member in electors if member not in here]
        return (
            f"{len(present)} of {len(electors)} members are here, which is no majority, and no "
            f"sign that the others have ended: {', '.join(absent)}"
        )


def _members(state: State) -> set[str]:
    return {member for base in state.bases for member in base.members}


def _names(members: Iterable[str]) -> set[str]:
    return {name for member in members for name in (member, address_of(member))}

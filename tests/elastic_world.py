"""Members of an elastic job in simulated time: what they send is late, lost, or seen by some only.

A node runs the real :class:`Membership`. Simulated are its clock, the network, and groups: of a
collective each node knows only that all others have entered it, so some complete what fails on
others.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torchrelay.training import _membership
from torchrelay.training._membership import Formation, Membership, Record, State, address_of

TIMEOUT_S = 2.0
LEASE_S = 0.8 * TIMEOUT_S
TICK_S = 0.1
PUBLISH_S = 0.5


@dataclass
class Commit:
    """A state of the job: who committed it, of which formation, after which state."""

    parent: str
    formation: Formation
    nodes: set[str] = field(default_factory=set)


class Node:
    def __init__(self, world: World, address: str, name: str, **options: Any) -> None:
        self.world, self.name = world, name
        self.machine = Membership(name, world.addresses, **options)
        self.is_frozen = self.is_dead = self.is_silenced = False
        self.inbox: list[Callable[[], None]] = []
        self.phase, self.formation, self.index = "round", Formation(0, ()), 0
        self.tokens: dict[tuple[Formation, int], dict[str, Any]] = defaultdict(dict)
        self.left: set[tuple[Formation, str]] = set()
        self.knocks: dict[str, State] = {}
        self.ignored: dict[str, float] = {}
        self.version, self.digest, self.is_in_doubt = 0, "", False
        self.voted = self.formation
        self.entered_s = self.deadline_s = self.round_s = 0.0
        self.asked_s, self.answered = -1.0, {name}
        self.lease: tuple[int, float] = (0, 0.0)
        self.published: dict[str, tuple[int, float]] = {}
        self.machine.begin()

    def __repr__(self) -> str:
        return f"{self.name}:{self.phase}:{self.machine.number}"

    # --- time

    def tick(self) -> None:
        world, machine = self.world, self.machine
        machine.is_fresh = (
            self.lease[0] == machine.bases[0].number and world.now_s - self.lease[1] < LEASE_S
        )
        if self.phase == "round":
            self.round()
        elif self.phase == "compute":
            if world.now_s >= self.deadline_s:
                self.enter("reduce", None)
        elif world.now_s >= self.deadline_s:
            self.fail()
        elif self.phase in ("reduce", "vote") and world.now_s - self.entered_s > TIMEOUT_S / 4:
            self.ask()

    def ask(self) -> None:
        """Ask the others whether they are there, unless that was done since the last collective
        began.
        """
        if self.asked_s > self.entered_s:
            return
        asked_s = self.asked_s = self.world.now_s
        self.answered = {self.name}

        def answer(node: Node) -> None:
            self.world.send(node.name, self.name, lambda asking: asking.take_answer(node, asked_s))

        for member in self.formation.members:
            self.world.send(self.name, member, answer)

    def take_answer(self, node: Node, asked_s: float) -> None:
        if asked_s == self.asked_s:
            self.answered.add(node.name)

    def round(self) -> None:
        world, machine = self.world, self.machine
        for member in sorted(self.machine.known()):
            if world.refuses(self.name, member):
                machine.lose(member)
        if self.entered_s < world.now_s - TIMEOUT_S and self.asked_s < world.now_s - TIMEOUT_S / 2:
            machine.miss({*self.formation.members} - self.answered)
        if world.now_s - self.round_s >= TIMEOUT_S:
            self.round_s = world.now_s
            machine.wait_no_longer()
        formation = machine.decide()
        self.publish()
        world.look(self)
        if formation is not None:
            assert formation.number == machine.number
            world.entered[formation][self.name] = machine.bases
            self.formation, self.index = formation, 0
            self.tokens = defaultdict(
                dict, {k: v for k, v in self.tokens.items() if k[0] >= formation}
            )
            self.enter("form", None)

    def publish(self) -> None:
        state = self.machine.state
        for member in sorted(self.machine.known()):
            serial, at_s = self.published.get(member, (0, -1.0))
            if serial < state.serial or self.world.now_s - at_s > PUBLISH_S:
                self.published[member] = state.serial, self.world.now_s
                self.world.send(self.name, member, lambda node: node.hear(state))

    def hear(self, state: State) -> None:
        if self.phase == "round":
            self.machine.receive(state)
        elif self.world.now_s >= self.ignored.get(state.member, 0.0):
            self.knocks[state.member] = state

    # --- collectives

    def enter(self, phase: str, value: Any) -> None:
        self.phase, self.deadline_s = phase, self.world.now_s + TIMEOUT_S
        former_s, self.entered_s = self.entered_s, self.world.now_s
        self.world.spring(phase)
        if self.is_dead:
            return
        key = self.formation, self.index
        self.tokens[key][self.name] = value
        self.former_s = former_s
        for member in self.formation.members:
            if member != self.name:
                self.world.send(self.name, member, lambda node: node.take(key, self.name, value))
        self.look()

    def take(self, key: tuple[Formation, int], sender: str, value: Any) -> None:
        self.tokens[key][sender] = value
        self.look()

    def hear_left(self, formation: Formation, sender: str) -> None:
        self.left.add((formation, sender))
        self.look()

    def look(self) -> None:
        if self.phase in ("round", "compute"):
            return
        values = self.tokens[self.formation, self.index]
        if len(values) == len(self.formation.members):
            self.index += 1
            if self.phase != "form":
                self.lease = self.formation.number, self.former_s
            getattr(self, f"end_{self.phase}")([values[m] for m in self.formation.members])
        elif any(
            (self.formation, m) in self.left for m in self.formation.members if m not in values
        ):
            self.fail()

    def fail(self) -> None:
        formation, name = self.formation, self.name
        for member in formation.members:
            if member != name:
                self.world.send(name, member, lambda node: node.hear_left(formation, name))
        if self.phase in ("reduce", "vote", "heal"):
            self.start_round()
        else:
            self.phase = "round"
            self.machine.fail()
            self.feed()

    def start_round(self) -> None:
        self.phase, self.round_s = "round", self.world.now_s
        self.ask()
        self.machine.begin()
        self.feed()

    def feed(self) -> None:
        knocks, self.knocks = self.knocks, {}
        for state in knocks.values():
            self.machine.receive(state)

    # --- what ends

    def end_form(self, _: list[Any]) -> None:
        self.left_out = self.machine.left_out(self.formation)
        self.machine.install(self.formation)
        self.world.form(self)
        self.enter("meet", (self.record, self.digest))

    @property
    def record(self) -> Record:
        return Record(self.version, self.is_in_doubt, self.machine.is_whole)

    def end_meet(self, values: list[tuple[Record, str]]) -> None:
        machine, rank = self.machine, self.formation.members.index(self.name)
        machine.confirm()
        resolved = _membership.resolve([record for record, _ in values])
        mine = resolved[rank]
        if not any(record.is_whole for record, _ in values) and mine.is_whole:
            self.world.found(self)
        if mine.is_whole and mine.version > self.version:
            self.commit()
        self.world.confirm(self)
        machine.is_whole, self.is_in_doubt = mine.is_whole, False
        if mine.is_whole:
            self.world.agree(self)
        for member in self.left_out:
            self.ignored[member] = self.world.now_s + 3 * TIMEOUT_S
        if all(one.is_whole for one in resolved):
            self.compute()
        else:
            self.enter("heal", (self.version, self.digest) if mine.is_whole else None)

    def end_heal(self, values: list[Any]) -> None:
        self.version, self.digest = next(filter(None, values))
        self.machine.is_whole = True
        self.world.agree(self)
        self.compute()

    def end_reduce(self, _: list[Any]) -> None:
        self.is_in_doubt, self.voted = True, self.formation
        self.enter("vote", bool(self.knocks))

    def end_vote(self, knocks: list[bool]) -> None:
        self.is_in_doubt = False
        self.commit()
        if any(knocks):
            self.start_round()
        else:
            self.compute()

    def commit(self) -> None:
        self.version += 1
        self.digest = self.world.commit(self)

    def compute(self) -> None:
        rng = self.world.rng
        self.phase = "compute"
        self.deadline_s = self.world.now_s + rng.choice([0.1, 0.1, 0.3, 0.5 * TIMEOUT_S])


class World:
    """Nodes, a network, and what must hold."""

    def __init__(self, seed: int, size: int, **options: Any) -> None:
        self.rng, self.now_s = random.Random(seed), 0.0
        self.options = options
        self.addresses = [f"h{i}" for i in range(size)]
        self.nodes: dict[str, Node] = {}
        self.at: dict[str, Node] = {}
        self.cuts: set[frozenset[str]] = set()
        self.is_slow = True
        self.ambushes: dict[str, Callable[[], None]] = {}
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.commits: dict[str, Commit] = {}
        self.agreed: dict[Formation, tuple[int, str]] = {}
        self.entered: dict[Formation, dict[str, tuple[Formation, ...]]] = defaultdict(dict)
        self.formed: dict[Formation, set[str]] = defaultdict(set)
        self.confirmed: set[Formation] = set()  # of the job that there is
        self.born = 0
        for address in self.addresses:
            self.start(address)

    def start(self, address: str) -> Node:
        self.born += 1
        node = Node(
            self, address, f"{address}/{self.rng.randrange(1000):03}{self.born}", **self.options
        )
        self.nodes[node.name] = self.at[address] = node
        self.tick(node)
        return node

    def at_time(self, time_s: float, run: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (time_s, self.count, run))

    def tick(self, node: Node) -> None:
        if node.is_dead:
            return
        if not node.is_frozen:
            node.tick()
        self.at_time(self.now_s + TICK_S * self.rng.uniform(0.5, 1.5), lambda: self.tick(node))

    def run(self, until_s: float) -> None:
        while self.events and self.events[0][0] <= until_s:
            self.now_s, _, run = heapq.heappop(self.events)
            run()
        self.now_s = until_s

    def find(self, name: str) -> Node | None:
        return self.at.get(name) if address_of(name) == name else self.nodes.get(name)

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((address_of(one), address_of(other))) in self.cuts

    def refuses(self, one: str, other: str) -> bool:
        """Whether the kernel where ``other`` was says that it is gone."""
        node = self.find(other)
        return (
            not self.is_cut(one, other)
            and node is not None
            and node.is_dead
            and not node.is_silenced
        )

    def delay_s(self) -> float:
        if self.is_slow and self.rng.random() < 0.03:
            return self.rng.uniform(0, 1.5 * TIMEOUT_S)
        return self.rng.expovariate(50.0)

    def send(self, sender: str, to: str, act: Callable[[Node], None]) -> None:
        def deliver() -> None:
            node = self.find(to)
            if node is None or node.is_dead or self.is_cut(sender, to):
                return
            if node.is_frozen:
                node.inbox.append(lambda: act(node))
            else:
                act(node)

        if not self.is_cut(sender, to):
            self.at_time(self.now_s + self.delay_s(), deliver)

    # --- faults

    def spring(self, phase: str) -> None:
        """Let happen what waits for a member that enters ``phase``, before it tells the others."""
        self.ambushes.pop(phase, lambda: None)()

    def freeze(self, node: Node) -> None:
        node.is_frozen = True

    def thaw(self, node: Node) -> None:
        node.is_frozen = False
        inbox, node.inbox = node.inbox, []
        order = [node.tick, *inbox] if self.rng.random() < 0.5 else [*inbox, node.tick]
        for act in order:
            act()

    def kill(self, node: Node, is_silent: bool = False) -> None:
        node.is_dead, node.is_silenced = True, is_silent
        for other in self.alive:  # the kernel closes its connections
            if not is_silent and node.name in other.formation.members:
                self.send(
                    node.name, other.name, lambda one: one.hear_left(one.formation, node.name)
                )

    def cut(self, side: set[str]) -> None:
        for one in side:
            self.cuts.update(frozenset((one, b)) for b in self.addresses if b not in side)

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if not node.is_dead]

    # --- what must hold

    def found(self, node: Node) -> None:
        whole = [one for one in self.alive if one.machine.is_whole and one is not node]
        assert not whole, f"{node} founds a job while {whole} have one"
        self.confirmed.clear()
        node.digest = f"job of {node.name}"

    def form(self, node: Node) -> None:
        """What one of the members knew when it entered, all of them know when they form it."""
        formation, entered = node.formation, self.entered[node.formation]
        self.formed[formation].add(node.name)
        assert len(formation.members) >= node.machine.min_size, formation
        oldest = max(bases[0].number for bases in entered.values())
        known = {base for bases in entered.values() for base in bases if base.number >= oldest}
        assert {*node.machine.bases} == {formation, *known}, f"{node} forgets {known}"

    def confirm(self, node: Node) -> None:
        """The formations that all their members have formed are a chain."""
        self.confirmed.add(node.formation)
        self.look(node)
        for former, later in pairwise(sorted(self.confirmed)):
            known = {base for bases in self.entered[later].values() for base in bases}
            assert former in known, f"{later} does not go on from {former}"

    def look(self, node: Node) -> None:
        """All members have formed the oldest base of one."""
        base = node.machine.bases[0]
        assert not base.number or self.formed[base] == {*base.members}, f"{node} relies on {base}"

    def commit(self, node: Node) -> str:
        digest = f"{abs(hash((node.digest, node.voted, node.version))):x}"
        entry = self.commits.setdefault(digest, Commit(node.digest, node.voted))
        entry.nodes.add(node.name)
        rivals = [
            (other, self.commits[other])
            for other in self.commits
            if other != digest and self.commits[other].parent == entry.parent
        ]
        parents = {one.parent for one in self.commits.values()}
        for other, rival in rivals:
            lost = [
                one
                for name, one in ((other, rival), (digest, entry))
                if name not in parents and len(one.nodes) < len(one.formation.members)
            ]
            assert lost, f"two jobs go on: {rival} and {entry}"
        return digest

    def agree(self, node: Node) -> None:
        mine = node.version, node.digest
        theirs = self.agreed.setdefault(node.formation, mine)
        assert theirs == mine, f"{node} has {mine}, others of {node.formation} have {theirs}"

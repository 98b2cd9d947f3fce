"""Who goes on with whom, in simulated time: hundreds of schedules of faults."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastic_world import TICK_S, TIMEOUT_S, Node, World
from torchrelay.training._membership import Formation, Membership, Record, State, resolve

PHASES = ["form", "meet", "heal", "reduce", "vote", "vote"]
KINDS = {
    "kill": 2,
    "vanish": 1,
    "freeze": 2,
    "thaw": 1,
    "pair": 1,
    "halves": 2,
    "join": 2,
    "mend": 1,
}
KINDS["ambush"] = 2
PAUSES_S = [0.05, 0.5, TIMEOUT_S, 3 * TIMEOUT_S, 5 * TIMEOUT_S]


def fault(world: World) -> None:
    rng = world.rng
    victim = rng.choice(world.alive)
    kind = rng.choice([kind for kind, often in KINDS.items() for _ in range(often)])
    if kind in ("kill", "vanish") and len(world.alive) > 1:
        world.kill(victim, kind == "vanish")
    elif kind == "freeze":
        world.freeze(victim)
    elif kind == "thaw":
        for node in world.alive:
            if node.is_frozen and rng.random() < 0.7:
                world.thaw(node)
    elif kind == "pair":
        world.cuts.add(frozenset(rng.sample(world.addresses, 2)))
    elif kind == "halves":
        world.cut({one for one in world.addresses if rng.random() < 0.5})
    elif kind == "join":
        if dead := [one for one in world.addresses if world.at[one].is_dead]:
            world.start(rng.choice(dead))
    elif kind == "mend":
        world.cuts.clear()
    elif kind == "ambush":
        world.ambushes[rng.choice(PHASES)] = lambda: fault(world)


def fuzz(seed: int) -> World:
    """Run a schedule of faults, then repair all and see the job go on."""
    breaker = f"h{seed % 2}" if seed % 3 == 0 else ""
    world = World(seed, 2 + seed % 5, min_size=1 + seed // 5 % 2, tie_breaker=breaker)
    world.run(world.rng.uniform(0, 4))
    for _ in range(world.rng.randrange(3, 12)):
        fault(world)
        world.run(world.now_s + world.rng.choice(PAUSES_S))
    repair(world)
    return world


def repair(world: World) -> None:
    world.cuts.clear()
    world.is_slow = False
    world.ambushes.clear()
    for node in world.alive:
        if node.is_frozen:
            world.thaw(node)
    before = max((node.version for node in world.alive), default=0)
    world.run(world.now_s + 25 * TIMEOUT_S)
    if may_go_on(world):
        alive = world.alive
        names = tuple(sorted(node.name for node in alive))
        assert {node.formation.members for node in alive} == {names}, (
            alive,
            world.alive[0].machine.objection(),
        )
        assert min(node.version for node in alive) > before, alive


def may_go_on(world: World) -> bool:
    """Whether those alive are a majority, of which one has the state, by all that they know."""
    alive = {node.name for node in world.alive}
    bases = {base for node in world.alive for base in node.machine.bases if base.number}
    newest = max((node.machine.bases[0] for node in world.alive), default=Formation(0, ()))
    bases = {base for base in bases if base >= newest}
    is_majority = all(2 * len(alive & {*base.members}) > len(base.members) for base in bases)
    is_whole = any(node.machine.is_whole for node in world.alive)
    is_enough = len(alive) >= min((node.machine.min_size for node in world.alive), default=0)
    return bool(alive and bases and is_majority and is_whole and is_enough)


def running(size: int, **options: Any) -> World:
    """Return a world whose members are all in one formation."""
    world = World(0, size, **options)
    world.is_slow = False
    world.run(5 * TIMEOUT_S)
    assert {len(node.formation.members) for node in world.alive} == {size}
    return world


def going_on(world: World, nodes: list[Node]) -> list[bool]:
    """Whether each of ``nodes`` commits steps once all that is lost has been noticed."""
    world.run(world.now_s + 5 * TIMEOUT_S)
    before = [node.version for node in nodes]
    world.run(world.now_s + 5 * TIMEOUT_S)
    return [node.version > former for node, former in zip(nodes, before, strict=True)]


@pytest.mark.parametrize(
    ("tie_breaker", "goes_on"), [("", [False] * 4), ("h3", [False, False, True, True])]
)
def test_of_equal_halves_neither_goes_on_but_that_of_the_tie_breaker(
    tie_breaker: str, goes_on: list[bool]
) -> None:
    world = running(4, tie_breaker=tie_breaker)
    world.cut({"h0", "h1"})
    assert going_on(world, world.alive) == goes_on
    assert "which is no majority" in world.alive[0].machine.objection()
    repair(world)


def test_a_majority_of_the_last_members_goes_on() -> None:
    world = running(5)
    world.cut({"h0", "h1"})
    assert going_on(world, world.alive) == [False, False, True, True, True]
    world.freeze(world.at["h2"])  # two of the last three are left
    assert going_on(world, world.alive[3:]) == [True, True]
    world.kill(world.at["h3"], is_silent=True)  # one of the last two
    assert going_on(world, world.alive[3:]) == [False]


@pytest.mark.parametrize("at_once", [False, True])
def test_deaths_that_are_certain_need_no_majority(at_once: bool) -> None:
    world = running(4)
    for address in ("h0", "h1", "h3"):
        world.kill(world.at[address])
        assert at_once or going_on(world, world.alive) == [True] * len(world.alive)
    assert going_on(world, world.alive) == [True]


def test_one_that_was_frozen_does_not_go_on_alone() -> None:
    """The others may have gone on with members that it does not know."""
    world = running(3)
    frozen = world.at["h0"]
    world.freeze(frozen)
    world.run(world.now_s + 3 * TIMEOUT_S)
    for address in ("h1", "h2"):
        world.kill(world.at[address])
    world.thaw(frozen)
    assert going_on(world, [frozen]) == [False]


@pytest.mark.parametrize(("is_frozen", "size", "timeouts"), [(True, 2, 1.4), (False, 3, 2.0)])
def test_one_that_does_not_answer_costs_one_timeout_and_one_that_computes_is_kept(
    is_frozen: bool, size: int, timeouts: float
) -> None:
    world = running(3)
    while {node.phase for node in world.alive} != {"compute"}:
        world.run(world.now_s + TICK_S / 10)
    late, former = world.alive[0], world.alive[0].formation
    for node in world.alive:
        node.deadline_s = world.now_s
    late.deadline_s += 1.2 * TIMEOUT_S
    late.is_frozen = is_frozen
    world.run(world.now_s + timeouts * TIMEOUT_S)
    formations = {node.formation for node in world.alive if not node.is_frozen}
    assert [len(one.members) for one in formations - {former}] == [size]


def test_one_that_was_heard_of_is_not_missed() -> None:
    machine = Membership("h0/1", ["h0"])
    machine.bases = (Formation(1, ("h0/1", "h1/1", "h2/1")),)
    machine.is_whole = True
    machine.begin()
    machine.begin()
    machine.receive(State("h1/1", 1, 1, machine.bases, (), (), (), (), (), True))
    machine.miss(["h1/1", "h2/1"])
    assert machine.awaited() == {"h1/1"}


QUORUM = "h0/1", "h1/1", "h2/1"
MINORITY = "h1/1", "h2/1", "h3/1"


@pytest.mark.parametrize(
    ("bases", "enters"),
    [
        ([QUORUM], True),
        ([MINORITY], False),
        ([QUORUM, MINORITY], False),
        ([MINORITY, QUORUM], False),
        ([("h1/1", "h2/1")], False),  # whose tie the one that proposes cannot break
    ],
)
def test_a_member_enters_only_with_a_quorum_of_each_of_its_bases(
    bases: list[tuple[str, ...]], enters: bool
) -> None:
    """Whatever the one that proposes has seen: of a base that it was not in, it is no witness."""
    machine = Membership("h1/1", ["h1"], tie_breaker="h0")
    machine.bases = tuple(Formation(number, base) for number, base in enumerate(bases, 1))
    machine.begin()
    both, dead = ("h0/1", "h1/1"), ("h2/1", "h3/1")
    machine.receive(
        State("h0/1", 1, 1, machine.bases, both[1:], both, dead, dead, (), True, proposal=both)
    )
    assert (machine.decide() == Formation(1, both)) == enters


def test_one_that_is_not_in_the_list_founds_no_job() -> None:
    machine = Membership("h9/1", ["h0"])
    machine.begin()
    machine.lose("h0")
    assert machine.decide() is None
    assert machine.objection() == "no member answers at h0"


def test_a_proposal_is_that_of_its_round() -> None:
    machine = Membership("h0/1", ["h0"])
    machine.begin()
    assert machine.decide() == Formation(1, ("h0/1",))
    machine.fail()
    assert machine.state.proposal == ()


@pytest.mark.parametrize(
    ("records", "version", "whole"),
    [
        ([(0, False, False), (0, False, False)], 0, [True, False]),  # the first founds the job
        ([(5, True, True), (6, False, True)], 6, [True, True]),  # one knows that all had voted
        ([(5, True, True), (5, False, True)], 5, [True, True]),  # nobody knows so
        ([(5, False, True), (6, False, True)], 6, [False, True]),
        ([(4, True, True), (6, False, True)], 6, [False, True]),
        ([(9, False, False), (6, False, True)], 6, [False, True]),  # what was discarded
    ],
)
def test_the_step_in_doubt(
    records: list[tuple[int, bool, bool]], version: int, whole: list[bool]
) -> None:
    known = [Record(*record) for record in records]
    assert resolve(known) == [Record(version, False, is_whole) for is_whole in whole]


def test_of_two_states_the_newer_one_counts() -> None:
    machine, other = (Membership(name, ["h0", "h1"]) for name in ("h0/1", "h1/1"))
    older = other.state
    other.lose("h0/2")
    newer = other.state
    machine.receive(newer)
    machine.receive(older)
    assert machine.states == {"h1/1": newer}
    assert "h0/2" in machine.dead


def test_states_are_read_as_they_were_written() -> None:
    state = running(2).alive[0].machine.state
    assert State.from_json(json.loads(json.dumps(state.to_json()))) == state


@pytest.mark.parametrize("start", range(0, 100, 25))
def test_schedules(start: int) -> None:
    for seed in range(start, start + 25):
        try:
            fuzz(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error

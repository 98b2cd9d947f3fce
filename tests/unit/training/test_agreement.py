"""What a member concludes from its clock and from what listens at addresses."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from torchrelay.config import ElasticSettings
from torchrelay.errors import PeerLostError
from torchrelay.training import _agreement, _delegate
from torchrelay.training._agreement import Agreement, Met
from torchrelay.training._delegate import Delegate
from torchrelay.training._membership import Formation

SELF, OTHER = "127.0.0.1:1/self", "127.0.0.1:2/other"
BASE = Formation(3, (SELF, OTHER))
TIMEOUT_S = 10.0


class Member:
    """An agreement of one that is in ``BASE``, without sockets and groups."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.silent: set[str] = set()
        self.peers = SimpleNamespace(
            address="127.0.0.1:1",
            member=SELF,
            found={},
            waits_since_s=0.0,
            unanswered=lambda _: self.silent,
        )
        patch.setattr(_agreement, "_new_group", lambda *_: None)
        patch.setattr(_delegate, "_listen", lambda *_: self.peers)
        for module in (_agreement, _delegate):
            patch.setattr(module, "seconds_since_boot", lambda: self.now_s)
        self.agreement = Agreement(ElasticSettings(timeout_s=TIMEOUT_S), {})
        assert isinstance(self.agreement.delegate, Delegate)
        self.delegate, self.machine = self.agreement.delegate, self.agreement.delegate.machine
        self.machine.bases, self.delegate.formation = (BASE,), BASE
        self.agreement.met = Met(BASE, (), ())

    def collective(self, at_s: float, wait: Callable[[], Any] = lambda: None) -> None:
        self.now_s = at_s
        self.agreement.collective(lambda _: SimpleNamespace(wait=wait))

    def look(self) -> None:
        self.delegate._look(self.agreement._lease, self.agreement._entered_s)

    def is_fresh(self, at_s: float) -> bool:
        self.now_s = at_s
        self.look()
        return self.machine.is_fresh

    def is_lost(self, found: str, after_s: float) -> bool:
        """Whether ``OTHER`` is dead if that was found so long after it became known."""
        self.look()
        self.peers.found["127.0.0.1:2"] = found, time.monotonic() + after_s
        self.look()
        return OTHER in self.machine.dead


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Member:
    return Member(monkeypatch)


def test_a_member_is_fresh_from_a_collective_that_all_completed(member: Member) -> None:
    assert not member.is_fresh(100.0)
    member.collective(100.0)
    member.collective(103.0)  # after which all have completed the one before
    assert member.is_fresh(107.9)
    assert not member.is_fresh(108.1)


def test_a_collective_that_fails_makes_no_member_fresh(member: Member) -> None:
    def fail() -> None:
        raise PeerLostError("rank 1 was lost", (1,))

    member.collective(100.0)
    member.collective(103.0)
    with pytest.raises(PeerLostError):
        member.collective(107.0, fail)
    assert member.is_fresh(107.9)
    assert not member.is_fresh(108.1)


def test_a_member_that_is_away_for_too_long_says_so(
    member: Member, caplog: pytest.LogCaptureFixture
) -> None:
    """Not at its first collective, nor because others were late."""
    member.collective(100.0)

    def wait() -> None:
        member.now_s = 120.0

    member.collective(109.0, wait)
    member.collective(129.9)
    assert not caplog.records
    member.collective(140.0)
    assert "was busy, or frozen, for 10.1 s" in caplog.text


def test_a_collective_of_another_formation_makes_no_member_fresh(member: Member) -> None:
    member.collective(100.0)
    member.collective(101.0)
    member.machine.bases = (Formation(4, BASE.members),)
    assert not member.is_fresh(102.0)


def test_a_replica_is_fresh_as_long_as_all_its_ranks_are(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``ages_s`` are those that another rank has; its clock is not known, only that it was met."""
    ages_s = iter([0.0, 5.0])
    member.agreement.replica.size = 2

    def largest(flag: float, age_s: float) -> list[float]:
        return [flag, max(age_s, next(ages_s))]

    monkeypatch.setattr(member.agreement.replica, "largest", largest)
    member.collective(100.0)
    member.collective(101.0)
    assert not member.is_fresh(101.0)
    member.agreement.any(False)
    member.now_s = 103.0
    assert member.agreement.any(True) == [True]
    assert member.is_fresh(103.9)  # the other may have said its age at 101, after the first call
    assert not member.is_fresh(104.1)


@pytest.mark.parametrize("waited_s", [TIMEOUT_S - 0.1, TIMEOUT_S + 0.1])
def test_one_that_does_not_answer_is_awaited_for_a_timeout(member: Member, waited_s: float) -> None:
    member.collective(100.0)
    member.silent = {"127.0.0.1:2"}
    member.now_s += waited_s
    member.look()
    assert (OTHER in member.machine.awaited()) == (waited_s < TIMEOUT_S)


@pytest.mark.parametrize(
    ("found", "after_s", "is_lost"),
    [
        (OTHER, 1.0, False),
        ("", 1.0, True),
        ("127.0.0.1:2/successor", 1.0, True),
        ("", -1.0, False),  # it did not listen yet
        ("127.0.0.1:2/predecessor", -1.0, False),
    ],
)
def test_one_is_dead_when_it_listens_no_more(
    member: Member, found: str, after_s: float, is_lost: bool
) -> None:
    assert member.is_lost(found, after_s) == is_lost

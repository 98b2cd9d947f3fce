"""Groups whose members change; the members are threads of one process."""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import socket
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch

from torchrelay._group import Group, Op
from torchrelay._members import Configuration, Member, MemberRanks, _open
from torchrelay._mesh import Handle
from torchrelay.errors import (
    ArgumentError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    TorchRelayError,
    UnavailableError,
)
from waiting import eventually

TIMEOUT_S = 60.0
T = TypeVar("T")


class Members:
    """Members, each with a thread that runs its calls."""

    def __init__(self) -> None:
        self.all: list[Member] = []
        self._threads: dict[Member, ThreadPoolExecutor] = {}

    def add(self, count: int = 1) -> list[Member]:
        added = [Member("127.0.0.1") for _ in range(count)]
        self.all += added
        self._threads.update((member, ThreadPoolExecutor(1)) for member in added)
        return added

    def start(
        self,
        member: Member,
        uuid: int,
        handles: Sequence[str] | Set[str],
        timeout_s: float = TIMEOUT_S,
    ) -> Future[Configuration]:
        return self.submit(member, member.reconfigure, uuid, handles, timeout_s)

    def submit(self, member: Member, function: Callable[..., T], *arguments: Any) -> Future[T]:
        return self._threads[member].submit(function, *arguments)

    def form(self, uuid: int, members: Sequence[Member]) -> list[Configuration]:
        """Form a group of ``members``, and check that it works; return how each sees it."""
        handles = [member.handle for member in members]
        futures = [self.start(member, uuid, handles) for member in members]
        formed = [future.result() for future in futures]
        for rank, one in enumerate(formed):
            assert (one.uuid, one.rank, one.handles) == (uuid, rank, tuple(handles))
        self.sum(members)
        return formed

    def sum(self, members: Sequence[Member], times: int = 1) -> None:
        """Compare sums over the group of ``members`` with what they are."""
        sizes = [random.Random(times).choice([1, 1000, 300_000])] * times

        def run(member: Member) -> None:
            assert member.group is not None and member.configuration is not None
            for size in sizes:
                tensor = torch.full((size,), float(member.configuration.rank + 1))
                member.group.all_reduce(tensor, tensor, Op.SUM, TIMEOUT_S)
                assert tensor.eq(sum(range(1, len(members) + 1))).all()

        for future in [self.submit(member, run, member) for member in members]:
            future.result()

    def close(self) -> None:
        for member in self.all:
            member.close()
        for thread in self._threads.values():
            thread.shutdown()


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members()
    yield made
    made.close()


def test_alone_without_a_launcher_or_a_store() -> None:
    with Member() as member:
        one = member.reconfigure(1, {member.handle}, 0.0)
        assert (one.rank, one.size, one.former, one.completed_on_all) == (0, 1, (None,), 0)
        assert member.group is not None
        tensor = torch.ones(3)
        member.group.all_reduce(tensor, tensor, Op.SUM, 1.0)
        assert tensor.tolist() == [1, 1, 1]
    assert member.group is None


def test_shrink_grow_split_merge(members: Members) -> None:
    a, b, c = members.add(3)
    members.form(1, [a, b, c])
    members.form(2, [a, c])  # b, in the middle, is left out
    (d,) = members.add()
    members.form(3, [d, c, b, a])  # joins late; another order
    members.form(4, [a, b])
    members.form(5, [d, c])
    members.form(6, [c])
    members.form(7, [a, b, c, d])


def test_a_set_has_one_order(members: Members) -> None:
    made = members.add(3)
    handles = frozenset(member.handle for member in made)
    formed = [future.result() for future in [members.start(m, 1, handles) for m in made]]
    assert len({one.handles for one in formed}) == 1 and set(formed[0].handles) == handles
    assert sorted(one.rank for one in formed) == [0, 1, 2]


def test_what_completed_on_all(members: Members) -> None:
    a, b, c = members.add(3)
    assert [one.former for one in members.form(1, [a, b])] == [(None, None)] * 2
    members.sum([a, b], times=3)
    members.form(2, [c])
    formed = members.form(3, [a, b, c])
    assert formed[0].former == (1, 1, 2) and formed[0].completed == (4, 4, 1)
    assert [one.completed_on_all for one in formed] == [4, 4, 1]
    # What did not complete on all does not count; a failed attempt changes nothing.
    tensors = [torch.ones(1000), torch.ones(1000)]
    waiting = [
        members.submit(member, member.group.all_reduce, each, each, Op.SUM, TIMEOUT_S)
        for member, each in zip((a, c), tensors, strict=True)
        if member.group is not None
    ]
    b.abort()
    for one in waiting:
        with pytest.raises(PeerLostError) as caught:
            one.result()
        assert caught.value.ranks == (1,)
    with pytest.raises(OperationTimeoutError):
        members.start(a, 4, [a.handle, b.handle], 0.01).result()
    assert [one.completed_on_all for one in members.form(5, [a, c])] == [1, 1]


def test_wrong_arguments_change_nothing(members: Members) -> None:
    a, b = members.add(2)
    members.form(1, [a, b])
    handle = json.loads(b.handle)
    wrong = {
        "already used": (1, [a.handle]),
        "no integer of 64 bits": (1 << 63, [a.handle]),
        "given twice": (2, [a.handle, a.handle]),
        "own handle": (2, [b.handle]),
        "list or set": (2, []),
        "is not a handle": (2, [a.handle, "{}"]),
        "version": (2, [a.handle, json.dumps({**handle, "version": 2})]),
        "port is invalid": (2, [a.handle, json.dumps({**handle, "port": "1"})]),
        "token is invalid": (2, [a.handle, json.dumps({**handle, "token": "00"})]),
        "unexpected keyword": (2, [a.handle, json.dumps({**handle, "more": 1})]),
        "characters": (2, [a.handle, "[" * 5000]),
    }
    for message, (uuid, handles) in wrong.items():
        with pytest.raises(ArgumentError, match=message):
            a.reconfigure(uuid, handles, 1.0)
    members.sum([a, b])
    members.form(2, [a, b])


def test_who_does_not_come_is_named(members: Members) -> None:
    a, b, c, d = members.add(4)
    handles = [member.handle for member in (a, b, c, d)]
    early = members.start(c, 1, handles), members.start(a, 1, handles, 1.0)
    for future in early:  # a tells c
        with pytest.raises(OperationTimeoutError, match=r"ranks 1, 3 .*did not come") as caught:
            future.result()
        assert caught.value.ranks == (1, 3)
    with pytest.raises(OperationTimeoutError, match=r"rank [02] gave up") as late:
        members.start(b, 1, handles).result()
    assert late.value.ranks == (1, 3)
    with pytest.raises(ArgumentError, match="already used"):
        a.reconfigure(1, handles, 1.0)
    members.form(2, [a, b, c, d])


def test_who_has_left_is_named_at_once(members: Members) -> None:
    a, b, c = members.add(3)
    handles = [member.handle for member in (a, b, c)]
    b.close()
    for future in [members.start(member, 1, handles) for member in (a, c)]:
        with pytest.raises(PeerLostError, match=r"rank 1 .*ended or left") as caught:
            future.result()
        assert caught.value.ranks == (1,)
    # One that leaves while the others wait for a third.
    futures = [members.start(member, 2, [a.handle, c.handle, handles[1]]) for member in (a, c)]
    for future in futures:
        with pytest.raises(PeerLostError):
            future.result()
    members.form(3, [a, c])


def test_abort(members: Members) -> None:
    a, b = members.add(2)
    handles = [a.handle, b.handle]
    waiting = members.start(a, 1, handles)
    eventually(lambda: 1 in a._listener.used)  # it may have connected to b by now, or not
    a.abort()
    with pytest.raises(UnavailableError, match="was aborted"):
        waiting.result()
    with pytest.raises(PeerLostError, match="rank 0 gave up") as caught:
        members.start(b, 1, handles).result()
    assert caught.value.ranks == (0,)
    members.form(2, [a, b])
    a.abort()
    assert a.group is None and a.configuration is None
    members.form(3, [a, b])


def test_abort_when_the_group_has_just_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_ranks(ranks: MemberRanks, address: str, timeout_s: float) -> Group:
        group = _open(ranks, address, timeout_s)
        monkeypatch.setattr(group, "start_counting", member.abort)
        return group

    with Member("127.0.0.1", open_ranks) as member:
        with pytest.raises(UnavailableError, match="was aborted"):
            member.reconfigure(1, [member.handle], 1.0)
        assert member.group is None and member.configuration is None


def test_after_close(members: Members) -> None:
    a, b = members.add(2)
    a.close()
    for uuid, handles in enumerate(([a.handle], [a.handle, b.handle])):
        with pytest.raises(UnavailableError, match="was closed"):
            a.reconfigure(uuid, handles, 1.0)
    assert a.group is None


def test_a_forked_child_does_not_listen(members: Members) -> None:
    a, b = members.add(2)
    members.form(1, [a, b])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)  # until the parent closes the pipe
        os._exit(0)
    try:
        b.close()
        with pytest.raises(PeerLostError, match=r"rank 1 .*ended or left"):
            members.start(a, 2, [a.handle, b.handle]).result()
    finally:
        os.close(reader)
        os.close(writer)
        os.waitpid(child, 0)


def test_one_that_comes_when_all_is_over(members: Members) -> None:
    a, b, c = members.add(3)
    members.form(1, [a, b])
    late = members.start(c, 1, [a.handle, b.handle, c.handle])
    for uuid in itertools.count(2):
        members.form(uuid, [a, b])
        if late.done():
            break
    with pytest.raises(PeerLostError, match=r"reconfiguration 1 is over there; use a fresh uuid"):
        late.result()


def test_a_loopback_address_of_another_host(members: Members) -> None:
    a, b, c = members.add(3)
    elsewhere = json.dumps({**json.loads(b.handle), "network": "another"})
    handles = [a.handle, elsewhere, c.handle]
    for future in [members.start(member, 1, handles) for member in (a, c)]:
        with pytest.raises((UnavailableError, PeerLostError), match="set TORCHRELAY_TRANSPORT_INT"):
            future.result()


def test_members_that_disagree(members: Members) -> None:
    a, b, c = members.add(3)
    futures = [
        members.start(a, 1, [a.handle, b.handle]),
        members.start(b, 1, [b.handle, a.handle]),
    ]
    for future in futures:
        with pytest.raises(MismatchError, match="the handles of process"):
            future.result()
    # One that the others do not have is refused, and they go on.
    third = members.start(c, 2, [a.handle, b.handle, c.handle], 5.0)
    members.form(2, [a, b])
    with pytest.raises(TorchRelayError):
        third.result()
    members.form(3, [a, b, c])


def test_members_with_different_keys(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    (a,) = members.add()
    monkeypatch.setenv("TORCHRELAY_TRANSPORT_KEY", "ab" * 32)
    (b,) = members.add()
    for future in [members.start(member, 1, [a.handle, b.handle]) for member in (a, b)]:
        with pytest.raises(MismatchError, match="the key of process"):
            future.result()


def test_one_that_is_ahead_waits(members: Members) -> None:
    """A member may begin the next attempt while another one is in the last."""
    a, b, c = members.add(3)
    first = members.start(a, 1, [a.handle, b.handle])
    eventually(lambda: 1 in a._listener.used)
    ahead = members.start(c, 2, [a.handle, c.handle])
    eventually(lambda: a._listener.waiting)
    members.start(b, 1, [a.handle, b.handle]).result()
    first.result()
    members.start(a, 2, [a.handle, c.handle]).result()
    ahead.result()
    members.sum([a, c])
    assert not a._listener.waiting


STRANGERS = {
    "garbage": b"GET / HTTP/1.1\r\n\r\n" * 10,
    "too long": b"\xff" * 100_000,
    "nothing": b"",
    "not authentic": (40).to_bytes(4, "big") + bytes(56),
}


def test_strangers_are_turned_away(members: Members, caplog: pytest.LogCaptureFixture) -> None:
    a, b = members.add(2)
    where = Handle.parse(a.handle)
    with caplog.at_level(logging.WARNING, "torchrelay"):
        strangers = [
            socket.create_connection((where.address, where.port)) for _ in range(len(STRANGERS))
        ]
        for stranger, data in zip(strangers, STRANGERS.values(), strict=True):
            stranger.sendall(data)
        members.form(1, [a, b])
        # One that has the handle of a stale attempt.
        stale = members.start(b, 2, [a.handle, b.handle], 0.05)
        with pytest.raises(OperationTimeoutError):
            stale.result()
        members.form(3, [a, b])
    for stranger in strangers:
        stranger.close()
    assert "too much" in caplog.text and "lacks this member's token" in caplog.text


@pytest.mark.parametrize("seed", range(3))
def test_random_programs(members: Members, seed: int) -> None:
    run_program(members, seed, steps=25)


def run_program(members: Members, seed: int, steps: int) -> None:
    """Reconfigure at random, with members that come and go, do not come, or abort."""
    draw = random.Random(seed)
    made = members.add(3)
    for uuid in range(steps):
        event = draw.choice(["form", "form", "form", "add", "close", "abort", "absent"])
        if event == "add" and len(made) < 6:
            made += members.add()
        elif event == "close" and len(made) > 1:
            made.pop(draw.randrange(len(made))).close()
        elif event == "abort":
            draw.choice(made).abort()
        elif event == "absent" and len(made) > 1:
            chosen = draw.sample(made, draw.randint(2, len(made)))
            handles = [member.handle for member in chosen]
            absent = set(draw.sample(range(len(chosen)), draw.randint(1, len(chosen) - 1)))
            futures = [
                members.start(member, 1000 + uuid, handles, 0.3)
                for rank, member in enumerate(chosen)
                if rank not in absent
            ]
            for future in futures:
                with pytest.raises(OperationTimeoutError) as caught:
                    future.result()
                assert set(caught.value.ranks) >= absent  # and who came late on a busy machine
        parts = draw.sample(made, draw.randint(1, len(made)))
        cut = draw.randint(0, len(parts))
        with ThreadPoolExecutor(2) as pool:
            formed = [
                pool.submit(members.form, 2 * uuid + index, part)
                for index, part in enumerate((parts[:cut], parts[cut:]))
                if part
            ]
        for each in formed:
            each.result()

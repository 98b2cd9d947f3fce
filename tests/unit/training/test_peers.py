"""What members of an elastic job learn over their connections: who is there, and who is none."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest

from ranks import free_port
from torchrelay.training import _peers
from torchrelay.training._peers import Peers, join
from waiting import eventually


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def member(stack: ExitStack, ask_after_s: float = 0.01, port: int = 0, **changed: Any) -> Peers:
    arguments = {"secret": b"secret", "key_name": "name", "about": {}, **changed}
    peers = Peers(join("127.0.0.1", port), ask_after_s=ask_after_s, **arguments)
    return stack.enter_context(closing(peers))


def listening(stack: ExitStack) -> str:
    """Return the address of a process that is frozen: its kernel accepts connections."""
    sock = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    return join(*sock.getsockname())


def test_a_member_that_waits_learns_who_does_not_answer(stack: ExitStack) -> None:
    waiting, computing = member(stack), member(stack)
    frozen = listening(stack)
    waiting.others = {computing.address, frozen}
    waiting.waits_since_s = 1e-9
    eventually(lambda: waiting.unanswered(0.0) == {frozen})
    asked_s = waiting._asked_s
    waiting.begin()  # keeps the connections
    waiting.publish({"value": 1}, waiting.others)
    assert computing.received.get(timeout=60) == (waiting.member, {"value": 1})
    assert waiting.found[computing.address][0] == computing.member
    assert waiting._asked_s == asked_s


def test_a_member_that_does_not_wait_asks_anew_in_each_round(stack: ExitStack) -> None:
    here, other = member(stack), member(stack)
    here.publish({"value": 1}, [other.address])
    eventually(lambda: other.address in here.found)
    other.close()
    here.begin()
    here.publish({"value": 2}, [other.address])
    eventually(lambda: here.found.get(other.address, ("?", 0.0))[0] == "")


def test_one_that_could_not_be_reached_is_tried_again_when_it_comes(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_peers, "_REDIAL_S", 1e6)
    port = free_port()
    here = member(stack)
    here.publish({"value": 1}, [join("127.0.0.1", port)])
    eventually(lambda: here.found)
    late = member(stack, port=port)
    late.publish({"value": 2}, [here.address])
    assert late.received.get(timeout=60) == (here.member, {"value": 1})


def test_a_connection_that_is_given_up_is_not_made_again(stack: ExitStack) -> None:
    """Even if the cancellation of its task is lost."""
    here = member(stack)
    lost = here._keep_publishing(join("127.0.0.1", free_port()))
    asyncio.run_coroutine_threadsafe(lost, here._loop).result(timeout=60)
    assert not here._unreached


def test_a_member_closes_although_tasks_lose_their_cancellation(stack: ExitStack) -> None:
    here, other = member(stack), member(stack)
    other.publish({"value": 1}, [here.address])
    assert here.received.get(timeout=60)

    async def deaf() -> None:
        for _ in range(3):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(600)

    asyncio.run_coroutine_threadsafe(deaf(), here._loop)
    here.close()
    assert not here._thread.is_alive()


def test_strangers_are_turned_away_while_members_connect(stack: ExitStack) -> None:
    here, other = member(stack), member(stack)
    stranger = member(stack, secret=b"Secret", key_name="other")
    for data in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(40),
        b"\xff" * 100,
        b"\0\0\0\x10" + bytes(9),
    ):
        sock = stack.enter_context(socket.create_connection(_peers.split(here.address)))
        sock.sendall(data)
    stranger.publish({"value": 0}, [here.address])
    other.publish({"value": 1}, [here.address])
    assert here.received.get(timeout=60) == (other.member, {"value": 1})
    eventually(lambda: "token or key" in stranger.refusals.get(here.address, ""))
    assert here.received.empty()

"""Helper processes and the channels to them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrelay._helper import Channel, HelperProcess
from torchrelay._platform import anonymous_file
from torchrelay.errors import PeerLostError, ProtocolError

WAIT_S = 60.0

ECHO = """
import os, socket, sys
from torchrelay._helper import Channel
channel = Channel(socket.socket(fileno=int(sys.argv[1])))
message, descriptors = channel.receive()
channel.send((message, [os.pread(one, 100, 0) for one in descriptors], sys.argv[2:]))
sys.exit(message["code"])
"""


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    yield ours, other
    ours.close()
    other.close()


def memory(data: bytes) -> int:
    descriptor = anonymous_file("test")
    os.write(descriptor, data)
    return descriptor


def test_messages_and_descriptors_arrive_in_order(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    assert theirs.receive(0) is None
    files = [memory(b"a"), memory(b"b")]
    ours.send({"x": 1}, files)
    ours.send(("second", b"0" * 100_000))
    message, descriptors = theirs.receive(WAIT_S) or pytest.fail("nothing arrived")
    assert message == {"x": 1}
    assert [os.pread(one, 9, 0) for one in descriptors] == [b"a", b"b"]
    assert not any(map(os.get_inheritable, descriptors))
    assert theirs.receive(WAIT_S) == (("second", b"0" * 100_000), [])
    for one in (*files, *descriptors):
        os.close(one)


@pytest.mark.parametrize("how", ["close", "shut_down"])
def test_the_end_of_a_channel_is_noticed(pair: tuple[Channel, Channel], how: str) -> None:
    ours, theirs = pair
    getattr(ours, how)()
    with pytest.raises(PeerLostError):
        theirs.receive(WAIT_S)
    with pytest.raises(PeerLostError):
        theirs.send("anything")


def test_what_is_no_message_is_refused(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    with socket.socket(fileno=os.dup(ours.fileno())) as raw:
        raw.sendall(b"\0\0\0\4junk")
    with pytest.raises(ProtocolError, match="cannot be read"):
        theirs.receive(WAIT_S)


def test_a_helper_runs_and_its_end_is_described() -> None:
    file = memory(b"inherited")
    helper = HelperProcess([sys.executable, "-c", ECHO], [file])
    helper.channel.send({"code": 3}, [file])
    answer, _ = helper.channel.receive(WAIT_S) or pytest.fail("nothing arrived")
    assert answer == ({"code": 3}, [b"inherited"], [str(file)])
    with pytest.raises(PeerLostError):
        helper.channel.receive(WAIT_S)
    helper.wait(WAIT_S)
    assert (helper.exit_code, helper.exit_reason()) == (3, "ended with exit code 3")
    helper.kill()
    helper.channel.close()
    os.close(file)


def test_a_search_path_with_entries_that_imports_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere")])
    helper = HelperProcess([sys.executable, "-c", ECHO])
    helper.channel.send({"code": 0})
    assert helper.channel.receive(WAIT_S)
    helper.kill()
    helper.channel.close()


def test_a_killed_helper_ends() -> None:
    helper = HelperProcess([sys.executable, "-c", "import time; time.sleep(1000)"])
    assert helper.exit_code is None
    helper.kill()
    assert helper.exit_reason() == "was killed by SIGKILL"
    with pytest.raises(PeerLostError):
        helper.channel.receive(WAIT_S)
    helper.channel.close()

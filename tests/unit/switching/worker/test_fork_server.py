"""The process that workers are forked from: what it forks, and how its workers end."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from torchrelay._helper import Channel
from torchrelay.errors import PeerLostError
from torchrelay.switching.worker import _fork_server
from torchrelay.switching.worker._fork_server import ForkServer, Start

# What a worker does is said by the number of its threads.
PROGRAM = """
import os, signal, socket, sys, threading
from torchrelay._helper import Channel
from torchrelay.switching.worker._fork_server import serve
before()
channel, start, descriptors = serve(Channel(socket.socket(fileno=int(sys.argv[-1]))))
with os.fdopen(descriptors[0]) as file:
    channel.send((os.getpid(), start.arena, file.read(), sorted(os.listdir("/proc/self/fd"))))
channel.receive()
if start.threads < 0:
    os.kill(os.getpid(), -start.threads)
sys.exit(start.threads)
"""
BEFORE = {
    "nothing": "def before(): ...",
    "a thread": "def before(): threading.Thread(target=signal.pause, daemon=True).start()",
    "a GPU": "def before(): os.path.realpath = lambda name: '/dev/nvidia0'",
}


def server_after(before: str, monkeypatch: pytest.MonkeyPatch) -> ForkServer:
    program = PROGRAM.replace("before()\n", f"{BEFORE[before]}\nbefore()\n")
    monkeypatch.setattr(_fork_server, "PROGRAM", [sys.executable, "-c", program])
    server = ForkServer()
    received = server.channel.receive(60.0)
    assert received is not None
    server.can_fork = received[0]
    return server


def descriptor_of(text: str) -> int:
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    return reader


def first_of(channel: Channel) -> tuple[int, object, str, list[str]]:
    received = channel.receive(60.0)
    assert received is not None
    message: tuple[int, object, str, list[str]] = received[0]
    return message


def test_workers_are_forked_and_their_ends_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_after("nothing", monkeypatch)
    assert server.can_fork
    ends = {0: "ended with exit code 0", 7: "ended with exit code 7", -11: "was killed by SIGSEGV"}
    workers, opened = [], set()
    for code in ends:
        file = descriptor_of(f"for {code}")
        workers.append(server.start(Start({"of": code}, code, 1), [file]))
        os.close(file)
        worker = workers[-1]
        pid, arena, text, descriptors = first_of(worker.channel)
        assert (pid, arena, text) == (worker.pid, {"of": code}, f"for {code}")
        assert f"PPid:\t{server.process.pid}\n" in Path(f"/proc/{pid}/status").read_text()
        opened.add(len(descriptors))
        assert worker.exit_code is None
    assert len(opened) == 1  # none has what belongs to another
    for worker, (code, reason) in zip(workers, ends.items(), strict=True):
        worker.channel.send("end")
        worker.wait(60.0)
        assert worker.exit_reason() == reason and worker.exit_code == code
        worker.kill()
        assert worker.exit_code == code and not Path(f"/proc/{worker.pid}").exists()
        worker.channel.close()
    file = descriptor_of("")
    killed = server.start(Start({}, 0, 1), [file])
    killed.kill()
    assert killed.exit_code == -signal.SIGKILL and not Path(f"/proc/{killed.pid}").exists()
    killed.channel.close()
    server.end()
    with pytest.raises(PeerLostError):
        server.start(Start({}, 0, 1), [file])
    os.close(file)


def test_a_stopped_server_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_after("nothing", monkeypatch)
    file = descriptor_of("")
    worker = server.start(Start({}, 0, 1), [file])
    monkeypatch.setattr(_fork_server, "_REPLY_S", 0.1)
    os.kill(server.process.pid, signal.SIGSTOP)
    worker.kill()
    assert worker.exit_code == -signal.SIGKILL
    worker.channel.close()
    with pytest.raises(PeerLostError, match=r"did not answer within 0\.1 s"):
        server.start(Start({}, 0, 1), [file])
    os.close(file)
    server.end()


@pytest.mark.parametrize("before", ["a thread", "a GPU"])
def test_a_process_that_cannot_be_forked_becomes_the_worker(
    before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_after(before, monkeypatch)
    assert server.can_fork is False
    file = descriptor_of("once")
    worker = server.start(Start({}, 3, 1), [file])
    os.close(file)
    pid, _, text, _ = first_of(worker.channel)
    assert (pid, text) == (server.process.pid, "once")
    worker.channel.send("end")
    worker.wait(60.0)
    assert worker.exit_reason() == "ended with exit code 3"
    worker.kill()
    worker.channel.close()

"""Clients of `torchrelay serve` that stop half-way, read nothing or are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serving import Server, X, get, post, running, slow_request, value
from waiting import eventually

# The first test of the file starts three processes that import torch: minutes where many others
# run.
pytestmark = pytest.mark.timeout(400)


def test_clients_that_send_half_a_request_or_vanish_harm_nobody(server: Server) -> None:
    url, before = server.url, connections(server)
    host, port = url.removeprefix("http://").split(":")
    for sent in (
        b"",
        b"POST /v2/models/chain/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{",
        b"\x00\xff" * 1000 + b"\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=100) as raw:
            raw.sendall(sent)
    slow = [socket.create_connection((host, int(port)), timeout=100) for _ in range(20)]
    for raw in slow:
        raw.sendall(b"POST /v2/models/chain/infer HTTP/1.1\r\nContent-Le")
    assert calls(url, 8) == [200] * 8
    for raw in slow:
        raw.close()
    eventually(lambda: connections(server) <= before)


def test_clients_that_read_nothing_harm_nobody(server: Server) -> None:
    url = server.url
    host, port = url.removeprefix("http://").split(":")
    x = {"name": "x", "datatype": "FP32", "shape": [1500, 64], "data": [1.0] * 96_000}
    body = json.dumps({"inputs": [x]}).encode()  # the answer takes about 2 MB
    before = connections(server)
    head = (
        "POST /v2/models/chain/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    served = value(url, "torchrelay_served_total")
    deaf = []
    for _ in range(6):
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect((host, int(port)))
        raw.sendall(head.encode() + body)
        deaf.append(raw)
    eventually(lambda: value(url, "torchrelay_served_total") >= served + 6)
    assert calls(url, 8) == [200] * 8
    for raw in deaf:
        raw.close()
    eventually(lambda: connections(server) <= before)


def calls(url: str, count: int) -> list[int]:
    """The status codes of so many requests at once."""
    body = json.dumps({"inputs": [X]}).encode()
    with ThreadPoolExecutor(count) as pool:
        answers = [pool.submit(post, url, "/v2/models/chain/infer", body) for _ in range(count)]
        return [answer.result()[0] for answer in answers]


def connections(server: Server) -> int:
    """The sockets of the server's process, with those of its workers."""
    found = 0
    for descriptor in Path(f"/proc/{server.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(descriptor).startswith("socket:")
    return found


WAITING_CLIENT = """
import http.client, socket, sys
host, port = sys.argv[1].removeprefix("http://").split(":")
connection = http.client.HTTPConnection(host, port, timeout=600)
connection.connect()
# Its kernel forgets the connection at once; otherwise, it answers the server's probes for a minute.
connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_LINGER2, -1)
connection.request("POST", "/v2/models/slow/infer", sys.argv[2])
connection.getresponse()
"""


@contextlib.contextmanager
def stopped_worker(url: str) -> Iterator[None]:
    """A request that computes until the end of the block: its worker is stopped."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, url, "/v2/models/slow/infer", slow_request(8.0))
        eventually(lambda: bool(running(url)))
        (pid,) = running(url)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
            assert running(url) == [pid] and not answer.done()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert answer.result()[0] == 200


def test_clients_that_are_killed_while_they_compute_or_wait_free_their_places(url: str) -> None:
    def waiting() -> int:
        return len(json.loads(get(url, "/status.json")[1])["queue"])

    def counts() -> dict[str, int]:
        status = json.loads(get(url, "/status.json")[1])
        return {"deaths": status["worker_deaths"], "served": status["counts"]["served"]}

    # Killed while its request computes: the request ends, its answer goes nowhere.
    before = counts()
    client = subprocess.Popen(
        [sys.executable, "-c", WAITING_CLIENT, url, slow_request(5.0).decode()]
    )
    eventually(lambda: bool(running(url)))
    client.kill()
    client.wait()
    eventually(lambda: counts()["served"] > before["served"])
    assert counts()["deaths"] == before["deaths"]

    # Killed while it waits.
    request = slow_request(0.0)
    with stopped_worker(url):
        command = [sys.executable, "-c", WAITING_CLIENT, url, request.decode()]
        clients = [subprocess.Popen(command) for _ in range(2)]
        eventually(lambda: waiting() == 2)
        for client in clients:
            client.kill()
            client.wait()
        eventually(lambda: waiting() == 0)

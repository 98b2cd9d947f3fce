"""The server of scripts outlives its clients, whenever they are killed."""

from __future__ import annotations

import random
import socket
import subprocess
import time
from pathlib import Path

import preloaded


def test_clients_are_killed_at_any_moment() -> None:
    client, times = preloaded.python(), random.Random(0)
    command = [client, "-c", "print('ran')"]
    start_s = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    longest_s = time.monotonic() - start_s
    for _ in range(60):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(times.uniform(0, 1.2 * longest_s))
        process.kill()
        process.wait()
    for _ in range(60):  # before they ask for anything
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
            killed.connect(str(Path(client).with_name("server")))
    assert subprocess.run(command, check=True, capture_output=True).stdout == b"ran\n"

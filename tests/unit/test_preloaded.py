"""The server of scripts outlives its clients, whenever they are killed, and gives scripts their
files.
"""

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
    subprocess.run(command, check=True, capture_output=True)  # starts the server
    start_s = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    longest_s = min(time.monotonic() - start_s, 0.5)
    for _ in range(60):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(times.uniform(0, 1.2 * longest_s))
        process.kill()
        process.wait()
    for _ in range(60):  # before they ask for anything
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
            killed.connect(str(Path(client).with_name("server")))
    assert subprocess.run(command, check=True, capture_output=True).stdout == b"ran\n"


def test_a_script_has_the_files_that_were_passed_to_it() -> None:
    script = """
import os, subprocess, sys
passed = [os.dup(0) for _ in range(50)]  # numbers that the server's own files have, too
inner = "import os, sys; [os.fstat(int(number)) for number in sys.argv[1:]]"
subprocess.run([sys.executable, "-c", inner, *map(str, passed)], pass_fds=passed, check=True)
"""
    ended = subprocess.run(
        [preloaded.python(), "-c", script],
        env=preloaded.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr

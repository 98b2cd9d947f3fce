"""How a server ends: on a signal, on a second one, and with a switcher that has failed."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path

import pytest

import preloaded
from serving import MODELS, get, post, running, slow_request
from waiting import eventually

pytestmark = pytest.mark.timeout(400)

FILE = """
[server]
port = 0
arena_bytes = 1_000_000
request_bytes = 1_000_000
workers = 1
threads = 1
repository_control = true
grace_s = {grace_s}

[models.slow]
factory = "models.py:slow"
inputs = [
  {{ name = "x", datatype = "FP32", shape = [1, 8] }},
  {{ name = "seconds", datatype = "FP32", shape = [] }},
]

[models.hanging]
factory = "models.py:hanging"
kwargs = {{ builder = 0 }}
load = false
inputs = [{{ name = "x", datatype = "FP32", shape = [1, 8] }}]
"""

# The switcher fails as soon as the file that is the second argument exists.
PROGRAM = """
import os, sys, time
from pathlib import Path
from torchrelay.cli import main
from torchrelay.switching.daemon import _daemon

decide = _daemon.Daemon.decide

def failing(self):
    if os.path.exists(sys.argv[-1] + ".fail"):
        raise ValueError("a mistake in the daemon")
    return min(decide(self), time.monotonic() + 0.05)

_daemon.Daemon.decide = failing
main()
"""


@contextmanager
def server(folder: Path, grace_s: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    shutil.copy(MODELS, folder / "models.py")
    file = folder / "models.toml"
    file.write_text(FILE.format(grace_s=grace_s))
    process = subprocess.Popen(
        [preloaded.python(), "-c", PROGRAM, "serve", str(file)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[-1].startswith("serving on"), lines
        yield process, lines[-1].split()[-1]
    finally:
        process.kill()
        process.communicate()


def in_background(url: str, path: str, body: bytes) -> None:
    def run() -> None:
        with suppress(OSError, HTTPException, ValueError):  # the server ends first
            post(url, path, body)

    threading.Thread(target=run, daemon=True).start()


def test_a_port_in_use_is_refused_before_models_are_built(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text("def slow():\n    raise SystemExit('a model was built')\n")
    file = tmp_path / "models.toml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file.write_text(FILE.format(grace_s=1.0).replace("port = 0", f"port = {port}"))
        ended = subprocess.run(
            [preloaded.python(), "-m", "torchrelay", "serve", str(file)],
            capture_output=True,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert f"cannot serve on 127.0.0.1, port {port}" in " ".join(ended.stderr.split()), ended.stderr
    assert "a model was built" not in ended.stderr


def test_a_signal_ends_the_server_though_a_load_hangs(tmp_path: Path) -> None:
    with server(tmp_path, grace_s=1.0) as (process, url):
        in_background(url, "/v2/repository/models/hanging/load", b"{}")
        in_background(url, "/v2/models/slow/infer", slow_request(600.0))
        eventually(lambda: bool(running(url)))
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 1


def test_a_second_signal_ends_the_server_at_once(tmp_path: Path) -> None:
    with server(tmp_path, grace_s=1000.0) as (process, url):
        in_background(url, "/v2/models/slow/infer", slow_request(600.0))
        eventually(lambda: bool(running(url)))
        process.send_signal(signal.SIGTERM)

        eventually(lambda: get(url, "/v2/health/ready")[0] == 503)
        assert get(url, "/v2/health/live")[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 128 + signal.SIGTERM


def test_a_failed_switcher_ends_the_server(tmp_path: Path) -> None:
    with server(tmp_path, grace_s=1.0) as (process, url):
        assert get(url, "/v2/health/live")[0] == 200
        (tmp_path / "models.toml.fail").touch()
        assert process.wait(100) != 0

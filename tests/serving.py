"""A running `torchrelay serve` with the models of `switching_models`, and requests to it; and
workers that start fast.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import preloaded
import switching_models as models
from torchrelay._helper import HelperProcess
from torchrelay.switching.worker import _fork_server
from waiting import eventually

MODELS = Path(models.__file__)
FILE = """
[server]
port = 0
arena_bytes = 4_000_000
request_bytes = 1_000_000
threads = 1
run_timeout_s = 600
grace_s = 60  # a loaded machine ends workers slowly
repository_control = true

[models.chain]
factory = "models.py:chain"
kwargs = { depth = 3 }
seed = 4
inputs = [{ name = "x", datatype = "FP32", shape = [-1, 64] }]

[models.mixed]
factory = "models.py:mixed"
inputs = [{ name = "tokens", datatype = "INT64", shape = [-1, -1], example = [2, 7] }]

[models.slow]
factory = "models.py:slow"
inputs = [
  { name = "x", datatype = "FP32", shape = [1, 8] },
  { name = "seconds", datatype = "FP32", shape = [] },
]

[models.lazy]
factory = "imports:make"
load = "request"
keep_s = 0.5
inputs = [{ name = "input", datatype = "FP32", shape = [-1, 4] }]

[models.faulty]
factory = "models.py:faulty"
load = false
inputs = [
  { name = "x", datatype = "FP32", shape = [1, 4] },
  { name = "what", datatype = "INT64", shape = [] },
]
"""


# The folder comes last on the path: what is in it does not hide the standard library.
IMPORTS = """
import colorsys, torch

def make():
    return torch.nn.Linear(4, 2)
"""

X = {"name": "x", "datatype": "FP32", "shape": [1, 64], "data": [1.0] * 64}


@pytest.fixture(scope="module", autouse=True)
def preloaded_workers() -> Iterator[None]:
    """Start the workers of a ``Switcher`` in this process without importing torch each time.

    Those of a server (``torchrelay serve``) and of scripts start as they do for users.
    """

    def start(command: list[str]) -> HelperProcess:
        return HelperProcess([preloaded.python(), *command[1:]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fork_server, "HelperProcess", start)
        yield


class Server(NamedTuple):
    """A running `torchrelay serve`."""

    url: str
    pid: int
    folder: Path


def serve(folder: Path) -> Iterator[Server]:
    """Serve from a folder; then check that a SIGTERM lets a running request finish."""
    shutil.copy(MODELS, folder / "models.py")
    (folder / "models.toml").write_text(FILE)
    (folder / "imports.py").write_text(IMPORTS)
    (folder / "colorsys.py").write_text("raise ImportError('the file beside the models')")
    command = [
        preloaded.python(),
        "-c",
        "from torchrelay.cli import main; main()",
        "serve",
        str(folder / "models.toml"),
    ]
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5)]
        assert lines.pop(0).startswith("device: cpu, arena of"), lines
        for line, name in zip(lines, ("chain", "mixed", "slow"), strict=False):
            assert line.startswith(f"{name}: "), lines
        address = lines[3].split()[-1]
        yield Server(address, process.pid, folder)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(post, address, "/v2/models/slow/infer", slow_request(4.0))
            eventually(lambda: bool(running(address)))
            process.send_signal(signal.SIGTERM)
            assert answer.result()[0] == 200
        assert process.wait(100) == 0
    finally:
        process.kill()
        process.communicate()


def get(url: str, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url + path, timeout=100) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def post(
    url: str, path: str, body: bytes, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"} | (headers or {})
    request = urllib.request.Request(url + path, body, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=100) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def slow_request(seconds: float) -> bytes:
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [1, 8], "data": [1.0] * 8},
        {"name": "seconds", "datatype": "FP32", "shape": [], "data": [seconds]},
    ]
    return json.dumps({"inputs": inputs}).encode()


def running(url: str) -> list[int]:
    """The processes that compute a request."""
    workers = json.loads(get(url, "/status.json")[1])["workers"]
    return [worker["pid"] for worker in workers if worker["state"] == "running"]


def value(url: str, name: str) -> float:
    """The sum of the metrics whose names start so."""
    lines = get(url, "/metrics")[1].decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

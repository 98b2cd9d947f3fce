"""A program written for PipeSwitch's six functions runs on the CPU's shared cache."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import preloaded

PROGRAM = """
import sys, torch

if sys.argv[1] == "daemon":
    torch.cuda.allocate_shared_cache()
    torch.cuda.send_shared_cache()
    region = torch.cuda.insert_shared_cache_for_parameter()
    torch.manual_seed(0)
    model = region.put(torch.nn.Linear(8, 8))
    print("copied", flush=True)
    sys.stdin.read()
else:
    torch.cuda.recv_shared_cache()
    torch.manual_seed(0)
    expected = torch.nn.Linear(8, 8)
    sys.stdin.readline()
    for _ in range(2):
        parameters = torch.cuda.insert_shared_cache_for_parameter()
        computation = torch.cuda.insert_shared_cache_for_computation()
        weight = parameters.empty((8, 8))
        assert torch.equal(weight, expected.weight)
        x = computation.empty((3, 8)).fill_(2.0)
        assert torch.equal(x @ weight.t(), torch.full((3, 8), 2.0) @ expected.weight.t())
        torch.cuda.clear_shared_cache()
    print("same", flush=True)
"""


def test_the_six_calls_of_the_original(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environ = {
        "TORCHRELAY_SWITCHING_ARENA_BYTES": str(1 << 20),
        "TORCHRELAY_SWITCHING_DEVICE": "cpu",
        "TORCHRELAY_PIPESWITCH_SOCKET": str(tmp_path / "cache.sock"),
        "PYTHONWARNINGS": "ignore",
    }
    command = [preloaded.python(), "-m", "torchrelay.compat", str(script)]
    daemon, worker = (
        subprocess.Popen(
            [*command, role],
            env=environ,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for role in ("daemon", "worker")
    )
    try:
        assert daemon.stdout is not None and daemon.stdout.readline() == "copied\n"
        output, errors = worker.communicate("go\n", timeout=100)
        assert (output, worker.returncode) == ("same\n", 0), errors
        _, errors = daemon.communicate("", timeout=100)
        assert daemon.returncode == 0, errors
    finally:
        for process in (daemon, worker):
            process.kill()
            process.communicate()


def test_functions_are_installed_on_request_only_and_mistakes_are_named() -> None:
    program = """
import torch, torchrelay.switching
assert not hasattr(torch.cuda, "allocate_shared_cache")
from torchrelay.compat import install, pipeswitch
from torchrelay.errors import ArgumentError
assert not hasattr(torch.cuda, "allocate_shared_cache")
install("pipeswitch"); install("pipeswitch")
assert torch.cuda.allocate_shared_cache is pipeswitch.allocate_shared_cache
def refused(call, *arguments):
    try: call(*arguments)
    except ArgumentError as error: print(error)
    else: raise SystemExit(1)
for call in (torch.cuda.send_shared_cache, torch.cuda.clear_shared_cache,
             torch.cuda.insert_shared_cache_for_parameter,
             torch.cuda.insert_shared_cache_for_computation):
    refused(call)
torch.cuda.allocate_shared_cache()
refused(torch.cuda.allocate_shared_cache)
refused(torch.cuda.recv_shared_cache)
torch.cuda.send_shared_cache = print
refused(install, "pipeswitch")
"""
    settings = {
        "TORCHRELAY_SWITCHING_ARENA_BYTES": str(1 << 20),
        "TORCHRELAY_SWITCHING_DEVICE": "cpu",
    }
    done = subprocess.run(
        [preloaded.python(), "-c", program],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == [
        "no shared cache to send",
        "no shared cache to clear",
    ]
    assert "can have one" in lines[4] and "patched" in lines[6]

"""The demo's training over two hosts whose gradients a switch sums."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import preloaded
from facts import write_facts
from ranks import free_port
from torchrelay.aggregation.switch import SwitchServer, UdpDataPlane
from torchrelay.demo.code_graph import split_facts
from torchrelay.demo.options import DemoOptions


def start(options: DemoOptions, switch: str) -> list[subprocess.Popen[str]]:
    """One process on each of two hosts."""
    command = [preloaded.python(), "-m", "torchrelay.demo.worker", options.to_json()]
    environ = {
        **os.environ,
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
        "TORCHRELAY_AGGREGATION_SWITCH": switch,
    }
    return [
        subprocess.Popen(
            command,
            env={**environ, "RANK": str(rank), "TORCHRELAY_HOST_ID": f"host{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def reciprocal_rank(processes: list[subprocess.Popen[str]]) -> float:
    """The mean one of the test questions, from rank 0's table."""
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    (row,) = re.findall(r"^│ test +│(.*)$", outputs[0], re.MULTILINE)
    return float(row.split("│")[1])


@pytest.mark.timeout(400)
def test_the_switch_leaves_accuracy_as_it_is(tmp_path: Path) -> None:
    facts = [(f"n{n}", f"plus {k}", f"n{(n + k) % 40}") for n in range(40) for k in range(1, 7)]
    for split, part in split_facts(facts, 0.1, seed=0).items():
        write_facts(tmp_path / f"{split}.txt", part)
    options = DemoOptions(
        tmp_path, epochs=40, dim=16, batch_size=100, regularisation=0.001, serve=False
    )
    with SwitchServer(UdpDataPlane(port=0)) as server:
        # As on one host; it learns that without a switch too.
        assert reciprocal_rank(start(options, server.address)) > 0.9
        assert server.stats().counts["completed"] > 100

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from torchrelay import telemetry


def test_without_a_handler_nothing_happens() -> None:
    telemetry.count("x")
    telemetry.event("y", rank=1)
    with telemetry.span("z"):
        pass


def test_the_collector_sums() -> None:
    collector = telemetry.Collector()
    with telemetry.handling(collector):
        telemetry.count("bytes", 3)
        telemetry.count("bytes", 4, plane="shm")
        telemetry.event("fallback", rank=2)
        with telemetry.span("work"):
            sum(range(10000))
    telemetry.count("bytes", 100)
    assert collector.counts == {"bytes": 7}
    assert collector.events == [("fallback", {"rank": 2})]
    assert collector.seconds["work"] > 0


def test_a_trace_opens_in_chrome(tmp_path: Path) -> None:
    trace = telemetry.ChromeTrace()
    with telemetry.handling(trace), telemetry.span("step", number=1):
        telemetry.count("bytes", 8)
        telemetry.event("retry")
    trace.write(tmp_path / "trace.json")
    records = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(r["name"], r["ph"]) for r in records] == [
        ("bytes", "i"),
        ("retry", "i"),
        ("step", "X"),
    ]
    assert records[2]["args"] == {"number": 1}
    assert records[2]["ts"] <= records[0]["ts"] <= records[2]["ts"] + records[2]["dur"]


def test_the_rooms_report(tmp_path: Path) -> None:
    program = """
import sys, torch, torch.distributed as dist, torchrelay.aggregation
from torchrelay import deferred, parameters, telemetry
from torchrelay.compat import adapm
trace = telemetry.ChromeTrace()
with telemetry.handling(trace):
    dist.init_process_group("sml", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3), async_op=True).wait()
    deferred.materialize_module(deferred.deferred_init(torch.nn.Linear, 2, 2))
    adapm.setup(8, 1)
    server = adapm.Server(4)
    worker = adapm.Worker(0, server)
    worker.push(torch.tensor([1]), torch.ones(4))
    worker.close()
    server.close()
    dist.destroy_process_group()
trace.write(sys.argv[1])
"""
    path = tmp_path / "trace.json"
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=100)
    spans = [
        record for record in json.loads(path.read_text())["traceEvents"] if record["ph"] == "X"
    ]
    assert [record["name"] for record in spans] == [
        "aggregation.all_reduce",
        "aggregation.collective",
        "deferred.materialize_module",
        "parameters.access",
    ]
    assert spans[0]["args"] == {"size_bytes": 12}

from __future__ import annotations

import json
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
    assert [(r["name"], r["ph"]) for r in records] == [("bytes", "i"), ("retry", "i"), ("step", "X")]
    assert records[2]["args"] == {"number": 1}
    assert records[2]["ts"] <= records[0]["ts"] <= records[2]["ts"] + records[2]["dur"]

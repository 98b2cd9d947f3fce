"""Prometheus metrics of the server."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from torchrelay.switching._switcher import Switcher
from torchrelay.switching.daemon._daemon import COUNTERS

__all__ = ["ServerMetrics"]

_PARTS = {
    "queue": "waiting for a worker",
    "switch": "until the model's first group is in place, or all of a model that arrives whole",
    "compute": "the forward pass, waiting for later groups included",
}


class ServerMetrics(Collector):
    """The metrics of one server: the switcher's status at the time of the scrape."""

    def __init__(self, switcher: Switcher) -> None:
        self._switcher = switcher
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        status = self._switcher.status()
        free = sum(block["bytes"] for block in status["blocks"] if not block["model"])
        for name, text, value in (
            ("arena_bytes", "Size of the arena", status["arena_bytes"]),
            ("arena_free_bytes", "Bytes no model holds", free),
            ("queue_length", "Requests waiting", len(status["queue"])),
            ("sequences", "Sequences that are generated, or wait", len(status["sequences"])),
            (
                "stash_bytes",
                "Keys and values in host memory",
                sum(one["stash_bytes"] for one in status["sequences"]),
            ),
        ):
            yield GaugeMetricFamily(f"torchrelay_{name}", text, value=value)
        yield CounterMetricFamily(
            "torchrelay_worker_deaths", "Workers that ended unasked", value=status["worker_deaths"]
        )
        workers = GaugeMetricFamily("torchrelay_workers", "Worker processes", labels=["state"])
        for state in ("starting", "loading", "running", "generating", "training", "standby"):
            count = sum(worker["state"] == state for worker in status["workers"])
            workers.add_metric([state], count)
        yield workers
        resident = GaugeMetricFamily(
            "torchrelay_model_resident", "1 if all in the arena", labels=["model"]
        )
        for model in status["models"]:
            resident.add_metric([model["name"]], int(model["resident"]))
        yield resident
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"torchrelay_{name}", text, value=status["counts"][name])
        for part, text in _PARTS.items():
            times = SummaryMetricFamily(
                f"torchrelay_{part}_seconds", f"Time of a request: {text}", labels=["model", "kind"]
            )
            for model in status["models"]:
                for kind, count in model["requests"].items():
                    seconds = model["seconds"][kind][part]
                    times.add_metric([model["name"], kind], count, seconds)
            yield times

    def render(self) -> tuple[bytes, str]:
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
